"""Starts and ends the processes of a run, owns the control connections of their workers, and adds up their statistics.

It decides nothing: notices of the process backend and ends of connections become events of the run state (run_state.py).
"""

from __future__ import annotations

import asyncio
import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from flowrt.actors.control import Control, Statistics
from flowrt.errors import UserError, WorkerDiedError
from flowrt.graph.model import FIRST_HOST, FORK_SERVER, GATEWAY, MONITOR, Graph, to_json
from flowrt.graph.placement import weight_set
from flowrt.hosts.backend import HostsBackend
from flowrt.launcher.actions import KillForkServer, StartForkServer, StartProcess
from flowrt.launcher.control_connection import ControlConnection
from flowrt.launcher.run_state import RunState
from flowrt.launcher.starts import IMPORT_SECONDS
from flowrt.launcher.totals import total
from flowrt.launcher.transport_choice import BETWEEN_HOSTS, num_threads, pack, process_name
from flowrt.processes.fork_server import WorkerMain, fault_of, load_worker
from flowrt.processes.fork_server_client import LocalBackend
from flowrt.processes.output_tail import exit_text
from flowrt.seams import Seams
from flowrt.system.clock_offset import SAME_CLOCK, ClockOffset
from flowrt.system.machine_limits import cpu_quota, usable_cores
from flowrt.system.process_backend import CONTROL_LIMITS, ProcessBackend, ProcessSpec, WorkerProcess
from flowrt.transports.contract import Channel, Identity
from flowrt.transports.inproc import InprocChannel

MONITOR_ENTRY = "flowrt.workers.monitor:run_monitor"


@dataclass(frozen=True)
class Service:
    """A process of flowrt that runs beside those of the graph, such as a front end. The launcher starts and watches it like them.

    `entry`: what it runs, "module:function". It finds `settings` in its Start, and gets copies of these `descriptors` of the launching
    process (Seams.descriptors), by name. Its death is never the end of a run that is ready: it is restarted within its restart budget."""

    entry: str
    settings: bytes = b""
    descriptors: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class PoolOwner:
    """The launcher, as its pool calls it: `step` passes an event to the run state; `on_control` takes each message of a current
    incarnation, `on_line` each line that a process writes; `spawn` creates the tasks of the run."""

    step: Callable[..., None]
    on_control: Callable[[ControlConnection, Control], None]
    on_line: Callable[[str, str], None]
    spawn: Callable[..., asyncio.Task[Any]]


