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
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from msgspec.structs import replace

from flowrt.actors.control import (
    Connected,
    Control,
    DetectorReport,
    Drain,
    ExpertsUnavailable,
    Failed,
    Heartbeat,
    LateResponse,
    LinkLost,
    Listening,
    LoadProgress,
    Start,
    Statistics,
    StatisticsRequest,
)
from flowrt.errors import NotRunningError, UserError, WorkerDiedError
from flowrt.graph.builtin import SOURCE
from flowrt.graph.model import FORK_SERVER, GATEWAY, MONITOR, Graph, to_json
from flowrt.launcher import events
from flowrt.launcher.control_connection import ControlConnection
from flowrt.launcher.health_record import HealthRecord
from flowrt.launcher.monitor_client import MonitorClient
from flowrt.launcher.run_state import Action, Announce, End, EndProcess, RunState, Send, SendStart, SendStop, StartProcess
from flowrt.launcher.totals import total
from flowrt.launcher.transport_choice import UnavailableReason, choose_transports, host_name, num_threads, pack, usable_cores
from flowrt.process_backend import CONTROL_LIMITS, ProcessBackend, ProcessSpec, WorkerProcess
from flowrt.processes.descriptors import is_too_few, too_few_descriptors
from flowrt.processes.fork_server import WorkerMain, fault_of, load_worker
from flowrt.processes.fork_server_client import LocalBackend
from flowrt.processes.output_tail import exit_text, write_line
from flowrt.seams import Seams
from flowrt.transports.contract import Channel, Identity
from flowrt.transports.errors import BrokenChannelError, ClosedChannelError, EndOfChannel
from flowrt.transports.inproc import InprocChannel
from flowrt.transports.registry import unavailable_reason

