"""The launcher: starts a graph's workers, connects them to each other, carries their control messages, and ends them all.

It turns messages of control connections, notices of the process backend and timers into events of the run state (run_state.py), and
carries out the actions that follow. A run is one task; all other tasks belong to its task group. A run ends in one of three ways:
- `stop` ends the workers in order.
- A worker fails that the run cannot lose, or a callback of the owner raises. All workers are killed at once, and each later call raises
  the root cause.
- It is cancelled. All workers are killed.
In each case no process, socket or task is left after the `async with` block.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType, TracebackType
from typing import Any, Protocol, Self

from msgspec.structs import replace

from flowrt.actors.control import (
    Connected,
    Control,
    DetectorReport,
    Drain,
    ExpertsUnavailable,
    Failed,
    FenceCalls,
    GraphChanged,
    Heartbeat,
    LateProcess,
    LateResponse,
    LinkLost,
    Listening,
    LoadProgress,
    Start,
    Statistics,
    StatisticsRequest,
)
from flowrt.actors.heartbeats import LAUNCHER_HEARTBEAT_SECONDS, send_heartbeats
from flowrt.errors import NotRunningError, UserError, WorkerDiedError, named_error
from flowrt.graph.delta import check_change, require_valid
from flowrt.graph.facts import ModelFacts
from flowrt.graph.model import FORK_SERVER, GATEWAY, MONITOR, Graph
from flowrt.graph.recovery import pipelines, standby_names
from flowrt.launcher import events
from flowrt.launcher.actions import (
    Action,
    Announce,
    End,
    EndProcess,
    KillForkServer,
    ReleaseProcess,
    Send,
    SendStart,
    StartForkServer,
    StartProcess,
)
from flowrt.launcher.control_connection import ControlConnection
from flowrt.launcher.health_record import HealthRecord
from flowrt.launcher.load_record import LoadRecord
from flowrt.launcher.run_state import RunState
from flowrt.launcher.start_checks import MemoryNeed
from flowrt.launcher.starts import standby_loads
from flowrt.launcher.transport_choice import UnavailableReason, choose_transports, pack, process_name, transport_modules
from flowrt.launcher.worker_pool import PoolOwner, Service, WorkerPool, set_own_threads
from flowrt.processes.descriptors import is_too_few, too_few_descriptors
from flowrt.processes.fork_server import WorkerMain
from flowrt.processes.output_tail import write_line
from flowrt.reliability.health import STALL_SECONDS, Health
from flowrt.seams import Seams
from flowrt.system.machine_limits import usable_cores
from flowrt.transports.errors import BrokenChannelError, ClosedChannelError, EndOfChannel
from flowrt.transports.registry import unavailable_reason

WORKER = "flowrt.workers.process:run_worker"
PRELOAD = ("torch", "flowrt.workers.process", "flowrt.workers.before_fork", "flowrt.workers.monitor")
LIBRARY_PRELOAD = ("flowrt.operators.library_model", "flowrt.operators.library_experts")  # of a model in transformers
RESPONSE_SECONDS = 120.0  # longest silence of a worker while the run starts; a LoadProgress message ends a silence
STATISTICS_SECONDS = 5.0  # time limit for all responses
STOP_SECONDS = 5.0  # from Stop to the end of the process


class LauncherOwner(Protocol):
    """What a launcher calls, in its loop. Neither `on_event` nor `on_control` may block; an exception of theirs ends the run."""

    def on_event(self, event: events.Event) -> None:
        """One of the events of events.py."""

    def on_control(self, worker: str, control: Control) -> None:
        """A message of a worker that is not about starting."""

    async def on_failing(self, error: Exception) -> None:
        """The run has failed, and its processes are killed after this. It must not take long."""


@dataclass(frozen=True)
class LaunchOptions:
    """How a graph is launched.

    is_traced: workers record what they do, see trace_collector.py.
    on_line: called with (process, line) for every line on a process's stderr or stdout; the default writes "[process] line" to stderr.
    It must not block.
    worker, preload: what each worker runs, "module:function", and the modules the fork server imports before it forks.
    unavailable_reason: as for choose_transports; by default the registry's.
    memory_needs: of the processes, by name; without them no WeightsLoading events follow.
    """

    log_level: str = "warning"
    is_traced: bool = False
    on_line: Callable[[str, str], None] = write_line
    worker: str = WORKER
    preload: tuple[str, ...] = PRELOAD
    unavailable_reason: UnavailableReason = unavailable_reason
    response_seconds: float = RESPONSE_SECONDS
    stop_seconds: float = STOP_SECONDS
    memory_needs: Mapping[str, MemoryNeed] = field(default_factory=dict)


class Launcher:
    """A run of `graph`: `async with Launcher(graph, seams, owner) as launcher:` enters when every worker is connected.

    graph: expanded and checked; `launcher.graph` is the same with every edge's transport resolved.
    hosted: workers that run in this loop beside the graph's own, such as the gateway's half of a user's graph: name -> the
    coroutine function to run. They get the same messages over the same kind of control connection.
    services: processes beside the graph's own, by name.

    Raises UserError (bad input, exit code 2) and WorkerDiedError (exit code 3). The thread that enters must outlive the run, because the
    kernel kills the fork server when that thread ends.
    """

    def __init__(
        self,
        graph: Graph,
        seams: Seams,
        owner: LauncherOwner,
        options: LaunchOptions = LaunchOptions(),
        hosted: Mapping[str, WorkerMain] = MappingProxyType({}),
        services: Mapping[str, Service] = MappingProxyType({}),
    ) -> None:
        self.seams, self._owner = seams, owner
        graph = choose_transports(graph, options.unavailable_reason)
        self._unavailable_reason = options.unavailable_reason
        self.key, self.run_id = self.seams.new_key(), self.seams.new_incarnation()
        self.health_record = HealthRecord(graph, self.seams.clock.now)
        self._load_record = LoadRecord(options.memory_needs)
        self._ended_operations: set[str] = set()  # operations of which a call has ended
        self.worker, self._preload = options.worker, options.preload  # `worker` may be changed until the start
        if graph.model is not None and graph.model.implementation == "transformers":
            self._preload += LIBRARY_PRELOAD
        self._preload += transport_modules(graph)
        names = [*graph.process_names(), *hosted]
        own_names = FORK_SERVER, MONITOR, *services, *standby_names(graph)
        if len({*names, *own_names}) < len(names) + len(own_names):
            raise ValueError(f"two workers of one name, or one called {' or '.join(own_names)}, among {names}")
        packed = {process_name(workers): workers for workers in pack(graph)}
        self._start = Start("", "", b"", self.key, options.log_level, is_traced=options.is_traced)  # what is the same for all
        self.state = RunState(
            graph,
            packed | {name: [name] for name in services},
            hosted if packed else names,
            new_incarnation=self.seams.new_incarnation,
            response_seconds=options.response_seconds,
            stop_seconds=options.stop_seconds,
            standby_loads=standby_loads(graph, list(packed.values()), usable_cores()),
        )
        owner_of_pool = PoolOwner(self._step, self._on_worker_control, options.on_line, self._spawn)
        self._pool = WorkerPool(graph, self.seams, self.state, packed, hosted, services, owner_of_pool, options.log_level)
        self.workers, self.pids, self.fork_server_pid = self._pool.connections, self._pool.pids, self._pool.fork_server_pid
        self.failure: Exception | None = None
        self._task: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._is_stopping = False
        self._changed: asyncio.Future[Exception | None] | None = None  # the end of the latest change of the graph
        self.was_failure_raised = False  # by a call of the owner: then the end of the block does not raise it again
        self._failure_frames: TracebackType | None = None

    @property
    def graph(self) -> Graph:
        """The graph as it runs."""
        return self.state.table.graph

    async def __aenter__(self) -> Self:
        if self._task is not None:
            raise NotRunningError("a launcher runs once; make a new one")
        loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[None] = loop.create_future()
        self._ended: asyncio.Future[None] = loop.create_future()
        self._task = loop.create_task(self._run(), name=f"launcher {self.run_id}")
        try:
            await asyncio.wait({self._task, self._ready}, return_when=asyncio.FIRST_COMPLETED)
        except BaseException:
            await self._end_now(self._task)
            raise
        if not self._ready.done():
            self._raise_failure()
            await self._task  # raises: the run was cancelled, or ended by an internal error
            raise NotRunningError("the run was stopped before it was ready")
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Stop in order when the block ended without an exception, else kill the run at once.

        After a block without an exception, raises the run's failure unless a call has raised it already.
        """
        if error is not None and self._task is not None:
            await self._end_now(self._task)
            return
        was_raised = self.was_failure_raised
        try:
            await self.stop()
        except Exception as failure:
            if failure is not self.failure or not was_raised:
                raise

    async def send(self, worker: str, control: Control) -> None:
        """Send a message to one worker; wait while its control connection is full. Raises the failure that ended the run, or
        NotRunningError."""
        self.check_running()
        try:
            await self.workers[worker].send(control)
        except (BrokenChannelError, EndOfChannel, ClosedChannelError):
            if not self.state.can_lose(worker):
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
        task = self.check_running()
        requested = {
            name: worker.request(StatisticsRequest()) for name, worker in self._pool.graph_workers() if not self.state.has_ended(name)
        }
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._wait_all(task, requested.values())
        responded = {name for name, response in requested.items() if response.done()}
        return {name: replace(known, has_responded=name in responded) for name, known in self._pool.statistics().items()}

    async def drain(self) -> None:
        """Make the groups and prefill workers finish what runs and admit nothing new, and wait for them all. One that starts has nothing to
        finish.

        Has no time limit: cancel it, or leave the block. Raises as `send`.
        """
        task = self.check_running()
        names = [name for name in pipelines(self.graph) if self.state.is_usable(name)]
        await self._wait_all(task, [self.workers[name].request(Drain()) for name in names])

    async def apply(self, graph: Graph, facts: ModelFacts | None = None) -> None:
        """Make `graph`, expanded and checked, the graph of the run while requests run. Wait until each new process has joined, and each one
        that it lacks has ended. One change follows another; a cancelled call leaves its change to go on. `facts`: of the model.

        Raises GraphError where the graph cannot change so: then nothing has changed. WorkerDiedError: a new process could not be started,
        and the change was undone. Else as `send`.
        """
        task = self.check_running()
        while self._changed is not None and not self._changed.done():
            await self._wait_all(task, [self._changed])
        require_valid(graph, facts)
        target = choose_transports(graph, self._unavailable_reason)
        check_change(self.graph, target)
        changed = self._changed = asyncio.get_running_loop().create_future()
        self._step(self.state.change.begin, target)
        await self._wait_all(task, [changed])
        if (error := changed.result()) is not None:
            raise error

    async def stop(self) -> dict[str, Statistics]:
        """Stop all workers and wait until nothing of the run is left. Returns each worker's last statistics.

        A worker that does not end within `stop_seconds` is killed (event Straggler). Raises the failure of a run that has failed.
        Cancelling it kills the run at once.
        """
        task = self.opened_task()
        if not task.done():
            self._is_stopping = True
            self._step(self.state.stop)
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError:
            await self._end_now(task)
            raise
        self._raise_failure()
        if not task.cancelled():
            task.result()
        return self._pool.statistics()

    # The run.

    async def _run(self) -> None:
        orderly, began = False, self._now()
        try:
            async with asyncio.TaskGroup() as self._tasks:
                fork_server_threads = await self._pool.open(self.run_id, self.worker, self._preload)
                if fork_server_threads is None:
                    set_own_threads(self.graph)
                else:
                    self._announce(events.ForkServerReady(fork_server_threads))
                    self._step(self.state.starts.on_fork_server_ready, self.fork_server_pid())
                self._step(self.state.start, began)
                if self.state.wants_monitor:
                    self._spawn(self._send_heartbeats(), name="heartbeats of the launcher")
                try:
                    await self._ended
                except Exception as error:
                    await self._owner.on_failing(error)
                    raise
                raise _EndedError
        except* _EndedError:
            orderly = True
        except* Exception as group:
            self._fail(named_error(group))
        finally:
            if self._timer is not None:
                self._timer.cancel()
            if self._ended.done() and not self._ended.cancelled():
                self._ended.exception()  # another error may have ended the run first
            self._ended.cancel()
            await self._pool.close(orderly)

    def _step(self, event: Callable[..., None], *arguments: Any) -> None:
        """Pass an event to the run state, with its time, and carry out what follows. An exception ends the run. No-op after the end."""
        if self._ended.done():
            return
        try:
            for action in self.state.handle(self._now(), event, *arguments):
                self._carry_out(action)
        except Exception as error:
            self.end(error)
        if self._timer is not None:
            self._timer.cancel()
        if (deadline := self.state.deadline) is not None:
            self._timer = asyncio.get_running_loop().call_at(deadline, self._step, self.state.on_time)

    def _carry_out(self, action: Action) -> None:
        match action:
            case Announce(event):
                self._announce(event)
            case StartProcess():
                self._pool.start(action)
            case EndProcess(process, end_gently):
                self._pool.end(process, end_gently)
            case ReleaseProcess(process):
                self._pool.release(process)
            case StartForkServer() | KillForkServer():
                self._pool.replace_fork_server(action)
            case SendStart():
                self.workers[action.worker].post(self._start_of(action))
            case Send(name, control, deadline) if deadline is not None:
                self._spawn(self._send_until(self.workers[name], control, deadline), name=f"last message to {name}")
            case Send(name, StatisticsRequest() as request):
                self.workers[name].request(request)
            case Send(name, control):
                self.workers[name].post(control)
            case End(error, tail_of):
                if isinstance(error, WorkerDiedError) and tail_of is not None:
                    error = WorkerDiedError(error.process, error.reason, self._pool.output_tail(tail_of))
                self.end(error)

    def _start_of(self, action: SendStart) -> Start:
        name, ended, settings = action.worker, tuple(sorted(self._ended_operations)), self._pool.settings_of(action.worker)
        start = replace(self._start, name=name, incarnation=action.incarnation, graph=self._pool.graph_for(name), settings=settings)
        return replace(start, loads=action.loads, loaded_as=action.loaded_as, ended=ended)

    def end(self, error: Exception | None) -> None:
        """End the run, with this error if there is one. No-op after its end."""
        if not self._ended.done():
            if error is None:
                self._ended.set_result(None)
            else:
                self._ended.set_exception(error)

    def _announce(self, event: events.Event) -> None:
        self.health_record.note(event)
        self._owner.on_event(event)
        if not self._ready.done() and (loading := self._load_record.note(event, self._now())) is not None:
            self._owner.on_event(loading)
        if isinstance(event, events.Ready):
            self._ready.set_result(None)
        if isinstance(event, events.ChangeEnded) and self._changed is not None:
            self._changed.set_result(event.error)

    async def _send_heartbeats(self) -> None:
        await send_heartbeats(self.run_id, lambda: (0, None), self.seams.clock, self._send_to_monitor, LAUNCHER_HEARTBEAT_SECONDS, GATEWAY)

    async def _send_until(self, worker: ControlConnection, control: Control, deadline: float) -> None:
        if await worker.send_until(control, deadline):
            self._step(self.state.on_stop_sent, worker.name)

    def _send_to_monitor(self, control: Control) -> None:
        """Send a heartbeat or the like, or drop it. The launcher's own show that its loop runs: else a worker's silence means nothing."""
        if self.state.is_usable(MONITOR):
            self.workers[MONITOR].send_if_room(control)

    # Messages of workers.

    def _on_worker_control(self, worker: ControlConnection, control: Control) -> None:
        name = worker.name
        if self.state.counts_messages(name) and not isinstance(control, LateProcess):  # which its host server has sent
            self._step(self.state.on_message, name)
        match control:
            case Heartbeat():
                self.health_record.on_heartbeat(name, control)
                self._ended_operations.update(control.ended)
                if self.state.is_usable(name):
                    self._send_to_monitor(replace(control, process=name, pid=worker.pid))
            case LateProcess():
                if not self.state.has_ended(name):
                    self._send_to_monitor(replace(control, process=name, incarnation=worker.incarnation))
            case LateResponse():
                if self.state.is_usable(name):
                    self._send_to_monitor(replace(control, by=name))
            case LoadProgress():
                self._announce(events.WorkerLoading(name, control.text, control.done, control.total, control.num_bytes))
            case Connected():
                self._step(self.state.on_connected, name)
            case ExpertsUnavailable():
                self._announce(events.ExpertsReported(name, control))
            case GraphChanged():
                self._step(self.state.change.on_changed, name, control.version)
            case Listening():
                self._step(self.state.on_listening, name, control)
            case LinkLost():
                self._step(self.state.deaths.on_link_lost, name, control)
            case Failed():
                self._step(self.state.deaths.on_failed, name, control)
            case FenceCalls() if name == GATEWAY:
                for other in self.graph.process_names():
                    self.workers[other].post(control)
            case DetectorReport() if name == MONITOR:
                self._step(self.state.on_detector_report, control)
            case _ if name != MONITOR:
                self._owner.on_control(name, control)

    # The end.

    async def _end_now(self, task: asyncio.Task[None]) -> None:
        """Cancel the run and wait for its end, even if the caller is cancelled meanwhile. Then raises the last cancellation."""
        task.cancel()
        cancelled: asyncio.CancelledError | None = None
        while not task.done():
            try:
                await asyncio.wait({task})
            except asyncio.CancelledError as error:
                cancelled = error
        if cancelled is not None:
            raise cancelled

    async def _wait_all(self, task: asyncio.Task[None], responses: Iterable[asyncio.Future[Any]]) -> None:
        """Wait for every response. Raises when the run ends first."""
        for response in responses:
            await asyncio.wait({response, task}, return_when=asyncio.FIRST_COMPLETED)
            if not response.done():
                self.check_running()

    @property
    def incarnations(self) -> dict[str, str]:
        """The current incarnation of each worker."""
        return self.state.incarnations

    @property
    def is_running(self) -> bool:
        """Whether the run is ready, and neither stopped nor failed."""
        return self._task is not None and not self._task.done() and self._ready.done() and not self._is_stopping

    def health(self, stall_seconds: float = STALL_SECONDS) -> Health:
        """Whether work progresses: not ok before the run is ready and after its end, too. Never waits."""
        health = self.health_record.health(stall_seconds)
        if health.ok and not self.is_running:
            return dataclasses.replace(health, ok=False, problems=("the graph is not open",))
        return health

    def opened_task(self) -> asyncio.Task[None]:
        """The task of the run. Raises NotRunningError before the start, and in another event loop, where a caller would wait for ever."""
        if self._task is None:
            raise NotRunningError("the graph is not open; call it inside async with")
        if self._task.get_loop() is not asyncio.get_running_loop():
            raise NotRunningError("the graph was opened in another event loop; call it there, or use flowrt.start, for any thread")
        return self._task

    def check_running(self) -> asyncio.Task[None]:
        self._raise_failure()
        task = self.opened_task()
        if not self.is_running:
            raise NotRunningError("the run has ended")
        return task

    def _fail(self, error: Exception) -> None:
        if is_too_few(error):
            error = UserError(too_few_descriptors())
        if not isinstance(error, (UserError, WorkerDiedError)):  # an internal error or one of a callback: keep its traceback
            self._failure_frames = error.__traceback__
        self.failure = error
        self._announce(events.RunFailed(error))

    def _raise_failure(self) -> None:
        if self.failure is not None:
            self.was_failure_raised = True
            raise self.failure.with_traceback(self._failure_frames)  # several callers may raise it: reset the traceback for each

    def _spawn(self, task: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        return self._tasks.create_task(task, name=name)

    def _now(self) -> float:
        return asyncio.get_running_loop().time()


class _EndedError(Exception):
    """Ends the tasks of a run whose workers have ended in order."""
