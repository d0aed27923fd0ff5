"""Forks the fork servers and the commands that tests need from one process that has imported torch already.

Each graph that a test opens starts a fork server: an interpreter that imports torch, which takes more than a second of a core, and a suite
opens hundreds. `install` makes `subprocess.Popen` fork it instead. The process is real: it runs `main` of
flowrt/processes/fork_server.py, in a session of its own, with its own descriptors and environment, as a child of the process that starts
it. The processes that tokenize text begin in the same way.

So do commands that a test starts, `python -m flowrt run` and the like: each has its own arguments, environment, folder and streams. It
forks processes that wait to become its children (the spares) before it runs. What differs from a command that a user starts: torch is
imported already. A host server of the engine `local` is such a command, too. A real interpreter starts where the environment differs in
what imports depend on, on a terminal, or in a shell.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import inspect
import io
import json
import os
import re
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, Protocol

POLL_SECONDS = 0.001
MODULES = ("flowrt.processes.fork_server", "flowrt.serving.tokenizer_process")  # `python -P -m` these
INTERNAL = (["-P", "-m", "flowrt.workers.start_check"], ["-P", "-m", "flowrt.hosts.server"])
COMMANDS = (
    "flowrt.hosts.server",
    "flowrt.cli.app",
    "flowrt.cli.chat",
    "flowrt.cli.run",
    "flowrt.cli.serve",
    "flowrt.cli.up",
    "flowrt.api.opening",
)
STARTING = {"LLM", "bench", "chaos", "chat", "demo", "open", "resume", "run", "serve", "start"}  # words of commands that start a graph
_ROOM, _ROOM_BYTES = "ZYGOTE_ROOM", 1 << 15  # for the environments of forks in /proc
_HEADER = 4  # bytes of a length and of a pid
# Without effect on what has been imported. The import path is that of the process that starts the other one. transformers sets the folder
# of torch's compiler, and library_weights.py how transformers reads: each graph that is opened later must still be a fork.
_FREE_VARIABLES = (
    "FLOWRT_",
    "PYTEST_",
    "UCX",
    "TOKENIZERS_",
    "TORCHINDUCTOR_CACHE_DIR",
    "HF_DEACTIVATE_ASYNC_LOAD",
    "PYTHONPATH",
    "COLUMNS",
    "HOME",
    "PWD",
    "OLDPWD",
    "NOTIFY_SOCKET",
    "_",
)
SPARE = "spare"  # the name of a spare that has become nothing; it ends with its command
_PR_SET_NAME, _MADV_COLLAPSE, _HUGE_BYTES = 15, 25, 1 << 21
_INTERPRETER = sys.executable
_original = subprocess.Popen._execute_child  # type: ignore[attr-defined]
_parameters = list(inspect.signature(_original).parameters)[1:]
_zygote: Zygote | None = None


class Forks(Protocol):
    """Where the forks of a process come from."""

    def fork(self, what: Mapping[str, Any], descriptors: Sequence[int]) -> int:
        """Start `what` as a child of this process. Returns its pid; 0: a new interpreter has to do it."""


class Zygote:
    """The process that forks, and this side's end of its connection."""

    def __init__(self) -> None:
        from flowrt.launcher.launcher import PRELOAD
        from flowrt.launcher.transport_choice import BETWEEN
        from flowrt.processes.fork_server_process import _environment
        from flowrt.transports.registry import module_of, unavailable_reason

        self.parent, self.lock = os.getpid(), threading.Lock()
        self.connection, theirs = socket.socketpair()
        transports = [module_of(scheme) for scheme in BETWEEN if unavailable_reason(scheme) is None]
        command = [_INTERPRETER, "-P", __file__, str(theirs.fileno()), os.pathsep.join(sys.path), *PRELOAD, *transports]
        environment = significant(_environment("")) | {_ROOM: "x" * _ROOM_BYTES}
        with theirs, contextlib.ExitStack() as undo:
            undo.callback(self.connection.close)
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], env=environment, start_new_session=True
            )
            undo.pop_all()
        atexit.register(self.close)

    def fork(self, what: Mapping[str, Any], descriptors: Sequence[int]) -> int:
        with self.lock:
            _send(self.connection, what, descriptors)
            return _read_pid(self.connection)

    def close(self) -> None:
        if os.getpid() == self.parent:
            self.connection.close()
            self.process.wait()


class Shared:
    """The zygote of this process, made at first use."""

    def fork(self, what: Mapping[str, Any], descriptors: Sequence[int]) -> int:
        return _shared().fork(what, descriptors)


