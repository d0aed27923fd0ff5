"""The states of a worker: load, listen, link, run, stop.

`run_worker` is the entry point of every worker. A worker process starts it by module name; `processes: one` and the simulation run it
as a task, which is why it takes its channel and its seams as arguments.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import math
import os
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from typing import NoReturn, cast

import msgspec
import torch

from flowrt.actors.control import (
    CallsFenced,
    ChangeGraph,
    Connected,
    DeathCause,
    Failed,
    FenceCalls,
    LinkLost,
    Listening,
    LoadProgress,
    PeerJoined,
    PeerLeft,
    Peers,
    Start,
    Statistics,
    StatisticsRequest,
    Stop,
    TraceRecords,
    TraceRequest,
    from_message,
)
from flowrt.actors.control_link import ControlLink, receive_start
from flowrt.actors.heartbeats import send_heartbeats
from flowrt.actors.links import LinkLostError, Links
from flowrt.dataflow.matching import Firing
from flowrt.dataflow.payload import Payload
from flowrt.dataflow.subgraph import InferenceMode, NodeFunction
from flowrt.errors import OperatorError, UserError, leaves
from flowrt.exchange.kv_transfer import TransferEnd
from flowrt.graph import delta
from flowrt.graph.model import Graph, from_json
from flowrt.graph.notation import parse_ids
from flowrt.graph.placement import weight_set
from flowrt.graph.recovery import is_watched
from flowrt.operators.model_config import ModelError
from flowrt.operators.weight_memory import WeightMemory
from flowrt.seams import LONE_INLINE_SECONDS, Clock, Compute, Running, Seams, ThreadCompute
from flowrt.trace.records import NO_RECORDS, TraceRing
from flowrt.transports.contract import Channel, Identity
from flowrt.transports.wire.message import Message, Tag
from flowrt.workers.data_path import DataPath, LoadedOperators, WorkerContext
from flowrt.workers.emulated import EmulatedWorker
from flowrt.workers.membership import Membership, listen_more
from flowrt.workers.model_files import fingerprints
from flowrt.workers.model_nodes import build_model_nodes, strict_blocks_text
from flowrt.workers.start_check import check_process
from flowrt.workers.traced import TracedWorker

log = logging.getLogger("flowrt.worker")

CONTROL_MESSAGES = 1 << 16  # unread messages of the launcher before its group gives up on it
PROGRESS_SECONDS = 10.0  # between two reports of a worker that loads; shorter than launcher.RESPONSE_SECONDS


class WorkerObserver:
    """What acts beside a worker: nothing, unless a subclass does. `on_sink` takes the firings of nodes without a function, in place of a
    group."""

    on_sink: Callable[[Firing], None] | None = None

    def begin(self, worker: Worker) -> None:
        """Called before any other step."""

    def take_name(self, worker: Worker) -> None:
        """The worker is one of the graph from now on: at its beginning, or when a standby process becomes one."""

    def load(self, worker: Worker, name: str) -> LoadedOperators:
        """Load the operators of the worker `name`, in the compute thread."""
        return worker.load(name)

    def end_loading(self, data_path: DataPath) -> None:
        """The worker has loaded, and takes no message yet."""

    def act(self, worker: Worker, message: Message) -> None:
        """Handle a message of the launcher."""
        worker.act(message)

    def lose(self, worker: Worker, peer: Identity, reason: str) -> None:
        """Handle the end of the link to a peer."""
        worker.lose(peer, reason)


async def run_worker(control: Channel, seams: Seams) -> None:
    """Serve until Stop, or until the control connection ends.

    Sends an error to the launcher as Failed and raises it; an error that the user can fix is raised as UserError.
    """
    await serve(control, seams)


async def serve(control: Channel, seams: Seams, observer: WorkerObserver = WorkerObserver()) -> None:
    """Like `run_worker`."""
    start = await receive_start(control)
    if start is None:
        return
    worker = Worker(start, control, seams, observer)
    async with asyncio.TaskGroup() as group:
        reading = group.create_task(worker.control.run(), name=f"control of {start.name}")
        try:
            await worker.run()
        except BaseException as error:
            await worker.report_error(error)
            cause = next(leaves(error))
            if isinstance(cause, ModelError | LinkLostError):  # a UserError is all that leaves no traceback
                raise UserError(str(cause)) from cause
            raise
        finally:
            reading.cancel()
            await control.aclose()


class Worker:
    """One incarnation of one process of the graph. Created by `serve`."""

    def __init__(self, start: Start, control: Channel, seams: Seams, observer: WorkerObserver = WorkerObserver()) -> None:
        self._observer = observer
        self.control = ControlLink(start.name, control, CONTROL_MESSAGES, self._on_control, self.stop)
        self.seams = seams
        self.graph: Graph = from_json(start.graph)
        self._device = torch.device(self.graph.devices.get(start.name, "cpu"))
        self._loop = asyncio.get_running_loop()
        self._peers: asyncio.Future[Peers | None] = self._loop.create_future()  # None: stopped before they came
        self._stopped = asyncio.Event()
        self._fault: Exception | None = None
        self.compute = self._new_compute(start.name)
        self.emulated: EmulatedWorker | None = None
        self.trace_ring: TraceRing | None = None  # set before it loads: the worker is traced
        self._taken: asyncio.Future[Start | None] = self._loop.create_future()  # the second Start of a standby process; None: stopped
        self._apply_start(start)
        self.data_path: DataPath | None = None  # once it has loaded
        self.membership: Membership | None = None  # once its links are up; until then these two are kept
        self._early_losses: list[tuple[Identity, str]] = []
        self._early_notices: list[PeerLeft | PeerJoined] = []
        self._early_changes: list[ChangeGraph] = []  # kept until it links
        observer.begin(self)
        if not start.loads:
            observer.take_name(self)

    def _new_compute(self, name: str) -> Compute:
        """Calls run on a loop that no other worker shares: it has little to do meanwhile, and a thread would take two switches per call."""
        if any(node.kind.in_one_thread for node in self.graph.nodes_of(name)):
            return self.seams.new_compute(name, 0.0)
        if self.seams.own_loop and self.graph.emulation is None:
            return ThreadCompute(name, LONE_INLINE_SECONDS)
        return self.seams.new_compute(name)

    def _apply_start(self, start: Start) -> None:
        """Set what depends on the name: of a worker of the graph, or of a standby process, which loads the operators of several."""
        self.start = start
        if self.graph.emulation is not None and not start.loads:
            self.emulated = EmulatedWorker(self.graph, start.name, self.compute, self.seams.new_timer())
            self.compute = self.emulated.compute
        if start.is_traced and not start.loads:
            self.trace_ring = TraceRing(self.seams.machine_now)

    @property
    def incarnation(self) -> str:
        return self.start.incarnation

    def emit(self, node: str, tag: Tag, outputs: Mapping[str, Payload]) -> None:
        """Emit a new tag from a source of this process. Raises RuntimeError before the worker has loaded."""
        self._loaded().runner.emit(node, tag, outputs)

    def fence(self, source: str, steps: Collection[int]) -> None:
        """Drop everything of these calls. Raises RuntimeError before the worker has loaded."""
        self._loaded().runner.fence(source, steps)

    def _loaded(self) -> DataPath:
        if self.data_path is None:
            raise RuntimeError(f"{self.start.name} has not loaded yet")
        return self.data_path

    def leftovers(self) -> list[str]:
        """What is left when all requests have ended and no message is in flight."""
        left = [] if self.data_path is None else self.data_path.leftovers()
        return left if self.compute.running is None else [*left, f"computing {self.compute.running.label}"]

    def stop(self) -> None:
        self._stopped.set()
        for awaited in (self._peers, self._taken):
            if not awaited.done():
                awaited.set_result(None)

    async def run(self) -> None:
        data_path: DataPath | None = None
        mode = contextlib.ExitStack()
        try:
            imported_bytes = self.seams.resident_bytes()
            operators = await self._load_operators(imported_bytes)
            if operators is None:
                return
            if self.seams.own_loop and self.graph.model is None:
                mode.enter_context(InferenceMode(True))  # of this thread: then no call on the loop has to enter it
            data_path = self.data_path = self._make_data_path(operators)
            self._observer.end_loading(data_path)
            async with asyncio.TaskGroup() as group:
                addresses = await data_path.links.listen()
                self.control.send(Listening(addresses, self.seams.resident_bytes(), imported_bytes, dict(operators.files)))
                work = group.create_task(self._work(data_path), name=f"work of {self.start.name}")
                await self._stopped.wait()
                work.cancel()
            if self._fault is not None:
                raise self._fault
            self._send_trace(is_last=True)
            self.control.send(data_path.statistics())
            await self.control.flush()
        finally:
            await self.compute.aclose()
            if data_path is not None:
                await data_path.links.aclose()
            if self.emulated is not None:
                self.emulated.close()
            mode.close()

    async def _load_operators(self, imported_bytes: int) -> LoadedOperators | None:
        """The operators of this worker. A standby process loads those of several, and waits until it is one; None: it was stopped."""
        names = self.start.loads or (self.start.name,)
        loaded = {name: await self.compute.run("load", partial(self._observer.load, self, name), bound_seconds=3600.0) for name in names}
        if self.seams.own_loop:
            for descriptor in self.seams.descriptors.values():
                os.close(descriptor)
        if not self.start.loads:
            return loaded[self.start.name]
        self.control.send(Listening({}, self.seams.resident_bytes(), imported_bytes))
        start = await self._taken
        if start is None:
            return None
        self._apply_start(start)
        self._observer.take_name(self)
        self._bind_to_cores()
        self.seams.name_process(start.name)
        nodes, ours = (self.graph.nodes_of(name) for name in (start.loaded_as, start.name))
        return loaded[start.loaded_as].renamed({node.name: our.name for node, our in zip(nodes, ours, strict=True)})

    def _make_data_path(self, operators: LoadedOperators) -> DataPath:
        send, when_sent = self.control.send, self.control.when_sent
        context = WorkerContext(self.graph, self.start, self.seams, self.compute, self.emulated, send, when_sent)
        traced = None if self.trace_ring is None else TracedWorker(self.graph, self.trace_ring, self.emulated)
        return DataPath(context, operators, partial(self._observer.lose, self), self._observer.on_sink, traced)

    def _send_trace(self, is_last: bool = False) -> None:
        """Send the records to the launcher if it traces the run; in pieces, the last of which may be empty."""
        if self.start.is_traced and (ring := self.trace_ring) is not None:
            for piece in ring.take():
                self.control.send(TraceRecords(self.incarnation, piece, ring.num_dropped))
            if is_last:
                self.control.send(TraceRecords(self.incarnation, NO_RECORDS, ring.num_dropped, is_last=True))

    async def _work(self, data_path: DataPath) -> None:
        """Wait for the addresses of the peers, link with them, then fire and exchange messages until cancelled."""
        peers = await self._peers
        if peers is None:
            return
        name, clock, send = self.start.name, self.seams.clock, self.control.send
        while self._early_changes:
            self._change(self._early_changes.pop(0))
        await listen_more(data_path.links, send)
        late = await data_path.links.open(peers.addresses, peers.incarnations)
        incarnations = {peer: incarnation for peer, incarnation in peers.incarnations.items() if peer not in late}
        send(Connected())
        async with asyncio.TaskGroup() as tasks:
            self.membership = Membership(self.graph, data_path, send, clock, tasks, incarnations, peers.restarting)
            for change in self._early_changes:
                self._change(change)
            for lost in self._early_losses:
                self.membership.on_lost(*lost)
            for notice in self._early_notices:
                self.membership.on_control(notice)
            tasks.create_task(data_path.runner.run(), name=f"runner of {name}")
            tasks.create_task(self._run_links(data_path.links), name=f"links of {name}")
            if data_path.group is not None:
                tasks.create_task(data_path.group.run(), name=f"constraints of {name}")
            if self.seams.own_loop and self.graph.jitter.garbage_collection == "idle":
                tasks.create_task(collect_garbage_when_idle(self._is_idle, clock), name=f"garbage collection of {name}")
            if is_watched(self.graph):
                counters, compute = data_path.runner.statistics, self.compute
                group, before = data_path.group, self.start.ended

                def read() -> tuple[int, *tuple[Running | None, ...]]:
                    operations = (compute.running,) if group is None else (compute.running, *group.running)
                    return (counters.num_firings, *operations)

                heartbeats = send_heartbeats(self.incarnation, read, clock, send, ended=counters.nodes.keys(), ended_before=before)
                tasks.create_task(heartbeats, name=f"heartbeats of {name}")

    def _is_idle(self) -> bool:
        return self.compute.running is None and not any(self._loaded().runner.num_waiting().values())

    async def report_error(self, error: BaseException) -> None:
        """Send the error to the launcher: one line, and whether the user can fix it."""
        cause = next(leaves(error))
        if isinstance(cause, asyncio.CancelledError):
            return
        user = isinstance(cause, (UserError, ModelError))
        if isinstance(cause, LinkLostError):  # a peer died before it was linked: the launcher reports that death
            log.error("%s %s", self.start.name, cause)
        elif not user:
            log.error("%s failed", self.start.name, exc_info=cause.__cause__ if isinstance(cause, OperatorError) else cause)
        text = str(cause) if user or isinstance(cause, OperatorError | LinkLostError) else f"{type(cause).__name__}: {cause}"
        self._send_trace(is_last=True)
        self.control.send(Failed(text, user))
        await self.control.flush()

    def load(self, name: str) -> LoadedOperators:
        """Build the node functions of the worker `name`. Runs in the compute thread: reading weights takes seconds, and heartbeats continue
        meanwhile."""

        now = self.seams.clock.now
        latest, due, bytes_read = LoadProgress("", 0, 0), math.inf, 0

        def send(text: str, done: int, total: int) -> None:
            nonlocal latest, due
            latest, due = LoadProgress(text, done, total, bytes_read), now() + PROGRESS_SECONDS
            self._loop.call_soon_threadsafe(self.control.send, latest)

        def on_read(num_bytes: int) -> None:
            nonlocal bytes_read
            bytes_read += num_bytes
            if now() >= due:  # the experts of a large model are one operator
                send(latest.text, latest.done, latest.total)

        model = self.graph.model
        files = fingerprints(Path(model.path)) if model is not None else {}
        functions: dict[str, NodeFunction | TransferEnd] = {**check_process(self.graph, name)}
        if not self.start.loads:
            self._bind_to_cores()
        memory = self._open_memory(name, files)
        functions.update(build_model_nodes(self.graph, name, self._device, now, send, memory, on_read))
        if strict_blocks := strict_blocks_text(self.graph, name):
            log.info("%s: strict numerics: %s", name, strict_blocks)
        if model is not None and fingerprints(Path(model.path)) != files:
            raise UserError(f"{model.path}: a file changed while its weights were loaded; start again")
        if memory is not None:
            memory.seal()
        return LoadedOperators.of(functions, strict_blocks, files)

    def _bind_to_cores(self) -> None:
        if self.seams.own_loop and (cores := self.graph.cores.get(self.start.name)) is not None:
            bind_to_cores(parse_ids(cores))

    def _open_memory(self, name: str, files: Mapping[str, str]) -> WeightMemory | None:
        """The memory of the weights that this worker shares with others of its host; None where it shares none. Waits for another process
        that loads them."""
        weights = weight_set(self.graph, name)
        model, descriptor = self.graph.model, self.seams.descriptors.get(weights)
        if model is None or descriptor is None:
            return None
        waiting = asyncio.run_coroutine_threadsafe(self._report_waiting(), self._loop)
        try:
            # What is strict here is part of the set's name.
            content = (sorted(files.items()), model.dtype, sorted(model.kept.items()), weights, torch.__version__)
            return WeightMemory(os.dup(descriptor), repr(content))
        except OSError as error:
            log.warning("%s reads its own copy of the weights: %s", name, error)
            return None
        finally:
            waiting.cancel()

    async def _report_waiting(self) -> NoReturn:
        """Report progress until cancelled. A process that stops loading releases the memory when the launcher has ended it."""
        while True:
            await self.seams.clock.sleep(PROGRESS_SECONDS)
            self.control.send(LoadProgress("weights, which another process loads", 0, 1))

    # --- messages -------------------------------------------------------------------------------------------------------------

    def _on_control(self, message: Message) -> None:
        try:
            self._observer.act(self, message)
        except Exception as error:  # the control connection must live on, to carry the output tail
            self._fault = self._fault or error
            self.stop()

    def act(self, message: Message) -> None:
        control = from_message(message)
        match control:
            case Start() if self.start.loads and not self._taken.done():
                self._taken.set_result(control)
            case Peers() if not self._peers.done():
                self._peers.set_result(control)
            case Stop():
                self.stop()
            case StatisticsRequest():
                loading = Statistics(resident_bytes=self.seams.resident_bytes())
                self.control.send(loading if self.data_path is None else self.data_path.statistics())
            case TraceRequest():
                self._send_trace()
            case FenceCalls(source, steps):
                self.fence(source, steps)
                self.control.send(CallsFenced(source, steps))
            case ChangeGraph() if self.membership is not None:
                self._change(control)
            case ChangeGraph():
                self._early_changes.append(control)
            case PeerLeft() | PeerJoined() | DeathCause():
                if self.membership is not None:
                    self.membership.on_control(control)
                elif not isinstance(control, DeathCause):  # no part is pending
                    self._keep_notice(control)
            case _ if self.data_path is not None and self.data_path.group is not None:
                self.data_path.group.on_control(control)
            case _:
                raise msgspec.ValidationError(f"unexpected {message.kind!r} at {self.start.name}")

    def lose(self, peer: Identity, reason: str) -> None:
        if self.membership is not None:
            self.membership.on_lost(peer, reason)
        else:
            self._early_losses.append((peer, reason))

    def _change(self, change: ChangeGraph) -> None:
        """Use the next version of the graph."""
        self.graph = delta.apply(self.graph, delta.from_json(change.delta))
        (self.membership or self._loaded()).use(self.graph)

    def _keep_notice(self, control: PeerLeft | PeerJoined) -> None:
        """Keep a notice until the links are up. They do not wait for a peer that has ended."""
        self._early_notices.append(control)
        if isinstance(control, PeerLeft):
            self._loaded().links.drop(control.process, control.incarnation)

    async def _run_links(self, links: Links) -> None:
        """Run the links. A lost peer is reported, not raised: the peer failed, and its exit notification may be in flight."""
        lost: LinkLostError | None = None
        try:
            await links.run()
        except* LinkLostError as errors:
            lost = cast("LinkLostError", next(leaves(errors)))
        if lost is not None:
            self.control.send(LinkLost(lost.peer, lost.reason))
            task = asyncio.current_task()
            if task is None or not task.cancelling():  # a task group with errors drops a cancellation that comes with them
                await self._stopped.wait()


POLL_SECONDS = 0.05
MIN_ALLOCATED = 2_000  # objects that were made and not freed since the latest collection; fewer are not worth a search
MAX_ALLOCATED = 200_000  # with so many, a process that is never idle collects too


def bind_to_cores(cores: Collection[int]) -> None:
    """Let all threads of this process run on these cores only, also those that it starts later."""
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
            os.sched_setaffinity(int(thread), cores)


def is_collection_due(num_allocated: int, is_idle: bool) -> bool:
    return num_allocated >= (MIN_ALLOCATED if is_idle else MAX_ALLOCATED)


async def collect_garbage_when_idle(is_idle: Callable[[], bool], clock: Clock) -> NoReturn:
    """Take Python's own collections over until cancelled. Objects that exist now are not searched again: they stay in use."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        while True:
            await clock.sleep(POLL_SECONDS)
            if is_collection_due(gc.get_count()[0], is_idle()):
                gc.collect()
    finally:
        gc.enable()
