"""The launcher: starts a graph's workers, connects them to each other, carries their control messages, and ends them all.

A run is one task; all other tasks belong to its task group. A run ends in one of three ways:
- `stop` ends the workers in order.
- A worker fails that the run cannot lose, or a callback of the owner raises. All workers are killed at once, and each later call raises
  the root cause.
- It is cancelled. All workers are killed.
In each case no process, socket or task is left after the `async with` block.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from msgspec.structs import replace

from flowrt.actors.control import Control, Heartbeat, LateResponse, LinkLost, Statistics
from flowrt.errors import UserError, WorkerDiedError
from flowrt.graph.builtin import SOURCE
from flowrt.graph.model import FORK_SERVER, MONITOR, Graph
from flowrt.graph.recovery import is_watched
from flowrt.launcher import events
from flowrt.launcher.control_connection import ControlConnection
from flowrt.launcher.ending import close_all, end_all, kill_all, see_end, tell_all
from flowrt.launcher.health_record import Standing
from flowrt.launcher.hosts import Hosts, Placed, set_own_threads
from flowrt.launcher.introduction import Introduction
from flowrt.launcher.loading import Loading
from flowrt.launcher.monitor_client import Watching
from flowrt.launcher.restarts import EXPLAINED_SECONDS, Revival
from flowrt.launcher.root_cause import Kind, Verdict, named_error
from flowrt.launcher.transport_choice import UnavailableReason, choose_transports, pack
from flowrt.processes.descriptors import is_too_few, too_few_descriptors
from flowrt.processes.fork_server import WorkerMain, load_worker
from flowrt.processes.fork_server_client import LocalBackend
from flowrt.processes.output_tail import write_line
from flowrt.seams import Seams
from flowrt.transports.errors import BrokenChannelError, ClosedChannelError, EndOfChannel
from flowrt.transports.registry import unavailable_reason

WORKER = "flowrt.workers.process:run_worker"
PRELOAD = ("torch", "flowrt.workers.process", "flowrt.workers.monitor")
ANSWER_SECONDS = 120.0  # longest silence of a worker while the run starts; a LoadProgress message ends a silence
STATISTICS_SECONDS = 5.0  # time limit for all responses
STOP_SECONDS = 5.0  # from Stop to the end of the process
_STATUS_SECONDS = 10.0  # longest wait from the end of a control connection to the exit status of its process


class NotRunningError(RuntimeError):
    """The launcher was stopped, or not started."""


class Launcher:
    """A run of `graph`: `async with Launcher(graph) as launcher:` enters when every worker is connected.

    graph: expanded and checked; `launcher.graph` is the same with every edge's transport resolved.
    on_event: called in this loop with the events of events.py.
    on_control: called with (worker, message) for every message that is not about starting.
    on_line: called with (process, line) for every line on a process's stderr or stdout; the default writes "[process] line" to stderr.
    None of the three callbacks may block; an exception of the first two ends the run.
    hosted: workers that run in this loop beside the graph's own, such as the gateway's half of a user's graph: name -> the
    coroutine function to run. They get the same messages over the same kind of control connection.
    worker, preload: what each worker runs, "module:function", and the modules the fork server imports before it forks.
    unavailable_reason: as for choose_transports; by default the registry's.

    Raises UserError (bad input, exit code 2) and WorkerDiedError (exit code 3). The thread that enters must outlive the run, because the
    kernel kills the fork server when that thread ends.
    """

    def __init__(
        self,
        graph: Graph,
        seams: Seams | None = None,
        *,
        log_level: str = "warning",
        on_event: Callable[[events.Event], None] | None = None,
        on_control: Callable[[str, Control], None] | None = None,
        on_line: Callable[[str, str], None] | None = None,
        hosted: Mapping[str, WorkerMain] | None = None,
        worker: str = WORKER,
        preload: Sequence[str] = PRELOAD,
        unavailable_reason: UnavailableReason = unavailable_reason,
        answer_seconds: float = ANSWER_SECONDS,
        stop_seconds: float = STOP_SECONDS,
    ) -> None:
        self.seams = seams or Seams()
        self.graph = choose_transports(graph, unavailable_reason)
        self.key = self.seams.new_key()
        self.run_id = self.seams.new_incarnation()
        self._log_level = log_level
        self.standing = Standing(self._emitting(), self.seams.clock.now)
        self._on_event = self.standing.overhear(on_event or (lambda event: None))
        self._on_control = on_control or (lambda name, control: None)
        self._on_line = on_line or write_line
        self._hosted = dict(hosted or {})
        self.worker, self._preload = worker, tuple(preload)  # `worker` may be changed until the start
        self._stop_seconds = stop_seconds
        names = [*self.graph.process_names(), *self._hosted]
        if len({*names, FORK_SERVER, MONITOR}) <= len(names) + 1:
            raise ValueError(f"two workers of one name, or one called {FORK_SERVER} or {MONITOR}, among {names}")
        self.incarnations: dict[str, str] = {name: self.seams.new_incarnation() for name in names}
        self.pids: dict[str, int] = {}
        self.failure: Exception | None = None
        self.workers: dict[str, ControlConnection] = {}
        self._hosts = Hosts(self.run_id, self.incarnations, self._on_line)
        self._hosts.on_exit = self._on_exit
        self._introduction = Introduction(self.graph, self.key, log_level, self.incarnations, answer_seconds, self._hosts.output_tail)
        self.restarts = Revival(self.graph, self, self._hosts, self._introduction)
        self._hosts.on_gone = self.restarts.on_gone
        self._watching = Watching(self, self._hosts, self.restarts, self.seams.clock, self.run_id)
        self._verdict = Verdict(self.seams.clock, self._hosts.output_tail)
        self._task: asyncio.Task[None] | None = None
        self._loading = Loading(self, self._hosts, self._introduction, self.restarts, self._verdict, self.seams.clock)
        self._stopping = self._told_failure = False
        self._failure_frames: TracebackType | None = None

    async def __aenter__(self) -> Self:
        if self._task is not None:
            raise NotRunningError("a launcher runs once; make a new one")
        loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[None] = loop.create_future()
        self._stop_wanted = asyncio.Event()
        self._task = loop.create_task(self._run(), name=f"launcher {self.run_id}")
        try:
            await asyncio.wait({self._task, self._ready}, return_when=asyncio.FIRST_COMPLETED)
        except BaseException:
            await self._end_now()
            raise
        if not self._ready.done():
            self._raise_failure()
            await self._task  # raises: the run was cancelled, or ended by an internal error
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Stop in order when the block ended without an exception, else kill the run at once.

        After a block without an exception, raises the run's failure unless a call has raised it already.
        """
        if error is not None:
            await self._end_now()
        elif not self._told_failure:
            await self.stop()

    async def send(self, worker: str, control: Control) -> None:
        """Send a message to one worker; wait while its control connection is full. Raises the failure that ended the run, or
        NotRunningError."""
        self._check_running()
        try:
            await self.workers[worker].send(control)
        except (BrokenChannelError, EndOfChannel, ClosedChannelError):  # it is gone
            if not self.restarts.outlives(self.workers[worker].host):
                await self.wait_failed()  # raises the root cause once it is known
            raise NotRunningError(f"{worker} has stopped") from None

    async def wait_failed(self) -> None:
        """Wait for the run's end. Returns when it was stopped; raises the failure when it failed."""
        if self._task is not None:
            await asyncio.wait({self._task})
        self._raise_failure()

    async def statistics(self, seconds: float = STATISTICS_SECONDS) -> dict[str, Statistics]:
        """Request statistics of every worker. A worker that is down, or does not respond within `seconds`, has its latest known counts
        and `has_responded` false. Raises as `send`."""
        self._check_running()
        requested = {worker.name: worker.request_statistics() for worker in self._graph_workers() if not worker.is_over}
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._wait_all(requested.values())
        responded = {name for name, response in requested.items() if response.done()}
        return {name: replace(known, has_responded=name in responded) for name, known in self._statistics().items()}

    async def drain(self, workers: Iterable[str] | None = None) -> None:
        """Make workers finish what runs and admit nothing new, and wait for them all. Default: the workers that emit tags, which are the
        attention workers.

        Has no time limit: cancel it, or leave the block. Raises as `send`.
        """
        self._check_running()
        names = list(workers) if workers is not None else self._emitting()
        await self._wait_all([await self.workers[name].ask_drain() for name in names])

    async def stop(self) -> dict[str, Statistics]:
        """Stop all workers and wait until nothing of the run is left. Returns each worker's last statistics.

        A worker that does not end within `stop_seconds` is killed (event Straggler). Raises the failure of a run that has failed.
        Cancelling it kills the run at once.
        """
        if self._task is None:
            raise NotRunningError("this launcher has not been started")
        self._stop_wanted.set()
        try:
            await asyncio.wait({self._task})
        except asyncio.CancelledError:
            await self._end_now()
            raise
        self._raise_failure()
        if not self._task.cancelled():
            self._task.result()
        return self._statistics()

    def _statistics(self) -> dict[str, Statistics]:
        return {worker.name: self.restarts.statistics(worker.name) for worker in self._graph_workers()}

    def _graph_workers(self) -> list[ControlConnection]:
        return [worker for name, worker in self.workers.items() if name != MONITOR]

    # The run.

    async def _run(self) -> None:
        orderly = False
        try:
            async with asyncio.TaskGroup() as tasks:
                judge = tasks.create_task(self._verdict.judge(), name="judge")
                own = [judge]
                await self._start(tasks, own)
                self.restarts.begin()
                own.append(tasks.create_task(self.restarts.run(), name="revival"))
                if is_watched(self.graph) and FORK_SERVER in self._hosts.exits:
                    own.append(tasks.create_task(self._watching.run(self._log_level), name="watching"))
                self._ready.set_result(None)
                await self._stop_wanted.wait()
                await self._stop(judge)
                for task in own:
                    task.cancel()
            orderly = True
        except BaseExceptionGroup as group:
            self._fail(named_error(group))
        finally:
            self._stopping = True
            await self._clear(orderly)

    async def _start(self, tasks: asyncio.TaskGroup, own: list[asyncio.Task[None]]) -> None:
        """Start every worker, and run the startup handshake with all of them."""
        begun = self._now()
        forked = pack(self.graph)
        here = dict(self._hosted)
        if forked:
            open_backend = self.seams.open_backend or LocalBackend.open
            num_threads = await self._hosts.start(open_backend, self._preload, len(forked), self._introduction.answer_seconds)
            self._on_event(events.ForkServerReady(num_threads))
            async for placed in self._hosts.fork_all(self.graph, forked, self.worker, self._log_level):
                self.add(placed)
        else:
            here = dict.fromkeys(self.graph.process_names(), load_worker(self.worker)) | here
            set_own_threads(self.graph)
        for name, worker in here.items():
            self.add(placed := self._hosts.place_here(tasks, name, worker, self.seams))
            assert placed.task is not None
            own.append(placed.task)

        async def begin(line: ControlConnection) -> None:
            own.append(tasks.create_task(self.follow(line), name=f"line of {line.name}"))
            await self._introduction.start(line)

        connected = await self._loading.wait_loaded(begin) and await self._introduction.wait_connected(list(self.workers.values()))
        if not connected or self._verdict.any_accused:  # a worker may have died after it had connected
            await own[0]  # raises the root cause once it is known
        self._on_event(events.Ready(self._now() - begun))

    def renew(self, name: str) -> None:
        """Assign a new incarnation to `name`."""
        self.incarnations[name] = self.seams.new_incarnation()

    def add(self, placed: Placed) -> ControlConnection:
        line = self.workers[placed.name] = ControlConnection(placed, self, self.incarnations[placed.name])
        self.pids[placed.name] = placed.pid
        self.on_event(events.WorkerStarted(placed.name, placed.pid))
        return line

    async def _stop(self, judge: asyncio.Task[None]) -> None:
        await self.restarts.stop()
        needed = [worker for worker in self.workers.values() if not self.restarts.outlives(worker.host)]
        hosts = [FORK_SERVER, *(worker.host for worker in needed)]
        if self._verdict.any_accused or any(map(self._hosts.has_exited, hosts)) or any(worker.ended.done() for worker in needed):
            await judge  # a worker ended without a Stop: this raises once the root cause is known
        self._stopping = True
        deadline = self._now() + self._stop_seconds
        lines = [worker for worker in self.workers.values() if not worker.is_over]
        await tell_all(lines, deadline)
        if self._verdict.any_accused or not all(worker.told_to_stop for worker in needed):
            await judge
        late = await end_all(lines, self._hosts, deadline)
        for worker in late:
            self._on_event(events.Straggler(worker.name, self._stop_seconds))
        await kill_all(late, self._hosts)

    async def _clear(self, orderly: bool) -> None:
        """End the processes, then close the control connections: in this order no close waits for a peer."""
        cancelled: asyncio.CancelledError | None = None
        try:
            if orderly:
                await self._hosts.aclose()
        except asyncio.CancelledError as error:
            cancelled = error
        finally:
            self._hosts.end_now()
        await close_all(self.workers.values(), cancelled)

    async def _end_now(self) -> None:
        """Cancel the run and wait for its end."""
        assert self._task is not None
        self._task.cancel()
        await see_end(self._task)

    # Messages and deaths of workers.

    async def follow(self, worker: ControlConnection) -> None:
        """Receive from a worker until its control connection ends. That ends the run unless a Stop was sent or the run can lose the
        worker."""
        await worker.listen()
        if worker.told_to_stop or self._loading.loads_again(worker.host):
            return
        if self.restarts.outlives(worker.host):
            self.restarts.on_line_end(worker)
            return
        ends = [self._hosts.exits[host] for host in (worker.host, FORK_SERVER) if host in self._hosts.exits]
        await asyncio.wait(ends, timeout=_STATUS_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        if self._verdict.accused(worker.name, FORK_SERVER):
            return  # it reported the cause itself, or died with the fork server
        how = self._hosts.exits[worker.host].result() if self._hosts.exits[worker.host].done() else "closed its control connection"
        self.accuse(Kind.DIED, worker, how if how.startswith(("was", "failed")) else f"{how} without being told to")

    # The methods of control_connection.Owner.

    def on_event(self, event: events.Event) -> None:
        if not isinstance(event, events.WorkerStarted | events.WorkerListening) or event.name != MONITOR:
            self._on_event(event)

    def on_control(self, line: ControlConnection, control: Control) -> None:
        if line.name == MONITOR:
            self._watching.on_control(line, control)
        else:
            self._on_control(line.name, control)

    def on_connected(self, line: ControlConnection) -> None:
        self._watching.on_connected(line)
        if line.name != MONITOR:
            self._on_event(events.WorkerConnected(line.name))

    def on_sign(self, line: ControlConnection, sign: Heartbeat | LateResponse) -> None:
        if isinstance(sign, Heartbeat):
            self.standing.on_heartbeat(line.name, sign)
        self._watching.on_sign(line, sign)

    def on_link_lost(self, line: ControlConnection, lost: LinkLost) -> None:
        """End the run if no death explains the lost link within EXPLAINED_SECONDS and the run can lose neither end."""
        if self.restarts.on_link_lost(line, lost):
            return
        reason = f"lost its link to {lost.peer}: {lost.reason}"
        asyncio.get_running_loop().call_later(EXPLAINED_SECONDS, self._fail_if_unexplained, line, reason)

    def _fail_if_unexplained(self, line: ControlConnection, reason: str) -> None:
        if not any(worker.ended.done() for worker in self.workers.values()):  # otherwise `follow` reports that worker
            self.accuse(Kind.COMPLAINED, line, reason)

    def _on_exit(self, host: str, how: str) -> None:
        if host == FORK_SERVER:
            self.accuse(Kind.DIED, None, how)
            return
        if self.restarts.outlives(host):
            self.restarts.on_exit(host, how)
            return
        loop = asyncio.get_running_loop()
        for worker in self.workers.values():
            if worker.host == host and not worker.ended.done():  # the connection ends with the process, unless a child of it holds it open
                loop.call_later(EXPLAINED_SECONDS, self._fail_if_open, worker, how)

    def _fail_if_open(self, worker: ControlConnection, how: str) -> None:
        if not worker.ended.done():
            self.accuse(Kind.DIED, worker, how)

    def accuse(self, kind: Kind, line: ControlConnection | None, reason: str) -> None:
        """Record a worker, or the fork server (`line` is None), as a possible root cause of the run's end.

        If the run can lose the worker, only the reason of its death is recorded. No-op for a worker that was sent Stop in a stopping run.
        """
        if line is not None and self.restarts.outlives(line.host):
            self.restarts.blame(line, reason if kind is Kind.DIED else f"failed: {reason}")
            return
        if not self._stopping or (line is not None and not line.told_to_stop):
            name, host = (line.name, line.host) if line is not None else (FORK_SERVER, FORK_SERVER)
            self._verdict.accuse(kind, name, host, reason)

    async def _wait_all(self, answers: Iterable[asyncio.Future[Any]]) -> None:
        """Wait for every response. Raises when the run ends first."""
        assert self._task is not None
        for answer in answers:
            await asyncio.wait({answer, self._task}, return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                self._check_running()

    def _emitting(self) -> list[str]:
        return list(dict.fromkeys(node.process for node in self.graph.nodes.values() if node.operator == SOURCE))

    def _check_running(self) -> None:
        self._raise_failure()
        if self._task is None or self._task.done() or not self._ready.done() or self._stop_wanted.is_set():
            raise NotRunningError("the run has ended" if self._task is not None else "this launcher has not been started")

    def _fail(self, error: BaseException) -> None:
        if not isinstance(error, Exception):
            raise error from None
        if is_too_few(error):
            error = UserError(too_few_descriptors())
        if not isinstance(error, (UserError, WorkerDiedError)):  # an internal error or one of a callback: keep its traceback
            self._failure_frames = error.__traceback__
        self.failure = error
        self._on_event(events.RunFailed(error))

    def _raise_failure(self) -> None:
        if self.failure is not None:
            self._told_failure = True
            raise self.failure.with_traceback(self._failure_frames)  # several callers may raise it: reset the traceback for each

    def _now(self) -> float:
        return asyncio.get_running_loop().time()