class Spares:
    """The connections to children of this process, each of which becomes what it is to be once. A fork of this process has its own."""

    def __init__(self, imported: _Imported) -> None:
        self.imported = imported
        self.connections: list[socket.socket] = []
        self.renew()
        os.register_at_fork(after_in_child=lambda: self.connections and self.renew())

    def renew(self) -> None:
        for connection in self.connections:
            connection.close()
        self.connections, pid, made = [], os.getpid(), []
        for _ in MODULES:
            ours, theirs = socket.socketpair()
            if os.fork() == 0:
                _wait_as_spare(theirs, pid, self.imported)
            theirs.close()
            made.append(ours)
        self.connections = made

    def fork(self, what: Mapping[str, Any], descriptors: Sequence[int]) -> int:
        if not self.connections or "module" not in what:
            return 0
        with self.connections.pop() as connection:
            _send(connection, what, descriptors)
            return _read_pid(connection)


def install(forks: Forks | None = None) -> None:
    """From now on, what this process starts is forked where it can be."""
    source: Forks = forks or Shared()

    def execute(process: subprocess.Popen[Any], *given: Any) -> None:
        options = dict(zip(_parameters, given, strict=True))
        found = _forkable(options)
        pid = source.fork(*found) if found is not None else 0
        if not pid:
            _original(process, *given)
            return
        process.pid = pid
        process._child_created = True  # type: ignore[attr-defined]
        names = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        process._close_pipe_fds(*(options[name] for name in names))  # type: ignore[attr-defined]

    subprocess.Popen._execute_child = execute  # type: ignore[attr-defined]


def descriptor() -> int:
    """The connection to what `pids` names; -1 while there is none."""
    return -1 if _zygote is None else _zygote.connection.fileno()


def pids() -> frozenset[int]:
    """What runs beside all tests of this process."""
    return frozenset() if _zygote is None else frozenset({_zygote.process.pid})


def start_early() -> None:
    """For tests that look for processes that a run has left behind."""
    _shared()


def _shared() -> Zygote:
    global _zygote
    if _zygote is None or _zygote.parent != os.getpid():
        _zygote = Zygote()
    return _zygote


def _forkable(options: Mapping[str, Any]) -> tuple[dict[str, Any], list[int]] | None:
    """What a fork is to become, and its descriptors: the streams, then the one that is passed."""
    command = options["args"]
    is_plain = isinstance(command, list) and not (options["preexec_fn"] or options["shell"] or options["gid"] or options["uid"])
    if not is_plain or options["process_group"] >= 0 or options["umask"] >= 0 or command[0] != _INTERPRETER:
        return None
    words = list(map(os.fspath, command[1:]))
    what: dict[str, Any] = {
        "environment": dict(os.environ if options["env"] is None else options["env"]),
        "cwd": os.fspath(options["cwd"] or os.getcwd()),
        "new_session": options["start_new_session"],
    }
    given = (options["p2cread"], options["c2pwrite"], options["errwrite"])
    streams = [stream if stream >= 0 else number for number, stream in enumerate(given)]
    if words[:2] == ["-P", "-m"] and words[2] in MODULES and list(options["pass_fds"]) == [int(words[3])]:
        return what | {"module": words[2], "arguments": words[4:]}, [*streams, int(words[3])]
    names = set(re.findall(r"\w+", " ".join(words[1:3])))
    is_command = words[:2] == ["-m", "flowrt"] or (words[0] == "-c" and "flowrt" in names)
    if not (is_command and names & STARTING) and words[:3] not in INTERNAL and not _is_script(os.path.join(what["cwd"], words[0])):
        return None
    if options["pass_fds"] or any(map(os.isatty, streams)) or not os.access(what["cwd"], os.X_OK):
        return None
    return what | {"command": words}, streams


def _is_script(path: str) -> bool:
    return path.endswith(".py") and b"import flowrt" in Path(path).read_bytes()


def significant(environment: Mapping[str, str]) -> dict[str, str]:
    """What of an environment a fork cannot differ in."""
    return {name: value for name, value in environment.items() if not name.startswith(_FREE_VARIABLES)}


# Both sides.


def _send(connection: socket.socket, what: Mapping[str, Any], descriptors: Sequence[int]) -> None:
    data = json.dumps(what).encode()
    socket.send_fds(connection, [len(data).to_bytes(_HEADER, "little")], list(descriptors))
    connection.sendall(data)


def _read_pid(connection: socket.socket) -> int:
    response = connection.recv(_HEADER)
    if len(response) < _HEADER:
        raise OSError("the process that forks has ended")
    return int.from_bytes(response, "little")