class WorkerPool:
    """`packed`: the workers of each OS process, by its name; `hosted`: workers that are tasks of this loop; `services`: further
    processes."""

    def __init__(
        self,
        graph: Graph,
        seams: Seams,
        state: RunState,
        packed: Mapping[str, Sequence[str]],
        hosted: Mapping[str, WorkerMain],
        services: Mapping[str, Service],
        owner: PoolOwner,
        log_level: str,
    ) -> None:
        self._seams, self._state, self._packed, self._hosted = seams, state, packed, dict(hosted)
        self._services = services
        self._step, self._on_control, self.on_output, self._spawn = owner.step, owner.on_control, owner.on_line, owner.spawn
        self._log_level, self._num_cores = log_level, usable_cores()
        self.connections: dict[str, ControlConnection] = {}  # of the latest incarnation of each worker
        self.pids: dict[str, int] = {}
        self._entry = ""
        self._past_statistics: dict[str, Statistics] = {}  # of all past incarnations
        self._backend: ProcessBackend | None = None
        self._processes: dict[str, WorkerProcess] = {}  # the latest incarnation of each OS process
        self._tasks: dict[str, asyncio.Task[None]] = {}  # of hosted workers
        self._names = set(graph.process_names())  # of all versions of the graph
        self._graphs = {(0, ""): to_json(graph)}  # of one version, as workers receive it, by the path of a copy of the model

    @property
    def _graph(self) -> Graph:
        return self._state.table.graph

    async def open(self, run_id: str, entry: str, preload: Sequence[str]) -> int | None:
        """Open the process backend; without OS processes, the graph's workers become tasks. Returns the number of threads that the
        backend's imports have left running, None without a backend."""
        self._entry = entry
        if not self._packed:
            self._hosted = dict.fromkeys(self._graph.process_names(), load_worker(entry)) | self._hosted
            preload = ()
        if not self._packed and not self._services:
            return None
        arguments = (run_id, self, preload, len(self._packed) + len(self._services), self._state.response_seconds)
        if self._graph.hosts is None:
            self._backend = await (self._seams.open_backend or LocalBackend.open)(*arguments)
        else:
            self._backend = hosts = await HostsBackend.open(self._graph, self._seams, BETWEEN_HOSTS[0], self._spawn, *arguments)
            self._seams = replace(self._seams, host_address=hosts.host_address)  # of workers that are tasks of this loop
        return self._backend.num_threads if self._packed else None

    def start(self, action: StartProcess) -> None:
        """Start an OS process, or the task of a hosted worker."""
        process = action.process
        if process in self._hosted:
            ours, theirs = InprocChannel.pair(CONTROL_LIMITS, Identity(GATEWAY), action.workers[0])
            self._tasks[process] = self._spawn(self._run_here(process, theirs), name=f"worker {process}")
            self._connect(action, os.getpid(), [ours], lambda: SAME_CLOCK)
        elif self._backend is not None and action.standby:
            self._use_standby(self._backend, action)
        elif self._backend is not None:
            self._spawn(self._fork(self._backend, action), name=f"fork of {process}")

    def graph_for(self, process: str) -> bytes:
        """The graph, as JSON, with the path where the latest incarnation of the process finds the model's files."""
        path, graph = self._processes[process].model_path if process in self._processes else "", self._graph
        if (graph.version, path) not in self._graphs:
            self._graphs = {key: known for key, known in self._graphs.items() if key[0] == graph.version}
            model = replace(graph.model, path=path) if graph.model is not None and path else graph.model
            self._graphs[graph.version, path] = to_json(graph.replace(model=model))
        return self._graphs[graph.version, path]

    def settings_of(self, process: str) -> bytes:
        """What a service is started with."""
        return self._services[process].settings if process in self._services else b""

    def replace_fork_server(self, action: StartForkServer | KillForkServer) -> None:
        if self._backend is None:
            return
        if isinstance(action, KillForkServer):
            self._backend.kill_server()
        else:
            self._spawn(self._restart(self._backend), name="restart of the fork server")

    def fork_server_pid(self) -> int:
        """0 while there is none."""
        return self._backend.pid if self._backend is not None else 0

    def end(self, process: str, gently: bool) -> None:
        if process in self._tasks:
            self._tasks[process].cancel()
        elif (found := self._processes.get(process)) is not None:
            if gently:
                self._spawn(found.terminate(), name=f"end of {process}")
            else:
                found.kill()

    def release(self, process: str) -> None:
        """Forget a process that has ended and left the graph, and the weights that no other one has."""
        self.pids.pop(process, None)
        if self._processes.pop(process, None) is not None and self._backend is not None:
            self._backend.release(process, {weight_set(self._graph, name) for name in self._graph.process_names()})

    def output_tail(self, process: str) -> tuple[str, ...]:
        """The last output lines of an OS process; () for a worker in this loop, which writes to this process's stderr."""
        if process == FORK_SERVER and self._backend is not None:
            return self._backend.output_tail()
        return self._processes[process].output_tail() if process in self._processes else ()

    def graph_workers(self) -> list[tuple[str, ControlConnection]]:
        names = self._names
        names.update(self._graph.process_names())
        return [(name, connection) for name, connection in self.connections.items() if name in names or name in self._hosted]

    def statistics(self) -> dict[str, Statistics]:
        """Statistics of all incarnations of each worker together, as far as they were reported."""
        return {
            name: total(self._past_statistics.get(name), connection.statistics, self._state.num_restarts(name))
            for name, connection in self.graph_workers()
        }

    async def close(self, orderly: bool) -> None:
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
        for connection in self.connections.values():
            try:
                await connection.aclose()
            except asyncio.CancelledError as error:
                cancelled = error
        if cancelled is not None:
            raise cancelled

    # Notices of the backend (see BackendOwner).

    def on_dying(self, process: WorkerProcess, how: str) -> None:
        if self._processes.get(process.spec.name) is process:
            self._step(self._state.deaths.on_dying, process.spec.name, how)

    def on_exited(self, process: WorkerProcess, how: str) -> None:
        if self._processes.get(process.spec.name) is process:
            self._step(self._state.deaths.on_exited, process.spec.name, how)

    def on_backend_lost(self, how: str) -> None:
        self._step(self._state.deaths.on_fork_server_lost, how)

    # Inside.

    async def _restart(self, backend: ProcessBackend) -> None:
        try:
            await backend.restart(IMPORT_SECONDS)
        except (WorkerDiedError, UserError) as error:
            self._step(self._state.starts.on_fork_server_failed, error)
        else:
            self._step(self._state.starts.on_fork_server_ready, backend.pid)

    async def _fork(self, backend: ProcessBackend, action: StartProcess) -> None:
        process = action.process
        for worker in action.workers:
            if (former := self.connections.get(worker.name)) is not None:
                await former.aclose()
                self._end_statistics(worker.name)
        entry, threads, weights, service = MONITOR_ENTRY, 1, tuple[str, ...](), self._services.get(process)
        if service is not None:
            entry = service.entry
        elif process != MONITOR:
            names, loads = [worker.name for worker in action.workers], self._state.starts.loads_of(process)
            host = self._graph.host_of(process)
            beside = [workers for workers in pack(self._graph) if self._graph.host_of(process_name(workers)) == host]
            entry, threads = self._entry, num_threads(self._graph, loads[:1] or names, beside, self._num_cores)
            weights = tuple(dict.fromkeys(filter(None, (weight_set(self._graph, name) for name in loads or names))))
        try:
            async with asyncio.timeout(self._state.starts.fork_seconds):
                descriptors = service.descriptors if service is not None else {}
                spec = ProcessSpec(process, action.workers, entry, threads, self._log_level, weights, descriptors)
                started = await backend.start(spec)
        except TimeoutError:
            if (host := self._graph.host_of(process)) == FIRST_HOST:
                self._step(self._state.deaths.on_fork_silent, process)
            else:
                error = WorkerDiedError(process, f"was not started on {host} in time")
                self._step(self._state.deaths.on_fork_failed, process, error)
        except (WorkerDiedError, UserError) as error:
            self._step(self._state.deaths.on_fork_failed, process, error)
        else:
            self._processes[process] = started
            self._connect(action, started.pid, started.controls, lambda: started.clock_offset)

    def _use_standby(self, backend: ProcessBackend, action: StartProcess) -> None:
        """The standby process becomes a new incarnation of the process."""
        started, connection, (worker,) = self._processes.pop(action.standby), self.connections.pop(action.standby), action.workers
        del self.pids[action.standby]
        backend.rename(started, action.process, action.workers)
        self._processes[action.process] = started
        self._spawn(self.connections[worker.name].aclose(), name=f"end of the former {worker.name}")
        self._end_statistics(worker.name)
        connection.assign(worker)
        self._use(connection)
        self._step(self._state.on_forked, action.process, started.pid)

    def _end_statistics(self, name: str) -> None:
        """Add the statistics of the latest incarnation, which has ended, to those of the earlier ones."""
        former = self.connections[name]
        self._past_statistics[name] = total(self._past_statistics.get(name), former.statistics)
        former.statistics = Statistics()

    def _use(self, connection: ControlConnection) -> None:
        self.connections[connection.name] = connection
        self.pids[connection.name] = connection.pid

    def _connect(self, action: StartProcess, pid: int, controls: Sequence[Channel], clock_offset: Callable[[], ClockOffset]) -> None:
        for worker, control in zip(action.workers, controls, strict=True):
            on_overflow = partial(self._step, self._state.deaths.on_overflow)
            connection = ControlConnection(worker.name, worker.incarnation, pid, control, on_overflow, clock_offset)
            self._use(connection)
            self._spawn(self._receive(connection), name=f"control of {worker.name}")
        self._step(self._state.on_forked, action.process, pid)

    async def _run_here(self, name: str, control: Channel) -> None:
        how = exit_text(0)
        try:
            async with control:
                await self._hosted[name](control, self._seams)
        except Exception as error:
            how = f"failed: {type(error).__name__}: {error}"
            if (fault := fault_of(error)) is not None:
                for line in "".join(traceback.format_exception(fault)).splitlines():
                    self.on_output(name, line)
        finally:
            self._step(self._state.deaths.on_exited, name, how)

    async def _receive(self, connection: ControlConnection) -> None:
        """Receive from a worker until its control connection ends. A standby process may get another name meanwhile."""

        def on_control(control: Control) -> None:
            if self._state.accepts_messages(connection.name, connection.incarnation):
                self._on_control(connection, control)

        reason = await connection.receive_all(on_control)
        name = connection.name
        if not self._state.is_current(name, connection.incarnation):
            connection.give_up_requests()
            return
        if reason is not None:
            self._step(
                self._state.deaths.on_bad_message, name, f"sent a message on its control connection that cannot be decoded: {reason}"
            )
        if self._state.can_lose(name):
            connection.give_up_requests()
        self._step(self._state.deaths.on_connection_closed, name)
        await connection.aclose()


def set_own_threads(graph: Graph) -> None:
    """Set torch's threads in the user's own process to the largest number in the graph; `auto` keeps the user's setting, within the quota
    of a container, of which torch does not know."""
    if (torch := sys.modules.get("torch")) is None:
        return
    wishes = [wish for wish in graph.threads.values() if wish != "auto"]
    if wishes:
        torch.set_num_threads(max(wishes))
    elif cpu_quota() is not None and torch.get_num_threads() > usable_cores():
        torch.set_num_threads(usable_cores())
