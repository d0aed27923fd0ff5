"""Start, failure and end of a run's processes, with workers that compute nothing."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from typing import Any, TypeVar

import psutil
import pytest
import zygote
from group_tokens import number_of
from launcher.owners import LauncherRun, launcher_of

from flowrt.actors.control import Control, Ended, Request, Submit, Tokens
from flowrt.errors import NotRunningError, UserError, WorkerDiedError
from flowrt.graph.model import FORK_SERVER, Graph, Node
from flowrt.launcher import events
from flowrt.launcher.launcher import Launcher
from flowrt.processes.fork_server import shown_name
from flowrt.processes.fork_server_client import LocalBackend
from flowrt.processes.leftover import marked_processes, processes_marked
from flowrt.processes.output_tail import write_line
from flowrt.seams import Seams

T = TypeVar("T")

WORKER = "launcher.fake_workers:run_worker"


def graph_of(*names: str, processes: str | int = "many") -> Graph:
    """Workers whose state only they have; those named "echo" are drained."""
    nodes = [Node(name, "source" if name.startswith("echo") else "nothing", name) for name in names]
    return Graph.of([*nodes, *(Node(f"{name}.state", "nothing", name) for name in names)], processes=processes)


class Run(LauncherRun):
    """A launcher with fake workers, and the messages that it received."""

    def __init__(self, *names: str, processes: str | int = "many", **options: object) -> None:
        self.events: list[events.Event] = []
        self.messages: list[tuple[str, Control]] = []
        self.lines: list[tuple[str, str]] = []
        defaults: dict[str, object] = {"on_line": lambda name, line: self.lines.append((name, line))}
        defaults |= {"worker": WORKER, "preload": ("launcher.fake_workers",), "response_seconds": 20.0}
        defaults |= {"on_event": self.events.append, "on_control": lambda name, control: self.messages.append((name, control))}
        self.launcher = launcher_of(
            graph_of(*names, processes=processes),
            **(defaults | options),
        )

    async def submit(self, name: str, request_id: str, tokens: tuple[int, ...] = ()) -> list[int]:
        """Submit a request, wait for its end, and return its tokens."""
        await self.launcher.send(name, Submit(Request(id=request_id, attempt=0, prompt_token_ids=tokens, max_tokens=1)))
        while not any(
            isinstance(message, Ended) and message.request_id == request_id and worker == name for worker, message in self.messages
        ):
            await asyncio.sleep(0.002)
            if self.launcher.failure is not None:
                raise self.launcher.failure
        steps = [message.tokens for worker, message in self.messages if worker == name and isinstance(message, Tokens)]
        return [token for step in steps for each in step if each.request == number_of(request_id) for token in each.token_ids]

    async def failure(self, act: Callable[[Launcher], Awaitable[object]] | None = None) -> Exception:
        """Start, do `act`, wait for the failure that ends the run, and leave with it."""

        async def live() -> None:
            async with self.launcher as launcher:
                if act is not None:
                    await act(launcher)
                await launcher.wait_failed()

        with pytest.raises((WorkerDiedError, UserError)) as caught:
            await live()
        return caught.value


@contextlib.contextmanager
def held(launcher: Launcher) -> Iterator[None]:
    """The fork server is stopped meanwhile: it forks no process."""
    fork_server = launcher.fork_server_pid()
    os.kill(fork_server, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(fork_server, signal.SIGCONT)


def wait_dead(pid: int) -> None:
    """Until the process has ended, without a turn of the loop. Its fork server is held."""
    while psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.001)


def open_fds() -> set[tuple[str, str]]:
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            found.add((name, os.readlink(f"/proc/self/fd/{name}")))
        except FileNotFoundError:
            continue  # the listing's own
    return found


def children() -> set[int]:
    """Every child of this process, zombies too, but for spares of killed commands (zygote.py), which are reaped here."""
    found = set()
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                with open(f"/proc/{entry}/stat") as file:
                    head, _, rest = file.read().rpartition(")")
                    parent = int(rest.split()[1])
            except (FileNotFoundError, ProcessLookupError):
                continue
            if parent == os.getpid() and head.endswith(f"({zygote.SPARE}"):
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(int(entry), os.WNOHANG)
            elif parent == os.getpid():
                found.add(int(entry))
    return found


def ends(left: Callable[[], T]) -> T:
    """What is left after at most 10 s: a killed process is there until the kernel has freed its memory."""
    until = time.monotonic() + 10.0
    while (found := left()) and time.monotonic() < until:
        time.sleep(0.01)
    return found


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    before, fds, threads = children(), open_fds(), threading.active_count()
    yield
    assert open_fds() == fds
    assert ends(lambda: children() - before) == set()
    assert threading.active_count() == threads
    assert [marked for marked in marked_processes() if marked.launcher_pid == os.getpid()] == []


async def test_six_workers_start_exchange_and_stop(loop_kind: str) -> None:
    names = [f"echo.{number}" for number in range(6)]
    async with Run(*names) as it:
        answers = await asyncio.gather(*(it.submit(name, "r", (1, 2, number)) for number, name in enumerate(names)))
        assert answers == [[1, 2, number] for number in range(6)]
        assert [psutil.Process(pid).name() for pid in it.launcher.pids.values()] == [f"fr:{name}" for name in names]
        facts = [await it.submit(name, "who") for name in names]
        assert [pid for pid, *_ in facts] == list(it.launcher.pids.values())
        assert len(set(it.launcher.pids.values()) - {os.getpid()}) == 6
        assert len({parent for _, parent, _, _ in facts}) == 1
        assert len({num_fds for _, _, num_fds, _ in facts}) == 1, "the last forked holds no more than the first"
        assert {threads for *_, threads in facts} == {max(1, len(os.sched_getaffinity(0)) // 6)}
        assert {statistics.num_steps for statistics in (await it.launcher.statistics()).values()} == {7}
        await it.launcher.drain()
        last = await it.launcher.stop()
        assert {name: statistics.num_steps for name, statistics in last.items()} == dict.fromkeys(names, 8)
        with pytest.raises(NotRunningError):
            await it.submit("echo.0", "late")
    kinds = [type(event) for event in it.events]
    assert kinds[0] is events.ForkServerReady
    assert kinds[-1] is events.Ready
    assert kinds.count(events.WorkerConnected) == 6
    assert it.events[0] == events.ForkServerReady(num_threads=1)
    assert it.lines == []


async def test_seconds_until_ready_include_the_start_of_the_fork_server() -> None:
    open_seconds: list[float] = []

    async def open_backend(*arguments: Any) -> LocalBackend:
        before = asyncio.get_running_loop().time()
        backend = await LocalBackend.open(*arguments)
        open_seconds.append(asyncio.get_running_loop().time() - before)
        return backend

    async with Run("echo.0", seams=Seams(open_backend=open_backend)) as it:
        (ready,) = [event for event in it.events if isinstance(event, events.Ready)]
        assert ready.seconds >= open_seconds[0]


def test_a_launch_works_in_a_thread() -> None:
    done = []

    async def main() -> None:
        async with Run("echo.0") as it:
            done.append(await it.submit("echo.0", "r", (5,)))

    thread = threading.Thread(target=asyncio.run, args=(main(),))
    thread.start()
    thread.join()
    assert done == [[5]]


async def test_packed_workers_share_processes() -> None:
    names = [f"echo.{number}" for number in range(5)]
    async with Run(*names, processes=2) as it:
        for number, name in enumerate(names):
            assert await it.submit(name, "r", (number,)) == [number]
        assert len(set(it.launcher.pids.values())) == 2
        assert it.launcher.pids["echo.0"] == it.launcher.pids["echo.2"] == it.launcher.pids["echo.4"]


async def test_one_starts_no_process(loop_kind: str) -> None:
    async with Run("echo.0", "echo.1", processes="one") as it:
        assert await it.submit("echo.1", "r", (3, 4)) == [3, 4]
        assert processes_marked(it.launcher.run_id) == []
        await it.launcher.drain()
        assert {statistics.num_steps for statistics in (await it.launcher.stop()).values()} == {8}
    assert len(asyncio.all_tasks()) == 1


async def test_one_reports_a_worker_that_fails() -> None:
    error = await Run("echo.0", "raise.0", processes="one").failure()
    assert str(error) == "raise.0 failed: RuntimeError: out of tea"


async def test_hosted_worker_gets_the_same_messages() -> None:
    from launcher.fake_workers import run_worker

    async with Run("echo.0", hosted={"gateway": run_worker}) as it:
        assert await it.submit("gateway", "r", (9,)) == [9]
        assert it.launcher.pids["gateway"] == os.getpid()
        assert await it.submit("echo.0", "r", (8,)) == [8]


async def test_unqueried_failure_is_raised_at_the_end() -> None:
    failed = asyncio.Event()
    it = Run("echo.0", on_event=lambda event: failed.set() if isinstance(event, events.RunFailed) else None)

    async def live() -> None:
        async with it.launcher as launcher:
            os.kill(launcher.pids["echo.0"], signal.SIGTERM)
            await failed.wait()

    with pytest.raises(WorkerDiedError, match=r"echo\.0 was killed by SIGTERM"):
        await live()


async def test_calls_after_a_death_raise_it_and_the_end_does_not_repeat_it(loop_kind: str) -> None:
    async with Run("echo.0", "echo.1") as it:
        os.kill(it.launcher.pids["echo.0"], signal.SIGKILL)
        with pytest.raises(WorkerDiedError, match=r"^echo\.0 was killed by SIGKILL$") as caught:
            await it.launcher.wait_failed()
        assert it.events[-1] == events.RunFailed(caught.value)
        for call in (partial(it.submit, "echo.0", "r"), it.launcher.drain, it.launcher.stop):
            with pytest.raises(WorkerDiedError):
                await call()


async def test_error_of_the_owners_callback_is_reported_and_raised_by_every_call() -> None:
    def refuse(name: str, control: Control) -> None:
        raise KeyError(name)

    async with Run("echo.0", on_control=refuse) as it:
        await it.launcher.send("echo.0", Submit(Request(id="r", attempt=0, prompt_token_ids=(1,), max_tokens=1)))
        for call in (it.launcher.wait_failed, it.launcher.statistics, it.launcher.drain, it.launcher.stop):
            with pytest.raises(KeyError, match=r"echo\.0") as caught:
                await call()
            assert caught.traceback[-1].name == "refuse"
    assert it.events[-1] == events.RunFailed(caught.value)
    assert it.launcher.failure is caught.value


def test_names_of_processes_are_distinguished() -> None:
    hosts = ["attention.0", "attention.1", "experts.0", "experts.12", "experts.112", "attention.10+experts.1", "attention.10+experts.2"]
    names = [shown_name(host) for host in hosts]
    assert len(set(names)) == len(hosts)
    assert max(map(len, names)) <= 15
    assert names[3] == "fr:experts.12"


@pytest.mark.parametrize("turns", [0, 20])
async def test_death_just_before_the_stop_is_reported(turns: int) -> None:
    async with Run("echo.0", "echo.1") as it:
        with held(it.launcher):
            os.kill(it.launcher.pids["echo.1"], signal.SIGKILL)
            wait_dead(it.launcher.pids["echo.1"])
            for _ in range(turns):
                await asyncio.sleep(0)
            stop = asyncio.ensure_future(it.launcher.stop())
            for _ in range(50):  # the fork server is held: how it ended is not known yet
                await asyncio.sleep(0)
        with pytest.raises(WorkerDiedError, match=r"^echo\.1 was killed by SIGKILL$"):
            await stop


async def test_dead_processes_are_named_before_their_peers() -> None:
    it = Run("echo.0", "complain.0", "echo.1")

    async def act(launcher: Launcher) -> None:
        await it.submit("complain.0", "r")
        os.kill(launcher.pids["echo.1"], signal.SIGKILL)

    assert str(await it.failure(act)) == "echo.1 was killed by SIGKILL"


async def test_a_lost_link_between_the_living_ends_the_run() -> None:
    it = Run("echo.0", "complain.0", "echo.1")
    error = await it.failure(lambda launcher: it.submit("complain.0", "r"))
    assert str(error) == "complain.0 failed: lost its link to echo.1: it closed"


async def test_output_tail_is_kept_and_goes_to_stderr_under_the_workers_name(capfd: pytest.CaptureFixture[str]) -> None:
    it = Run("raise.0", "echo.0", on_line=write_line)
    error = await it.failure()
    assert isinstance(error, WorkerDiedError)
    assert (error.process, error.reason) == ("raise.0", "exited with status 1 unexpectedly")
    assert error.output_tail[:2] == ("first line", "second line")
    assert error.output_tail[-1] == "RuntimeError: out of tea"
    assert capfd.readouterr().err.splitlines() == [f"[raise.0] {line}" for line in error.output_tail]


async def test_output_tail_of_a_native_crash_has_at_most_fifty_lines() -> None:
    error = await Run("chatty.0").failure()
    assert isinstance(error, WorkerDiedError)
    assert error.reason == "was killed by SIGSEGV"
    assert len(error.output_tail) == 50
    assert any("Fatal Python error: Segmentation fault" in line for line in error.output_tail)
    assert any(line == "line 199" for line in error.output_tail)


async def test_worker_that_exits_without_request_ends_the_run() -> None:
    error = await Run("echo.0", "leave.0").failure()
    assert str(error) == "leave.0 exited with status 0 unexpectedly"


@pytest.mark.parametrize("role", ["hang", "block"])
async def test_worker_that_never_responds_is_named(role: str) -> None:
    def be_quick(event: events.Event) -> None:
        if isinstance(event, events.WorkerListening):  # the time to import everything on a busy machine is over
            it.launcher.state.response_seconds = 1.5

    it = Run(f"{role}.0", "echo.0", on_event=be_quick)
    error = await it.failure()
    assert isinstance(error, WorkerDiedError)
    assert str(error) == f"{role}.0 sent nothing for 1.5 s while loading"
    assert error.output_tail == (("WARNING about to hang",) if role == "hang" else ())


async def test_bad_input_found_by_a_worker_is_the_users() -> None:
    error = await Run("echo.0", "bad.0").failure()
    assert type(error) is UserError
    assert str(error) == "no such operator: teapot"
    assert error.exit_code == 2


@pytest.mark.parametrize(
    ("options", "process", "reason"),
    [
        ({"worker": "launcher.broken_worker:run_worker"}, "echo.0", "exited with status 1"),
        ({"preload": ("launcher.broken_worker",)}, FORK_SERVER, "exited with status 1 while importing launcher.broken_worker"),
    ],
    ids=["by the worker", "by the fork server"],
)
async def test_a_module_that_cannot_be_imported(options: dict[str, object], process: str, reason: str) -> None:
    error = await Run("echo.0", **options).failure()
    assert isinstance(error, WorkerDiedError)
    assert error.process == process
    assert error.reason.startswith(reason)
    assert error.output_tail[-1] == "ImportError: this module cannot be imported"


def kill_fork_server_at_start(*names: str) -> Run:
    def kill(event: events.Event) -> None:
        if isinstance(event, events.WorkerStarted) and it.launcher.fork_server_pid():
            os.kill(it.launcher.fork_server_pid(), signal.SIGKILL)

    it = Run(*names, on_event=kill)
    return it


async def test_a_fork_server_killed_during_the_launch_ends_all_processes() -> None:
    it = kill_fork_server_at_start("echo.0", "hang.0")
    assert str(await it.failure()) == "fork server was killed by SIGKILL"
    assert processes_marked(it.launcher.run_id) == []


async def test_a_fork_server_that_ends_slowly_does_not_hold_up_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    it = kill_fork_server_at_start("hang.0")
    looked: list[float] = []
    poll = subprocess.Popen.poll

    def poll_late(process: subprocess.Popen[bytes]) -> int | None:
        looked.append(asyncio.get_running_loop().time())
        return None if len(looked) < 4 else poll(process)

    monkeypatch.setattr(subprocess.Popen, "poll", poll_late)
    assert str(await it.failure()) == "fork server was killed by SIGKILL"
    assert looked[0] < looked[1] < looked[2] < looked[3]


START = [None, events.ForkServerReady, events.WorkerStarted, events.WorkerListening, events.Ready]


@pytest.mark.parametrize("after", START, ids=lambda kind: "nothing" if kind is None else kind.__name__)
async def test_cancelling_the_start_leaves_nothing(after: type[events.Event] | None) -> None:
    def cancel(event: events.Event) -> None:
        if type(event) is after:
            start.cancel()

    it = Run("echo.0", "echo.1", on_event=cancel)
    start = asyncio.ensure_future(it.launcher.__aenter__())
    await asyncio.sleep(0)
    if after is None:
        start.cancel()
    with pytest.raises(asyncio.CancelledError):
        await start
    assert ends(lambda: processes_marked(it.launcher.run_id)) == []
    assert len(asyncio.all_tasks()) == 1


async def test_an_error_in_the_block_ends_the_run_at_once() -> None:
    it = Run("stubborn.0", "echo.0", stop_seconds=60.0)
    with pytest.raises(KeyError):
        async with it.launcher:
            raise KeyError
    assert processes_marked(it.launcher.run_id) == []


async def test_a_worker_that_does_not_stop_is_killed() -> None:
    async with Run("stubborn.0", "echo.0", "echo.1", stop_seconds=0.5) as it:
        os.kill(it.launcher.pids["echo.0"], signal.SIGSTOP)
    late = [event.name for event in it.events if isinstance(event, events.Straggler)]
    assert late[:2] == ["stubborn.0", "echo.0"]
    assert processes_marked(it.launcher.run_id) == []


async def test_what_a_worker_started_ends_with_the_run() -> None:
    async with Run("parent.0") as it:
        # The fork server, the worker, its child in a session of its own. In the middle of its exec, a process has an empty environment.
        while len(processes_marked(it.launcher.run_id)) < 3:  # noqa: ASYNC110
            await asyncio.sleep(0.002)
        assert os.getpgid(it.launcher.pids["parent.0"]) != os.getpgid(0), "the terminal's interrupt is not for workers"
        os.kill(it.launcher.pids["parent.0"], signal.SIGINT)
        assert await it.submit("parent.0", "r", (1,)) == [1]
    assert processes_marked(it.launcher.run_id) == []


PARENT = """
import asyncio, sys
sys.path[:0] = {path!r}
from launcher.test_launcher import Run
async def main():
    async with Run("echo.0", "echo.1", "echo.2") as it:
        print(it.launcher.run_id, flush=True)
        await asyncio.sleep(3600)
asyncio.run(main())
"""


def test_a_killed_parent_takes_every_child_along() -> None:
    script = textwrap.dedent(PARENT.format(path=[entry for entry in sys.path if entry]))
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        run_id = parent.stdout.readline().strip()
        pids = processes_marked(run_id)
        assert len(pids) == 4  # the fork server and its workers
        parent.kill()
        parent.wait()
        while processes_marked(run_id):  # the test's time limit is the bound
            time.sleep(0.01)
    for pid in pids:
        with contextlib.suppress(ChildProcessError):  # ours only where this process inherits orphans
            os.waitpid(pid, 0)
    assert processes_marked(run_id) == []


async def test_the_fork_server_imports_torch_without_starting_a_thread() -> None:
    async with Run("echo.0", preload=("torch", "launcher.fake_workers"), response_seconds=60.0) as it:
        assert await it.submit("echo.0", "r", (1,)) == [1]
    assert it.events[0] == events.ForkServerReady(num_threads=1)