def _receive(connection: socket.socket) -> tuple[Any, list[int]]:
    """The next request, and its descriptors. None: the other side has ended."""
    size, descriptors, _, _ = socket.recv_fds(connection, _HEADER, 4)
    if not size:
        return None, []
    data = b""
    while len(data) < int.from_bytes(size, "little"):
        data += connection.recv(1 << 16)
    return json.loads(data), descriptors


# In the zygote and its forks.


class _Imported:
    """What the zygote has imported, its environment and import path, and the descriptors that libraries keep."""

    def __init__(self, path: str, preload: Sequence[str]) -> None:
        self.path, sys.path[:] = list(sys.path), path.split(os.pathsep)
        before = frozenset(os.listdir("/proc/self/fd"))
        gc.disable()
        for module in (*MODULES, *COMMANDS, *preload):
            importlib.import_module(module)
        with contextlib.suppress(ImportError):
            importlib.import_module("uvloop")  # which fork servers import, too
        gc.freeze()
        gc.enable()
        os.environ.pop(_ROOM)
        _merge_pages()
        self.environment = significant(os.environ)
        self.descriptors = frozenset(map(int, frozenset(os.listdir("/proc/self/fd")) - before))

    def can_become(self, what: Mapping[str, Any]) -> bool:
        environment = significant(what["environment"])
        path = what["environment"].get("PYTHONPATH", "").split(os.pathsep)
        if any(os.path.exists(os.path.join(entry, "sitecustomize.py")) for entry in {*path} - {*self.path}):
            return False  # it is to run before what has been imported here
        if what.get("module") == MODULES[0]:
            return environment == self.environment
        return environment.items() | {("OMP_WAIT_POLICY", "PASSIVE"), ("OPENBLAS_NUM_THREADS", "1")} == self.environment.items()

    def take(self, what: Mapping[str, Any], descriptors: Sequence[int]) -> list[int]:
        """Give this process its streams, environment and import path, and close all else. Returns the new numbers of `descriptors[3:]`."""
        numbers = [os.dup(number) for number in descriptors]
        for stream, number in enumerate(numbers[:3]):
            os.dup2(number, stream)
        for name in os.listdir("/proc/self/fd"):
            if int(name) not in (0, 1, 2, *numbers[3:], *self.descriptors):
                with contextlib.suppress(OSError):
                    os.close(int(name))
        os.environ.clear()
        os.environ.update(what["environment"])
        _show_in_proc(what)
        os.chdir(what["cwd"])
        if what["new_session"] and os.getsid(0) != os.getpid():
            os.setsid()
        return numbers[3:]


