"""Starts the fork servers of graphs in the test process as forks of one process that has imported torch already.

Each graph that a test opens starts a fork server: an interpreter that imports torch, which takes more than a second of a core, and a suite
opens hundreds. `ForkedServer` stands for the `subprocess.Popen` of such a fork server. Its process is real: it runs `main` of
flowrt/processes/fork_server.py, in a session of its own, with its own descriptors and environment, and this process adopts it. Commands
that tests start in processes of their own start their fork servers themselves.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from flowrt.launcher.launcher import PRELOAD
from flowrt.processes import fork_server_process

POLL_SECONDS = 0.001
_PREFIX = ["-P", "-m", "flowrt.processes.fork_server"]
_zygote: Zygote | None = None


class Zygote:
    """The process that forks, and this side's end of its connection."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.environment, self.parent = dict(environment), os.getpid()
        self.connection, theirs = socket.socketpair()
        command = [sys.executable, "-P", __file__, str(theirs.fileno()), *PRELOAD]
        self.process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], env=environment, start_new_session=True
        )
        theirs.close()
        atexit.register(self.close)

    def fork(self, arguments: Sequence[str], environment: Mapping[str, str], descriptors: Sequence[int]) -> int:
        """Fork a process that runs `fork_server.main(arguments)`, once the zygote is no longer its parent. Returns its pid."""
        request = json.dumps([list(arguments), dict(environment)]).encode()
        socket.send_fds(self.connection, [len(request).to_bytes(4, "little")], list(descriptors))
        self.connection.sendall(request)
        response = self.connection.recv(4)
        if len(response) < 4:
            raise OSError("the process that forks fork servers has ended")
        return int.from_bytes(response, "little")

    def close(self) -> None:
        if os.getpid() == self.parent:
            self.connection.close()
            self.process.wait()


class ForkedServer:
    """A forked fork server, with the part of subprocess.Popen that flowrt uses."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:
                pid, status = self.pid, 0
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        deadline = None if timeout is None else time.monotonic() + timeout
        while (status := self.poll()) is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("fork server", timeout or 0.0)
            time.sleep(POLL_SECONDS)
        return status

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


def install() -> None:
    """From now on, fork servers of this process are forked where they can be."""
    fork_server_process.subprocess = SimpleNamespace(**{**vars(subprocess), "Popen": start})


def descriptor() -> int:
    """The connection to what `pids` names; -1 while there is none."""
    return -1 if _zygote is None else _zygote.connection.fileno()


def pids() -> frozenset[int]:
    """What runs beside all tests of this process."""
    return frozenset() if _zygote is None else frozenset({_zygote.process.pid})


def zygote_of(environment: Mapping[str, str]) -> Zygote | None:
    """The one of this process, made at first use; None if it has another environment."""
    global _zygote
    shared = {name: value for name, value in environment.items() if not name.startswith(("FLOWRT_", "PYTEST_"))}
    if _zygote is None or _zygote.parent != os.getpid():
        _zygote = Zygote(shared)
    return _zygote if _zygote.environment == shared else None


def start_early() -> None:
    """For tests that look for processes that a run has left behind."""
    zygote_of(fork_server_process._environment(""))


def start(command: Sequence[str], **options: Any) -> Any:
    """`subprocess.Popen` for flowrt/processes/fork_server_process.py."""
    executable, *rest = command
    connection, launcher_pid, *preload = rest[len(_PREFIX) :]
    if executable != sys.executable or rest[: len(_PREFIX)] != _PREFIX or tuple(preload) != PRELOAD:
        return subprocess.Popen(command, **options)
    environment = options["env"]
    zygote = zygote_of(environment)
    if zygote is None:
        return subprocess.Popen(command, **options)
    return ForkedServer(zygote.fork([connection, launcher_pid, *preload], environment, [int(connection), options["stdout"]]))


def _serve(connection: socket.socket) -> None:
    """In the zygote: fork until the connection ends."""
    while True:
        size, descriptors, _, _ = socket.recv_fds(connection, 4, 2)
        if not size:
            return
        request = b""
        while len(request) < int.from_bytes(size, "little"):
            request += connection.recv(1 << 16)
        arguments, environment = json.loads(request)
        theirs, output = descriptors
        reader, writer = os.pipe()
        if (middle := os.fork()) == 0:
            parent = os.getpid()
            if pid := os.fork():
                os.write(writer, pid.to_bytes(4, "little"))
                os._exit(0)
            _become_fork_server(arguments, environment, theirs, output, parent)
        os.waitpid(middle, 0)
        connection.sendall(os.read(reader, 4))
        for descriptor in (reader, writer, *descriptors):
            os.close(descriptor)


def _become_fork_server(arguments: list[str], environment: dict[str, str], connection: int, output: int, parent: int) -> None:
    from flowrt.processes import fork_server

    status = 1
    try:
        while os.getppid() == parent:
            time.sleep(POLL_SECONDS)
        os.setsid()
        os.dup2(output, 1)
        os.dup2(output, 2)
        theirs = os.dup(connection)
        for name in os.listdir("/proc/self/fd"):
            if int(name) not in (0, 1, 2, theirs, *_library_descriptors):
                try:
                    os.close(int(name))
                except OSError:
                    continue
        os.environ.clear()
        os.environ.update(environment)
        fork_server.main([str(theirs), *arguments[1:]])
        status = 0
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


_library_descriptors: frozenset[int] = frozenset()


def _main(descriptor: str, *preload: str) -> None:
    global _library_descriptors
    import importlib

    import flowrt.processes.fork_server  # noqa: F401

    connection = socket.socket(fileno=int(descriptor))
    connection.set_inheritable(False)
    before = frozenset(os.listdir("/proc/self/fd"))
    for module in preload:
        importlib.import_module(module)
    _library_descriptors = frozenset(map(int, frozenset(os.listdir("/proc/self/fd")) - before))
    _serve(connection)


if __name__ == "__main__":
    _main(*sys.argv[1:])
