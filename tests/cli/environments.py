"""Runs `flowrt` in hostile environments: closed outputs, few descriptors, odd variables, missing folders. Not a test itself: `make
hostile` runs all of it, and test_environments.py a part.

Each environment must give the expected exit code and one line of error or none, and leave no process, no file and no shared memory.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
GRAPH = ROOT / "examples" / "quickstart.yaml"
MODEL = ROOT / "examples" / "tiny-moe"
SMALL = f"--model {MODEL} --set deploy.attention.groups=1 --set deploy.experts.servers=2 --prompt a --max-tokens 4 --quiet"
PLENTY_SECONDS = 200
MARK = "FLOWRT_HOSTILE_RUN"  # the variable by which processes of an environment are found
_TERMINAL = "import os, pty, sys; sys.exit(os.waitstatus_to_exitcode(pty.spawn(sys.argv[1:])))"
_BLOCKED = "import os, signal, sys; signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65)); os.execv(sys.argv[1], sys.argv[1:])"
_FULL_MEMORY = "mount -t tmpfs -o size=4k none /dev/shm && head -c 9999 /dev/zero >/dev/shm/full 2>/dev/null"
_FEW_TASKS = """
group=/sys/fs/cgroup/pids/hostile-$$; mkdir $group; echo 10 > $group/pids.max
bash -c "echo \\$\\$ > $group/cgroup.procs; $RUN"; code=$?; rmdir $group; exit $code
"""
_HAS_PIDS_GROUPS = os.geteuid() == 0 and os.access("/sys/fs/cgroup/pids/cgroup.procs", os.W_OK)
_ISOLATED = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from flowrt.__main__ import main; main()"


@dataclass(frozen=True)
class Environment:
    """`shell`: what bash runs, in which $RUN is the command and $FLOWRT the program. `error`: a part of the one line that it prints."""

    name: str
    shell: str = "$RUN"
    codes: tuple[int, ...] = (0,)
    error: str = ""
    variables: dict[str, str] = field(default_factory=dict)
    unset: tuple[str, ...] = ()
    is_cheap: bool = False  # in the suite, too


def _with(**variables: str) -> list[Environment]:
    return [Environment(f"{name}={value or '(empty)'}", variables={name: value}) for name, value in variables.items()]


def _in_folder(options: str, command: str) -> str:
    """A command whose sockets are in a file system that takes none."""
    where = "--uds $TMPDIR/a.sock" if command == "serve" else "--port 0"
    fill = "head -c 9999 /dev/zero > $TMPDIR/full 2>/dev/null; true"
    run = f"FLOWRT_RUNTIME_DIR=$TMPDIR/run $FLOWRT {command} $FILE {where}"
    return f"unshare -m bash -c 'mount -t tmpfs -o {options} none $TMPDIR && {fill}; {run}'"


_LOST = "standard output cannot be written"
ENVIRONMENTS = [
    *_with(LC_ALL="C", LANG="POSIX", LC_CTYPE="xx_YY.nothing", PYTHONIOENCODING="ascii", PYTHONUTF8="0", TZ="Nowhere/None"),
    *_with(TERM="dumb", COLUMNS="abc", NO_COLOR="1", PYTHONOPTIMIZE="2", PYTHONDONTWRITEBYTECODE="1", PYTHONHASHSEED="0"),
    *_with(PYTHONDEVMODE="1", PYTHONMALLOC="debug", PYTHONUNBUFFERED="1", PYTHONFAULTHANDLER="1"),
    *_with(http_proxy="http://nowhere.invalid:1", HTTPS_PROXY="nonsense", OMP_NUM_THREADS="0", MKL_NUM_THREADS="abc"),
    *_with(CUDA_VISIBLE_DEVICES="abc", HF_HOME="/proc/none", XDG_CACHE_HOME="/proc/none", HOME="/proc", TMPDIR="/nonexistent"),
    Environment("OMP_NUM_THREADS=abc", variables={"OMP_NUM_THREADS": "abc"}),
    Environment("CUDA_VISIBLE_DEVICES=-1", variables={"CUDA_VISIBLE_DEVICES": "-1"}),
    Environment("warnings are errors", variables={"PYTHONWARNINGS": "error"}, is_cheap=True),
    Environment("no variables at all", f'env -i {MARK}="${MARK}" PYTHONPATH="$PYTHONPATH" $RUN', is_cheap=True),
    Environment("HOME is unset", unset=("HOME", "USER", "LOGNAME", "SHELL")),
    Environment("TERM is unset", unset=("TERM",)),
    Environment("TMPDIR cannot be written", variables={"TMPDIR": "/proc"}),
    Environment("no programs in PATH", variables={"PATH": "/nonexistent"}),
    Environment("isolated Python", f"{shlex.quote(sys.executable)} -I -c {shlex.quote(_ISOLATED)} run $GRAPH"),
    Environment("standard input is closed", "$RUN <&-"),
    Environment("prompts of a closed standard input", "$RUN --prompts - <&-", (2,), "standard input is closed", is_cheap=True),
    Environment("a plot where no files can be", "$FLOWRT chaos $FILE --plot /proc/x.svg", (2,), "cannot be written", is_cheap=True),
    Environment("standard output is closed", "$RUN >&-", (1,), _LOST),
    Environment("standard error is closed", "$RUN 2>&-"),
    Environment("everything is closed", "$RUN <&- >&- 2>&-", (1,), is_cheap=True),
    Environment("closed output of another command", "$FLOWRT graph expand $FILE >&-", (1,), "standard output is closed", is_cheap=True),
    Environment("full standard output", "$RUN >/dev/full", (1,), _LOST),
    Environment("full standard output of another command", "$FLOWRT graph expand $FILE >/dev/full", (1,), _LOST),
    Environment("full standard error", "$RUN 2>/dev/full"),
    Environment("full disk for the record", "$RUN --json /dev/full", (1,), "No space left on device"),
    Environment("a reader that leaves", "$FLOWRT graph schema | head -c 1 >/dev/null; exit ${PIPESTATUS[0]}", (0, 141), is_cheap=True),
    Environment("SIGPIPE is ignored", "trap '' PIPE; $RUN --json - | head -c 1 >/dev/null; exit ${PIPESTATUS[0]}", (0, 1, 141)),
    Environment("SIGCHLD is ignored", "trap '' CHLD; $RUN", is_cheap=True),
    Environment("SIGINT and SIGHUP are ignored", "trap '' INT HUP; $RUN"),
    Environment("all signals are blocked", f"{shlex.quote(sys.executable)} -c {shlex.quote(_BLOCKED)} $RUN"),
    *[Environment(f"{num} descriptors", f"ulimit -n {num}; $RUN", (0, 1, 2, 3), "") for num in (20, 32, 40, 48, 64, 128)],
    Environment("few descriptors for a server", "ulimit -n 12; $FLOWRT serve $FILE", (2,), "too few open files", is_cheap=True),
    Environment("few descriptors for a front end", "ulimit -n 48; $FLOWRT serve $FILE", (2,), "too few open files", is_cheap=True),
    Environment("200 MB of address space", "ulimit -v 200000; $RUN", (1, 2, 3)),
    Environment("files of no size", "ulimit -f 0; $RUN", is_cheap=True),
    Environment("a record in files of no size", "ulimit -f 0; $RUN --json record.json", (1,), "cannot be written"),
    Environment("no core files and a small stack", "ulimit -c 0; ulimit -s 1024; $RUN"),
    Environment("few processes", "ulimit -u 64; $RUN", (0, 1, 2, 3)),
    Environment("umask 777", "umask 777; $RUN"),
    Environment("a deleted working directory", 'mkdir gone; cd gone; rmdir "$PWD"; $RUN', (2,), "the working directory", is_cheap=True),
    Environment("a working directory that takes no files", "cd /proc; $RUN"),
    Environment("a record where no files can be", "cd /proc; $RUN --json record.json", (2,), "cannot be written"),
    Environment("a symlinked working directory", "mkdir there; ln -s there here; cd here; $RUN"),
    Environment("a Unicode path", '$WRITE > "grüße ☃.yaml"; RUN_WITH "grüße ☃.yaml"'),
    Environment("a path with a line break", "$WRITE > $'a b\\nc.yaml'; RUN_WITH $'a b\\nc.yaml'", is_cheap=True),
    Environment("a path that is not UTF-8", "$WRITE > $'a\\xff.yaml'; RUN_WITH $'a\\xff.yaml'", (2,), "not UTF-8", is_cheap=True),
    Environment("a missing file with a line break", "$FLOWRT graph validate $'a\\nb.yaml'", (2,), "no such file", is_cheap=True),
    Environment("a very long path", "n=$(printf '%0200d' 1); mkdir -p $n/$n/$n/$n; cd $n/$n/$n/$n; $RUN"),
    Environment("a name that is too long", "$FLOWRT run $(printf '%05000d' 1)", (2,), "", is_cheap=True),
    Environment("nohup", "nohup $RUN"),
    Environment("a session of its own without a terminal", "setsid -w $RUN </dev/null"),
    Environment("the lowest priority", "nice -n 19 $RUN"),
    Environment("one processor", "taskset -c 0 $RUN"),
    Environment("an empty program name", "exec -a '' $RUN", (0, 1)),  # 1: PATH begins with a Python without flowrt
    *[
        Environment(f"a terminal of COLUMNS={columns}", f"{shlex.quote(sys.executable)} -c {shlex.quote(_TERMINAL)} $RUN", (0,), "", {
            "COLUMNS": columns, "TERM": "xterm"
        })
        for columns in ("", "0", "1", "99999")
    ],
    Environment("no locked memory", "ulimit -l 0; $RUN"),
    Environment("2 GB of address space", "ulimit -v 2000000; $RUN", (0, 1, 2, 3)),
    Environment("a full folder of graphs", _in_folder("size=4k", "up"), (1,), "full?"),
    Environment("a read-only folder of graphs", _in_folder("ro", "up"), (2,), "Read-only file system"),
    Environment("a server's socket in a read-only folder", _in_folder("ro", "serve"), (2,), "read-only file system"),
    *([Environment("few tasks in the container", _FEW_TASKS, (1,), "too few processes and threads")] if _HAS_PIDS_GROUPS else []),
    Environment("a full shared-memory folder", f"unshare -m bash -c '{_FULL_MEMORY}; $RUN'", (0, 1)),
]  # fmt: skip


@dataclass(frozen=True)
class Outcome:
    """`faults`: what is wrong with it, a line each."""

    code: int
    errors: list[str]
    faults: list[str]


def run(environment: Environment, folder: Path) -> Outcome:
    """Run the environment in a folder below `folder`."""
    cwd, home, temporary = (folder / name for name in ("cwd", "home", "tmp"))
    for path in (cwd, home, temporary):
        path.mkdir()
    mark = uuid.uuid4().hex
    program = f"{shlex.quote(sys.executable)} -m flowrt"
    shell = environment.shell.replace("RUN_WITH", f"RUN_IT {SMALL} ").replace("$RUN", f"{program} run {GRAPH} {SMALL}")
    shell = shell.replace("RUN_IT", f"{program} run").replace("$FLOWRT", program)
    shell = shell.replace("$GRAPH", f"{GRAPH} {SMALL}").replace("$FILE", str(GRAPH))
    shell = shell.replace("$WRITE", f"printf 'flowrt: 1\\nmodel: {{path: {MODEL}}}\\n'")
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "HOME": str(home), "TMPDIR": str(temporary), MARK: mark, **environment.variables}
    for name in environment.unset:
        variables.pop(name, None)
    memory = set(os.listdir("/dev/shm"))
    done = subprocess.run(
        ["/bin/bash", "-c", shell],
        cwd=cwd,
        env=variables,
        capture_output=True,
        timeout=PLENTY_SECONDS,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    printed = done.stderr.decode(errors="replace")
    errors = [line for line in printed.splitlines() if line.startswith("flowrt: error: ")]
    faults = (
        [] if done.returncode in environment.codes else [f"exit code {done.returncode}, expected {environment.codes}: {printed[-300:]!r}"]
    )
    if re.search(r"^Traceback", printed, re.MULTILINE) or len(errors) > 1:  # a line of a process has its name before it
        faults.append(f"more than one line of error: {printed[-600:]!r}")
    if environment.error and not any(environment.error in line for line in errors):
        faults.append(f"no error with {environment.error!r}: {printed[-300:]!r}")
    faults += [f"process {pid} is left" for pid in _marked(mark)]
    left = [path for place in (cwd, home, temporary) for path in place.rglob("*") if path.is_file() and path.suffix != ".yaml"]
    faults += [f"{path} is left" for path in left]
    faults += [f"/dev/shm/{name} is left" for name in set(os.listdir("/dev/shm")) - memory if name.startswith("flowrt")]
    return Outcome(done.returncode, errors, faults)


def _marked(mark: str) -> list[int]:
    """The living processes that inherited the mark."""
    found = []
    for name in filter(str.isdecimal, os.listdir("/proc")):
        try:
            if f"{MARK}={mark}".encode() in Path("/proc", name, "environ").read_bytes():
                found.append(int(name))
        except OSError:  # it has ended, or is another user's
            continue
    return found


def main(names: Sequence[str]) -> int:
    """Run the environments whose names contain one of `names`, or all; the exit code."""
    num_wrong = 0
    for environment in ENVIRONMENTS:
        if names and not any(name in environment.name for name in names):
            continue
        folder = Path(tempfile.mkdtemp(prefix="hostile-"))
        try:
            outcome = run(environment, folder)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        num_wrong += bool(outcome.faults)
        print(f"{'wrong' if outcome.faults else 'ok   '} {environment.name}: exit code {outcome.code}", *outcome.errors, flush=True)
        for fault in outcome.faults:
            print(f"      {fault}", flush=True)
    print(f"{len(ENVIRONMENTS)} environments, {num_wrong} wrong")
    return int(num_wrong > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