def _merge_pages() -> None:
    """Ask the kernel for huge pages: a fork copies an entry for each page, and takes a third of the time with these. Each graph makes ten
    forks. No effect where the kernel has none to give."""
    advise = ctypes.CDLL(None).madvise
    for line in Path("/proc/self/maps").read_text().splitlines():
        bounds, rights, *_, inode = line.split()[:5]
        start, end = (int(bound, 16) for bound in bounds.split("-"))
        if rights == "rw-p" and inode == "0":
            for place in range(-(-start // _HUGE_BYTES) * _HUGE_BYTES, end - _HUGE_BYTES + 1, _HUGE_BYTES):
                advise(ctypes.c_void_p(place), ctypes.c_size_t(_HUGE_BYTES), _MADV_COLLAPSE)


def _show_in_proc(what: Mapping[str, Any]) -> None:
    """Write command line and environment of this process where /proc reads them: flowrt finds the processes of a run by the environment."""
    with open("/proc/self/stat", "rb") as file:
        words_start, words_end, variables_start, variables_end = map(int, file.read().rpartition(b")")[2].split()[45:49])
    of_module = ["-P", "-m", what["module"], *what["arguments"]] if "module" in what else [SPARE]
    words = (os.fsencode(word) for word in (_INTERPRETER, *what.get("command", of_module)))
    variables = (name + b"=" + value for name, value in os.environb.items())
    for shown, start, end in ((variables, variables_start, variables_end), (words, words_start, words_end)):
        data = b"".join(each + b"\0" for each in shown)
        ctypes.memmove(start, data[: end - start].ljust(end - start, b"\0"), end - start)


def _serve(connection: socket.socket, imported: _Imported) -> None:
    """Fork until the connection ends. Returns in the zygote, and in commands."""
    while True:
        what, descriptors = _receive(connection)
        if what is None:
            return
        reader, writer = os.pipe()
        if not imported.can_become(what):
            connection.sendall(bytes(_HEADER))
        elif (middle := os.fork()) == 0:
            parent = os.getpid()
            if pid := os.fork():
                os.write(writer, pid.to_bytes(_HEADER, "little"))
                os._exit(0)
            while os.getppid() == parent:
                time.sleep(POLL_SECONDS)
            if "module" in what:
                _become_module(what, descriptors, imported)
            _become_command(what, descriptors, imported)
        else:
            os.waitpid(middle, 0)
            connection.sendall(os.read(reader, _HEADER))
        for descriptor in (reader, writer, *descriptors):
            os.close(descriptor)


def _become_module(what: Mapping[str, Any], descriptors: Sequence[int], imported: _Imported) -> NoReturn:
    status = 1
    try:
        (passed,) = imported.take(what, descriptors)
        sys.path[:] = what["environment"]["PYTHONPATH"].split(os.pathsep)
        sys.argv[1:] = [str(passed), *what["arguments"]]
        main = sys.modules[what["module"]].main
        main(*([sys.argv[1:]] if inspect.signature(main).parameters else []))
        status = 0
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def _become_command(what: Mapping[str, Any], descriptors: Sequence[int], imported: _Imported) -> NoReturn:
    """Run the command as `__main__`, so that it ends as an interpreter does."""
    imported.take(what, descriptors)
    install(Spares(imported))
    path = what["environment"].get("PYTHONPATH", "").split(os.pathsep)
    option, *words = what["command"]
    own = {"-P": [], "-m": [what["cwd"]], "-c": [""]}.get(option, [os.path.dirname(option)])
    sys.path[:] = [*own, *filter(None, path), *imported.path]
    _open_streams()
    raise _Command(words if option == "-P" else [option, *words])


def _open_streams() -> None:
    """As an interpreter does at its start."""
    is_unbuffered = bool(os.environ.get("PYTHONUNBUFFERED"))
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        old = getattr(sys, name)
        raw = open(number, "wb" if number else "rb", 0 if number and is_unbuffered else -1)  # noqa: SIM115
        options = {"encoding": old.encoding, "errors": old.errors, "line_buffering": number == 2, "write_through": is_unbuffered}
        stream = io.TextIOWrapper(raw, **options)
        stream.mode = "w" if number else "r"  # type: ignore[misc]
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


class _Command(BaseException):
    """Leaves the zygote's frames."""

    def __init__(self, words: list[str]) -> None:
        self.words = words


def _run(words: list[str]) -> None:
    option, *arguments = words
    sys.modules.pop("__main__")
    if option not in ("-m", "-c"):
        sys.argv[:] = words
        runpy.run_path(option, run_name="__main__")
        return
    name, *arguments = arguments
    sys.argv[:] = [option, *arguments]
    if option == "-m":
        sys.modules.pop(name, None)
        runpy.run_module(name, run_name="__main__", alter_sys=True)
    else:
        module = type(sys)("__main__")
        sys.modules["__main__"] = module
        exec(compile(name, "<string>", "exec"), vars(module))


def _wait_as_spare(connection: socket.socket, command: int, imported: _Imported) -> NoReturn:
    from flowrt.system.signals import end_with_parent

    end_with_parent(signal.SIGKILL)
    if os.getppid() != command:
        os._exit(0)
    ctypes.CDLL(None).prctl(_PR_SET_NAME, SPARE.encode(), 0, 0, 0)
    os.setsid()
    mine = {"environment": os.environ.copy(), "cwd": "/", "new_session": False}
    nowhere = os.open(os.devnull, os.O_RDWR)  # the command's streams end with the command
    (number,) = imported.take(mine, [nowhere, nowhere, nowhere, connection.detach()])
    connection = socket.socket(fileno=number)
    connection.set_inheritable(False)
    what, descriptors = _receive(connection)
    if what is None:
        os._exit(0)
    can = imported.can_become(what)
    connection.sendall((os.getpid() if can else 0).to_bytes(_HEADER, "little"))
    if can:
        ctypes.CDLL(None).prctl(_PR_SET_NAME, b"python", 0, 0, 0)
        _become_module(what, descriptors, imported)
    os._exit(0)


def _main(descriptor: str, path: str, *preload: str) -> None:
    connection = socket.socket(fileno=int(descriptor))
    connection.set_inheritable(False)
    _serve(connection, _Imported(path, preload))


if __name__ == "__main__":
    try:
        _main(*sys.argv[1:])
    except _Command as command:
        words = command.words
    else:
        words = []
    if words:
        _run(words)