WORKER = "flowrt.workers.process:run_worker"
MONITOR_ENTRY = "flowrt.workers.monitor:run_monitor"
PRELOAD = ("torch", "flowrt.workers.process", "flowrt.workers.monitor")
RESPONSE_SECONDS = 120.0  # longest silence of a worker while the run starts; a LoadProgress message ends a silence
FORK_SECONDS = 15.0  # time limit for a fork; a fork takes milliseconds, so a fork server that exceeds this is stopped
STATISTICS_SECONDS = 5.0  # time limit for all responses
STOP_SECONDS = 5.0  # from Stop to the end of the process


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
        response_seconds: float = RESPONSE_SECONDS,
        stop_seconds: float = STOP_SECONDS,
    ) -> None:
        self.seams = seams or Seams()
        self.graph = choose_transports(graph, unavailable_reason)
        self.key = self.seams.new_key()
        self.run_id = self.seams.new_incarnation()
        self._log_level, self._graph_json = log_level, to_json(self.graph)
        self._emitting = list(dict.fromkeys(node.process for node in self.graph.nodes.values() if node.operator == SOURCE))
        self.health_record = HealthRecord(self._emitting, self.seams.clock.now)
        self._on_event = on_event or (lambda event: None)
        self._on_control = on_control or (lambda name, control: None)
        self._on_line = on_line or write_line
        self._hosted = dict(hosted or {})
        self.worker, self._preload = worker, tuple(preload)  # `worker` may be changed until the start
        names = [*self.graph.process_names(), *self._hosted]
        if len({*names, FORK_SERVER, MONITOR}) <= len(names) + 1:
            raise ValueError(f"two workers of one name, or one called {FORK_SERVER} or {MONITOR}, among {names}")
        self._packed = {host_name(workers): workers for workers in pack(self.graph)}
        self.state = RunState(
            self.graph,
            self._packed,
            self._hosted if self._packed else names,
            new_incarnation=self.seams.new_incarnation,
            response_seconds=response_seconds,
            stop_seconds=stop_seconds,
        )
        self.incarnations = self.state.incarnations
        self.pids: dict[str, int] = {}
        self.failure: Exception | None = None
        self.workers: dict[str, ControlConnection] = {}
        self._past_statistics: dict[str, Statistics] = {}  # of all past incarnations
        self._backend: ProcessBackend | None = None
        self._processes: dict[str, WorkerProcess] = {}  # the latest incarnation of each OS process
        self._worker_tasks: dict[str, asyncio.Task[None]] = {}
        self._monitor_client = MonitorClient(self.state, self._step, self.workers, self.seams.clock, self.run_id)
        self._task: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._is_stopping = self._was_failure_raised = False
        self._failure_frames: TracebackType | None = None

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
        elif not self._was_failure_raised:
            await self.stop()

    async def send(self, worker: str, control: Control) -> None:
        """Send a message to one worker; wait while its control connection is full. Raises the failure that ended the run, or
        NotRunningError."""
        self._check_running()
        try:
            await self.workers[worker].send(control)
        except (BrokenChannelError, EndOfChannel, ClosedChannelError, OverflowError) as error:
            if isinstance(error, OverflowError):
                self._step(self.state.on_overflow, worker)
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
        task = self._check_running()
        requested = {name: worker.request(StatisticsRequest()) for name, worker in self._graph_workers() if not self.state.has_ended(name)}
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._wait_all(task, requested.values())
        responded = {name for name, response in requested.items() if response.done()}
        return {name: replace(known, has_responded=name in responded) for name, known in self._statistics().items()}

    async def drain(self, workers: Iterable[str] | None = None) -> None:
        """Make workers finish what runs and admit nothing new, and wait for them all. Default: the workers that emit tags, which are the
        attention workers.

        Has no time limit: cancel it, or leave the block. Raises as `send`.
        """
        task = self._check_running()
        names = [name for name in (workers or self._emitting) if not self.state.has_ended(name)]
        await self._wait_all(task, [self.workers[name].request(Drain()) for name in names])

    async def stop(self) -> dict[str, Statistics]:
        """Stop all workers and wait until nothing of the run is left. Returns each worker's last statistics.

        A worker that does not end within `stop_seconds` is killed (event Straggler). Raises the failure of a run that has failed.
        Cancelling it kills the run at once.
        """
        if self._task is None:
            raise NotRunningError("this launcher has not been started")
        if not self._task.done():
            self._is_stopping = True
            self._step(self.state.stop)
        try:
            await asyncio.wait({self._task})
        except asyncio.CancelledError:
            await self._end_now(self._task)
            raise
        self._raise_failure()
        if not self._task.cancelled():
            self._task.result()
        return self._statistics()

    def _statistics(self) -> dict[str, Statistics]:
        """Statistics of all incarnations of each worker together, as far as they were reported."""
        return {
            name: total(self._past_statistics.get(name), worker.statistics, self.state.num_restarts(name))
            for name, worker in self._graph_workers()
        }

    def _graph_workers(self) -> list[tuple[str, ControlConnection]]:
        return [(name, worker) for name, worker in self.workers.items() if name != MONITOR]

    # The run.

    async def _run(self) -> None:
        orderly, began = False, self._now()
        try:
            async with asyncio.TaskGroup() as tasks:
                self._spawn = tasks.create_task
                if self._packed:
                    open_backend = self.seams.open_backend or LocalBackend.open
                    self._backend = await open_backend(self.run_id, self, self._preload, len(self._packed), self.state.response_seconds)
                    self._announce(events.ForkServerReady(self._backend.num_threads))
                else:
                    set_own_threads(self.graph)
                    self._hosted = dict.fromkeys(self.graph.process_names(), load_worker(self.worker)) | self._hosted
                self._step(self.state.start, began)
                await self._ended
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
            await self._clear(orderly)

    def _step(self, event: Callable[..., None], *arguments: Any) -> None:
        """Pass an event to the run state, with its time, and carry out what follows. An exception ends the run. No-op after the end."""
        if self._ended.done():
            return
        try:
            event(self._now(), *arguments)
            for action in self.state.take_actions():
                self._carry_out(action)
        except Exception as error:
            self._end(error)
        if self._timer is not None:
            self._timer.cancel()
        if (deadline := self.state.deadline) is not None:
            self._timer = asyncio.get_running_loop().call_at(deadline, self._step, self.state.on_time)

    def _carry_out(self, action: Action) -> None:
        match action:
            case Announce(event):
                self._announce(event)
            case StartProcess(process):
                self._start_process(process)
            case EndProcess(process, end_gently):
                self._kill(process, end_gently)
            case SendStart(name):
                worker = self.workers[name]
                worker.post(Start(name, worker.incarnation, self._graph_json, self.key, self._log_level))
            case Send(name, control):
                try:
                    self.workers[name].post(control)
                except OverflowError:
                    asyncio.get_running_loop().call_soon(self._step, self.state.on_overflow, name)
            case SendStop(name, deadline):
                self._spawn(self._send_stop(self.workers[name], deadline), name=f"stop of {name}")
            case End(error, tail_of):
                if isinstance(error, WorkerDiedError) and tail_of is not None:
                    error = WorkerDiedError(error.process, error.reason, self._output_tail(tail_of))
                self._end(error)

    def _end(self, error: Exception | None) -> None:
        if not self._ended.done():
            if error is None:
                self._ended.set_result(None)
            else:
                self._ended.set_exception(error)

    def _announce(self, event: events.Event) -> None:
        self.health_record.note(event)
        self._on_event(event)
        if isinstance(event, events.Ready):
            self._ready.set_result(None)
            if self.state.wants_monitor:
                self._spawn(self._monitor_client.run(), name="monitor client")

    # Processes.

    def _start_process(self, process: str) -> None:
        """Start an OS process, or the task of a worker of this loop."""
        if process in self._hosted:
            ours, theirs = InprocChannel.pair(CONTROL_LIMITS, Identity(GATEWAY), Identity(process, self.incarnations[process]))
            self._worker_tasks[process] = self._spawn(self._run_here(process, theirs), name=f"worker {process}")
            self._connect(process, [process], os.getpid(), [ours])
        elif self._backend is not None:
            self._spawn(self._fork(self._backend, process), name=f"fork of {process}")

    async def _fork(self, backend: ProcessBackend, process: str) -> None:
        workers = self._packed.get(process, [process])
        for name in workers:
            if (former := self.workers.get(name)) is not None:
                await former.aclose()
                self._past_statistics[name] = total(self._past_statistics.get(name), former.statistics)
                former.statistics = Statistics()
        identities = tuple(Identity(name, self.incarnations[name]) for name in workers)
        entry, threads = MONITOR_ENTRY, 1
        if process != MONITOR:
            entry, threads = self.worker, num_threads(self.graph, workers, list(self._packed.values()), usable_cores())
        try:
            async with asyncio.timeout(FORK_SECONDS):
                started = await backend.start(ProcessSpec(process, identities, entry, threads, self._log_level))
        except TimeoutError:
            reason = f"has not responded for {FORK_SECONDS:g} s: is it stopped, or the machine overloaded?"
            self._step(self.state.on_fork_failed, process, WorkerDiedError(FORK_SERVER, reason, backend.output_tail()))
        except (WorkerDiedError, UserError) as error:
            self._step(self.state.on_fork_failed, process, error)
        else:
            self._processes[process] = started
            self._connect(process, workers, started.pid, started.controls)

    def _connect(self, process: str, workers: Sequence[str], pid: int, controls: Sequence[Channel]) -> None:
        for name, control in zip(workers, controls, strict=True):
            connection = self.workers[name] = ControlConnection(name, self.incarnations[name], pid, control)
            self.pids[name] = pid
            self._spawn(self._receive(connection), name=f"control of {name}")
        self._step(self.state.on_forked, process, pid)

    async def _run_here(self, name: str, control: Channel) -> None:
        how = exit_text(0)
        try:
            async with control:
                await self._hosted[name](control, self.seams)
        except Exception as error:
            how = f"failed: {type(error).__name__}: {error}"
            if (fault := fault_of(error)) is not None:
                for line in "".join(traceback.format_exception(fault)).splitlines():
                    self._on_line(name, line)
        finally:
            self._step(self.state.on_exited, name, how)

    def _kill(self, process: str, end_gently: bool) -> None:
        if process in self._worker_tasks:
            self._worker_tasks[process].cancel()
        elif (found := self._processes.get(process)) is not None:
            if end_gently:
                self._spawn(found.terminate(), name=f"end of {process}")
            else:
                found.kill()

    def _output_tail(self, process: str) -> tuple[str, ...]:
        """The last output lines of an OS process; () for a worker in this loop, which writes to this process's stderr."""
        if process == FORK_SERVER and self._backend is not None:
            return self._backend.output_tail()
        return self._processes[process].output_tail() if process in self._processes else ()

    # Notices of the backend (see BackendOwner).

    def on_dying(self, process: WorkerProcess) -> None:
        if self._processes.get(process.spec.name) is process:
            self._step(self.state.on_dying, process.spec.name)

    def on_exited(self, process: WorkerProcess, how: str) -> None:
        if self._processes.get(process.spec.name) is process:
            self._step(self.state.on_exited, process.spec.name, how)

    def on_backend_lost(self, how: str) -> None:
        self._step(self.state.on_backend_lost, how)

    def on_output(self, name: str, line: str) -> None:
        self._on_line(name, line)

    # Messages of workers.

    async def _receive(self, worker: ControlConnection) -> None:
        """Receive from a worker until its control connection ends."""
        reason = await worker.receive_all(lambda control: self._on_worker_control(worker, control))
        if not self._is_current(worker):
            worker.give_up_requests()
            return
        if reason is not None:
            self._step(self.state.on_bad_message, worker.name, f"sent nonsense on its control connection: {reason}")
        if self.state.can_lose(worker.name):
            worker.give_up_requests()
        self._step(self.state.on_connection_closed, worker.name)
        await worker.aclose()

    def _is_current(self, worker: ControlConnection) -> bool:
        return self.incarnations[worker.name] == worker.incarnation

    async def _send_stop(self, worker: ControlConnection, deadline: float) -> None:
        if await worker.send_stop(deadline):
            self._step(self.state.on_stop_sent, worker.name)

    def _on_worker_control(self, worker: ControlConnection, control: Control) -> None:
        name = worker.name
        if not self._is_current(worker):
            return
        if self.state.is_starting(name):
            self._step(self.state.on_message, name)
        match control:
            case Heartbeat():
                self.health_record.on_heartbeat(name, control)
                self._monitor_client.relay(worker, control)
            case LateResponse():
                self._monitor_client.relay(worker, control)
            case LoadProgress():
                self._announce(events.WorkerLoading(name, control.text, control.done, control.total))
            case Listening():
                self._step(self.state.on_listening, name, control)
            case Connected():
                self._step(self.state.on_connected, name)
            case ExpertsUnavailable(text, follows):
                self._announce(events.UnavailableExperts(name, text, follows))
            case LinkLost():
                self._step(self.state.on_link_lost, name, control)
            case Failed():
                self._step(self.state.on_failed, name, control)
            case DetectorReport() if name == MONITOR:
                self._step(self.state.on_detector_report, control)
            case _ if name != MONITOR:
                self._on_control(name, control)

    # The end.

    async def _clear(self, orderly: bool) -> None:
        """End the processes, then close the control connections: in this order no close waits for a peer. It is done even if the caller is
        cancelled meanwhile; then it raises the last cancellation."""
        cancelled: asyncio.CancelledError | None = None
        if self._backend is not None:
            try:
                if orderly:
                    await self._backend.aclose()
            except asyncio.CancelledError as error:
                cancelled = error
            finally:
                self._backend.kill_all()
        for worker in self.workers.values():
            try:
                await worker.aclose()
            except asyncio.CancelledError as error:
                cancelled = error
        if cancelled is not None:
            raise cancelled

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
                self._check_running()

    @property
    def is_running(self) -> bool:
        """Whether the run is ready, and neither stopped nor failed."""
        return self._task is not None and not self._task.done() and self._ready.done() and not self._is_stopping

    def _check_running(self) -> asyncio.Task[None]:
        self._raise_failure()
        if self._task is None:
            raise NotRunningError("this launcher has not been started")
        if not self.is_running:
            raise NotRunningError("the run has ended")
        return self._task

    def _fail(self, error: Exception) -> None:
        if is_too_few(error):
            error = UserError(too_few_descriptors())
        if not isinstance(error, (UserError, WorkerDiedError)):  # an internal error or one of a callback: keep its traceback
            self._failure_frames = error.__traceback__
        self.failure = error
        self._announce(events.RunFailed(error))

    def _raise_failure(self) -> None:
        if self.failure is not None:
            self._was_failure_raised = True
            raise self.failure.with_traceback(self._failure_frames)  # several callers may raise it: reset the traceback for each

    def _now(self) -> float:
        return asyncio.get_running_loop().time()


class _EndedError(Exception):
    """Ends the tasks of a run whose workers have ended in order."""


def set_own_threads(graph: Graph) -> None:
    """Set torch's threads in the user's own process to the largest number in the graph; `auto` keeps the user's setting."""
    wishes = [wish for wish in graph.threads.values() if wish != "auto"]
    if wishes and (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(max(wishes))


def named_error(group: ExceptionGroup[Exception]) -> Exception:
    """The error to report of those that a run's tasks raised: the first UserError or WorkerDiedError, else the first error."""
    error: Exception = group.subgroup((UserError, WorkerDiedError)) or group
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return error
