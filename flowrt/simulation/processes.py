"""Implements the simulated process backend: worker processes in virtual time, with the contract of flowrt/system/process_backend.py.

The delay of every notice about a process is drawn from the seed. So notices, the end of the control connection and the reap arrive in any
order that the contract permits. The fork server is a node: while paused it forks nothing and does not begin to serve; its crash ends no
worker.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Collection
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from functools import partial

from flowrt.errors import UserError, WorkerDiedError
from flowrt.graph.model import FORK_SERVER, GATEWAY, MONITOR
from flowrt.processes.fork_server import WorkerMain, load_worker
from flowrt.seams import Seams
from flowrt.simulation.network_conditions import is_hit
from flowrt.simulation.transport import SimulatedChannel
from flowrt.simulation.waitables import OUTSIDE, current_node, set_error, set_result
from flowrt.simulation.world import SimulatedProcess, World
from flowrt.system.clock_offset import SAME_CLOCK
from flowrt.system.process_backend import CONTROL_LIMITS, BackendOwner, ProcessSpec, WorkerProcess
from flowrt.transports.contract import Channel, Identity

KILLED, TERMINATED, SEGFAULT = "was killed by SIGKILL", "was killed by SIGTERM", "was killed by SIGSEGV"
# Seconds between these are drawn, short ones as often as long ones.
NOTICE_SECONDS = 10e-6, 30e-3
RESTART_SECONDS = 0.3e-3, 3.0
MAX_REFUSALS = 2  # of one process in a row: the wait after a third would last longer than a case


@dataclass(frozen=True)
class ProcessConditions:
    """How the simulated system treats processes. `one_in`: 0 means never."""

    refused_one_in: int = 0  # restarts that the system refuses to fork
    no_descriptor_one_in: int = 0  # restarts for which no descriptor is left
    refuses_first: bool = False  # the same of first starts
    unseen_one_in: int = 3  # deaths of which no notice comes before the reap
    unknown_one_in: int = 3  # of these notices: the exit status is not known before the reap
    segfault_one_in: int = 0  # crashes by SIGSEGV, which a request may cause; others are by SIGKILL
    open_seconds: float = 0.05
    unserved_one_in: int = 0  # new fork servers that end while they import
    restart_seconds: tuple[float, float] = RESTART_SECONDS  # between these a restart is drawn


class SimulatedWorkerProcess:
    """One incarnation of a process, as its launcher holds it."""

    clock_offset, model_path = SAME_CLOCK, ""

    def __init__(self, world: World, spec: ProcessSpec, process: SimulatedProcess, controls: tuple[SimulatedChannel, ...]) -> None:
        self.spec, self.process, self.controls, self.pid = spec, process, controls, process.pid
        self.is_returned = False  # by `start`: no notice before
        self._world = world

    def kill(self) -> None:
        self._world.kill(self.process, KILLED)

    async def terminate(self) -> None:
        """A parked process does not react to SIGTERM."""
        if not self._world.loop.is_parked(self.process.node):
            self._world.kill(self.process, TERMINATED)

    def num_unread(self) -> int:
        return sum(control.num_unread for control in self.controls)

    def end_controls(self) -> None:
        for control in self.controls:
            control.receive_rest()

    def output_tail(self) -> tuple[str, ...]:
        return ()


class SimulatedBackend:
    """See flowrt.system.process_backend.ProcessBackend."""

    def __init__(self, world: World, owner: BackendOwner, conditions: ProcessConditions) -> None:
        self._world, self._owner, self._conditions = world, owner, conditions
        self._node = node = current_node.get()
        self._random = world.random_of("processes" if node == OUTSIDE else f"processes of {node}")
        self._processes: dict[str, SimulatedWorkerProcess] = {}  # node -> process; those whose exit was not reported
        self._num_refusals = Counter[str]()  # of each process, since its last start
        self._waiting: dict[asyncio.Future[SimulatedWorkerProcess], None] = {}
        self._closed = self._is_serving = False
        world.deaths.append(self._on_death)
        self._server = self._start_server()

    num_threads = 1

    @property
    def _server_name(self) -> str:
        return FORK_SERVER if self._node == OUTSIDE else f"{FORK_SERVER} of {self._node}"

    @property
    def pid(self) -> int:
        return self._server.pid

    @classmethod
    async def open(cls, world: World, owner: BackendOwner, conditions: ProcessConditions) -> SimulatedBackend:
        backend = cls(world, owner, conditions)
        try:
            await asyncio.sleep(backend._random.uniform(0.0, conditions.open_seconds))
            backend._check_alive()
            backend._is_serving = True
        except BaseException:
            backend.kill_all()
            raise
        return backend

    async def restart(self, seconds: float) -> None:
        self._server = server = self._start_server()
        loaded: asyncio.Future[str] = self._world.loop.create_future()
        self._later(server.node, set_result, loaded, "", between=RESTART_SECONDS)
        try:
            async with asyncio.timeout(seconds):
                await asyncio.wait([loaded, server.exit], return_when=asyncio.FIRST_COMPLETED)
        except TimeoutError:
            self._world.kill(server, KILLED)
            raise WorkerDiedError(FORK_SERVER, f"sent nothing for {seconds:g} s") from None
        if is_hit(self._random, self._conditions.unserved_one_in) and self._num_refusals[FORK_SERVER] < MAX_REFUSALS:
            self._num_refusals[FORK_SERVER] += 1
            self._world.kill(server, KILLED)
            await asyncio.wait([server.exit])
        self._check_alive()
        self._is_serving = True
        del self._num_refusals[FORK_SERVER]

    def kill_server(self) -> None:
        self._world.kill(self._server, KILLED)

    async def start(self, spec: ProcessSpec) -> SimulatedWorkerProcess:
        if not self._is_serving:
            raise WorkerDiedError(FORK_SERVER, KILLED)
        self._check_alive()
        if self._refuses(spec, self._conditions.no_descriptor_one_in):
            raise UserError("too few open files are allowed (simulated)")
        started: asyncio.Future[SimulatedWorkerProcess] = self._world.loop.create_future()
        self._waiting[started] = None
        try:
            between = self._conditions.restart_seconds if self._is_known(spec) else NOTICE_SECONDS
            self._later(self._server.node, self._fork, spec, started, between=between)
            process = await started
        except asyncio.CancelledError:
            if started.done() and not started.cancelled() and started.exception() is None:
                self._abandon(started.result())
            raise
        finally:
            self._waiting.pop(started, None)
        process.is_returned = True
        return process

    def rename(self, process: WorkerProcess, name: str, workers: tuple[Identity, ...]) -> None:
        assert isinstance(process, SimulatedWorkerProcess)
        process.spec = replace(process.spec, name=name, workers=workers)
        self._world.rename(process.process, name)

    def release(self, name: str, weights: Collection[str]) -> None:
        """Nothing is kept of a process that has ended."""

    def output_tail(self) -> tuple[str, ...]:
        return ()

    async def aclose(self) -> None:
        self.kill_all()
        await asyncio.wait([self._server.exit])

    def kill_all(self) -> None:
        """Kill all processes and the fork server. No event is reported afterwards."""
        self._closed = True
        for process in list(self._processes.values()):
            if process.is_returned:
                process.kill()
            else:
                self._abandon(process)
        self._processes.clear()
        self._world.kill(self._server, KILLED)

    # Inside.

    def _start_server(self) -> SimulatedProcess:
        """Its notices come to the node of the launcher, or of its host's server."""
        server = self._world.context(self._node).run(self._world.start, self._server_name, self._serve)
        server.exit.add_done_callback(partial(self._on_server_exit, server), context=self._world.context(self._node))
        return server

    async def _serve(self, seams: Seams) -> None:
        """The task of the fork server: faults pause its node."""
        await self._world.loop.create_future()

    def _fork(self, spec: ProcessSpec, started: asyncio.Future[SimulatedWorkerProcess]) -> None:
        """Forks on the fork server's node."""
        if self._closed:
            return
        if self._refuses(spec, self._conditions.refused_one_in):
            error = WorkerDiedError(spec.name, "could not be forked: BlockingIOError: (simulated)")
            self._later(self._node, set_error, started, error)
            return
        del self._num_refusals[spec.name]
        world = self._world
        node = world.next_node(spec.name)
        # A heartbeat for which the monitor's connection has no room is dropped: with room for one, the monitor sees silence.
        limits = CONTROL_LIMITS if spec.name == MONITOR else world.network.shrink(CONTROL_LIMITS, node)
        pairs = [SimulatedChannel.pair(world.network, (Identity(GATEWAY), self._node), (worker, node), limits) for worker in spec.workers]

        async def host(seams: Seams) -> None:
            async with AsyncExitStack() as stack, asyncio.TaskGroup() as tasks:
                main = load_worker(spec.entry)
                for worker, (_, theirs) in zip(spec.workers, pairs, strict=True):
                    await stack.enter_async_context(theirs)
                    tasks.create_task(_run_worker(main, theirs, seams), name=worker.name)

        launcher = world.context(self._node)  # it adopts the process
        inner = launcher.run(world.start, spec.name, host, [worker.name for worker in spec.workers])
        process = SimulatedWorkerProcess(world, spec, inner, tuple(ours for ours, _ in pairs))
        self._processes[node] = process
        inner.num_unread = process.num_unread
        inner.exit.add_done_callback(partial(self._on_exit, process), context=launcher)
        self._later(self._node, self._complete_start, started, process)

    def _complete_start(self, started: asyncio.Future[SimulatedWorkerProcess], process: SimulatedWorkerProcess) -> None:
        if started.done():  # the caller has left
            self._abandon(process)
        else:
            started.set_result(process)

    def _abandon(self, process: SimulatedWorkerProcess) -> None:
        self._processes.pop(process.process.node, None)
        process.kill()
        for control in process.controls:
            control.sever()

    def _on_death(self, process: SimulatedProcess) -> None:
        """Called at the moment of a kill. All processes die with the process that has opened this backend."""
        if process.node == self._node:
            self.kill_all()
        elif process.node in self._processes and not is_hit(self._random, self._conditions.unseen_one_in):
            self._later(self._node, self._report_dying, self._processes[process.node])

    def _on_exit(self, process: SimulatedWorkerProcess, exit: asyncio.Future[str]) -> None:
        """The launcher reaps it."""
        self._later(self._node, self._report_exit, process, exit.result())

    def _report_dying(self, process: SimulatedWorkerProcess) -> None:
        if process.is_returned and process.process.node in self._processes and not self._closed:
            self._owner.on_dying(process, "" if is_hit(self._random, self._conditions.unknown_one_in) else process.process.how)
            process.end_controls()

    def _report_exit(self, process: SimulatedWorkerProcess, how: str) -> None:
        if process.process.node not in self._processes or self._closed:
            return
        if not process.is_returned:
            self._later(self._node, self._report_exit, process, how)
            return
        del self._processes[process.process.node]
        process.end_controls()
        self._owner.on_exited(process, how)

    def _on_server_exit(self, server: SimulatedProcess, exit: asyncio.Future[str]) -> None:
        if server is not self._server:  # a later one serves
            return
        for started in list(self._waiting):
            set_error(started, WorkerDiedError(FORK_SERVER, exit.result()))
        if self._is_serving:
            self._is_serving = False
            self._later(self._node, self._report_loss, exit.result())

    def _report_loss(self, how: str) -> None:
        if not self._closed:
            self._owner.on_backend_lost(how)

    def _check_alive(self) -> None:
        if self._closed or self._server.exit.done():
            raise WorkerDiedError(FORK_SERVER, self._server.exit.result() if self._server.exit.done() else KILLED)

    def _later(self, node: str, call: Callable[..., object], *arguments: object, between: tuple[float, float] = NOTICE_SECONDS) -> None:
        """Call on `node` after a drawn time."""
        loop = self._world.loop
        seconds = math.exp(self._random.uniform(*map(math.log, between)))
        loop.call_at_node(loop.time() + seconds, node, call, *arguments, context=self._world.context(node))

    def _refuses(self, spec: ProcessSpec, one_in: int) -> bool:
        is_refused = (self._conditions.refuses_first or self._is_known(spec)) and is_hit(self._random, one_in)
        is_refused = is_refused and self._num_refusals[spec.name] < MAX_REFUSALS
        self._num_refusals[spec.name] += is_refused
        return is_refused

    def _is_known(self, spec: ProcessSpec) -> bool:
        """Whether a process of this name was started before."""
        return spec.name in self._world.processes


async def _run_worker(main: WorkerMain, control: Channel, seams: Seams) -> None:
    await main(control, seams)
