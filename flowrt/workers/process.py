"""The life cycle of a worker: load, listen, link, run, stop.

`run_worker` is the entry point of every worker. A worker process starts it by module name; `processes: one` and the simulation run it
as a task, which is why it takes its channel and its seams as arguments.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec
import torch

from flowrt.actors.control import (
    Connected,
    Control,
    EdgeStatistics,
    Failed,
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
    as_message,
    from_message,
)
from flowrt.actors.heartbeats import send_heartbeats
from flowrt.actors.link_plan import plan_links
from flowrt.actors.links import Link, LinkLostError, Links
from flowrt.dataflow.matching import Firing
from flowrt.dataflow.payload import Payload
from flowrt.dataflow.runner import Runner
from flowrt.dataflow.subgraph import NodeFunction, OperatorError
from flowrt.engine.engine import Engine
from flowrt.errors import UserError
from flowrt.exchange.dispatch import Dispatch
from flowrt.exchange.failover import Failover
from flowrt.graph.builtin import SOURCE
from flowrt.graph.model import Edge, Graph, from_json
from flowrt.graph.recovery import is_watched, may_die
from flowrt.operators.families.registry import read_model_config
from flowrt.operators.model_config import ModelError
from flowrt.seams import LONE_INLINE_SECONDS, Compute, Running, Seams, ThreadCompute
from flowrt.transports.contract import Channel, Identity
from flowrt.transports.wire.message import Message, Tag
from flowrt.workers.emulated import EmulatedWorker
from flowrt.workers.group import Group
from flowrt.workers.membership import Membership
from flowrt.workers.message_schemas import edge_schemas
from flowrt.workers.model_nodes import build_model_nodes, strict_blocks_text
from flowrt.workers.user_nodes import build_user_nodes

log = logging.getLogger("flowrt.worker")

CONTROL_MESSAGES = 1 << 16  # tokens a launcher may be behind before its group gives up on it
FAREWELL_SECONDS = 2.0


async def run_worker(control: Channel, seams: Seams) -> None:
    """Serve until Stop, or until the control connection ends.

    Sends an error to the launcher as Failed and raises it; an error that the user can fix is raised as UserError.
    """
    await serve(control, seams)


async def serve(
    control: Channel, seams: Seams, on_sink: Callable[[Firing], None] | None = None, begin: Callable[[Worker], None] | None = None
) -> None:
    """Like `run_worker`. `on_sink` takes the firings of nodes without a function, in place of a group. `begin` is called with the worker
    before any other step.
    """
    first = await control.recv()
    start = from_message(first)
    if not isinstance(start, Start):
        raise msgspec.ValidationError(f"a worker's first message is Start, not {first.kind!r}")
    worker = Worker(start, control, seams, on_sink)
    if begin is not None:
        begin(worker)
    async with asyncio.TaskGroup() as group:
        line = group.create_task(worker.run_control(), name=f"control of {start.name}")
        try:
            await worker.run()
        except BaseException as error:
            await worker.tell(error)
            cause = first_error(error)
            if isinstance(cause, ModelError):  # below this, only UserError is known as what the user can mend
                raise UserError(str(cause)) from cause
            raise
        finally:
            line.cancel()
            await control.aclose()


class Worker:
    """One incarnation of one process of the graph. Created by `serve`."""

    def __init__(self, start: Start, control: Channel, seams: Seams, on_sink: Callable[[Firing], None] | None) -> None:
        self.line = Link(control, CONTROL_MESSAGES, self._on_control)
        self._start = start
        self._seams = seams
        self._graph: Graph = from_json(start.graph)
        self._device = torch.device(self._graph.devices.get(start.name, "cpu"))
        self._loop = asyncio.get_running_loop()
        self._peers: asyncio.Future[Peers | None] = self._loop.create_future()  # None: stopped before they came
        self._stopped = asyncio.Event()
        self._fault: Exception | None = None
        self._strict_blocks = ""
        self._compute = self._new_compute()
        self._emulated: EmulatedWorker | None = None
        if self._graph.emulation is not None:
            self._emulated = EmulatedWorker(self._graph, start.name, self._graph.emulation, self._compute, seams.new_timer())
            self._compute = self._emulated.compute
        self._runner: Runner | None = None
        self._links: Links | None = None
        self._group: Group | None = None
        self._failover: Failover | None = None
        self._membership: Membership | None = None
        self._on_sink = on_sink or self._on_step_end
        self._link_of: dict[int, tuple[str, str]] = {}

    def _new_compute(self) -> Compute:
        """With one tag in flight, a loop of its own has nothing to do while its worker computes: two hand-overs to a thread less."""
        if self._seams.own_loop and self._graph.tags_in_flight() == 1 and self._graph.emulation is None:
            return ThreadCompute(self._start.name, LONE_INLINE_SECONDS)
        return self._seams.new_compute(self._start.name)

    @property
    def incarnation(self) -> str:
        return self._start.incarnation

    # values that heartbeats report

    @property
    def running(self) -> Running | None:
        return self._compute.running

    @property
    def num_firings(self) -> int:
        return self._runner.statistics.num_firings if self._runner is not None else 0

    def emit(self, node: str, tag: Tag, outputs: Mapping[str, Payload]) -> None:
        """Emit a new tag from a source of this process. Raises RuntimeError before the worker has loaded."""
        if self._runner is None:
            raise RuntimeError(f"{self._start.name} has not loaded yet")
        self._runner.emit(node, tag, outputs)

    def stop(self) -> None:
        self._stopped.set()
        if not self._peers.done():
            self._peers.set_result(None)

    async def run_control(self) -> None:
        """Read and write the control connection. The worker ends when the connection ends, for any reason."""
        try:
            await self.line.run()
        except LinkLostError:
            log.info("%s: the launcher is gone", self._start.name)
        finally:
            self.stop()

    async def run(self) -> None:
        try:
            imported_bytes = self._seams.resident_bytes()
            functions = await self._compute.run("load", self._load, bound_seconds=3600.0)
            self._make_runner(functions)
            assert self._runner is not None
            assert self._links is not None
            async with asyncio.TaskGroup() as group:
                self._send(Listening(await self._links.listen(), self._seams.resident_bytes(), imported_bytes))
                work = group.create_task(self._work(self._runner, self._links), name=f"work of {self._start.name}")
                await self._stopped.wait()
                work.cancel()
            if self._fault is not None:
                raise self._fault
            self._send(self._statistics())
            await self._flush()
        finally:
            await self._compute.aclose()
            if self._links is not None:
                await self._links.aclose()
            if self._emulated is not None:
                self._emulated.close()

    async def _work(self, runner: Runner, links: Links) -> None:
        """Wait for the addresses of the peers, link with them, then fire and exchange messages until cancelled."""
        peers = await self._peers
        if peers is None:
            return
        await links.open(peers.addresses, peers.incarnations)
        self._send(Connected())
        async with asyncio.TaskGroup() as tasks:
            self._membership = Membership(
                self._start.name,
                links,
                self._send,
                self._seams.clock,
                tasks,
                self._failover,
                self._group,
                self._graph.reliability,
                peers.incarnations,
            )
            tasks.create_task(runner.run(), name=f"runner of {self._start.name}")
            tasks.create_task(self._run_links(), name=f"links of {self._start.name}")
            if is_watched(self._graph):
                tasks.create_task(send_heartbeats(self, self._seams.clock, self._send), name=f"beats of {self._start.name}")

    async def tell(self, error: BaseException) -> None:
        """Send the error to the launcher: one line, and whether the user can fix it."""
        cause = first_error(error)
        if isinstance(cause, asyncio.CancelledError):
            return
        user = isinstance(cause, (UserError, ModelError))
        if not user:
            log.error("%s failed", self._start.name, exc_info=cause.__cause__ if isinstance(cause, OperatorError) else cause)
        text = str(cause) if user or isinstance(cause, OperatorError) else f"{type(cause).__name__}: {cause}"
        self._send(Failed(text, user))
        await self._flush()

    # --- loading ------------------------------------------------------------------------------------------------------------

    def _load(self) -> dict[str, NodeFunction]:
        """Build the node functions. Runs in the compute thread: reading weights takes seconds, and heartbeats continue meanwhile."""

        def on_built(text: str, done: int, total: int) -> None:
            self._loop.call_soon_threadsafe(self._send, LoadProgress(text, done, total))

        functions = build_user_nodes(self._graph, self._start.name, self._device)
        functions.update(build_model_nodes(self._graph, self._start.name, self._device, on_built, self._seams.clock.now))
        self._strict_blocks = strict_blocks_text(self._graph)
        for node, function in functions.items():
            if isinstance(function, Dispatch):
                self._failover = Failover(self._graph, node, function.client)
        return functions if self._emulated is None else self._emulated.charged(functions)

    def _make_runner(self, functions: dict[str, NodeFunction]) -> None:
        graph, name, seams = self._graph, self._start.name, self._seams
        identity = Identity(name, self._start.incarnation)
        leaving = {
            edge.transport for edge in graph.edges.values() if graph.nodes[edge.source].process == name != graph.nodes[edge.target].process
        }
        abilities = {scheme: seams.transport(scheme).capabilities for scheme in leaving}
        self._runner = Runner(
            graph,
            name,
            functions,
            self._compute,
            seams.clock,
            self._post,
            self._on_sink,
            self._device,
            {edge.id for edge in graph.edges.values() if edge.transport in abilities and not abilities[edge.transport].between_processes},
            early=getattr(self._compute, "beside_loop", False),
            on_unsent=self._failover.on_unsent if self._failover is not None else None,
            on_response=self._failover.on_response if self._failover is not None and self._failover.can_hedge(graph.reliability) else None,
            on_device={edge.id for edge in graph.edges.values() if edge.transport in abilities and abilities[edge.transport].device_memory},
            on_failed=self._on_failed if graph.model is not None else None,
            schemas=edge_schemas(graph),
        )
        wrap = {"wrap": self._emulated.links.wrap} if self._emulated is not None else {}
        self._links = Links(
            identity,
            self._start.key,
            plan_links(graph, name),
            seams.transport,
            self._runner.accept,
            self._runner.settle,
            on_lost=self._on_lost,
            tolerated=may_die(graph),
            **wrap,
        )
        process_of = {node.name: node.process for node in graph.nodes.values()}
        for edge in graph.edges.values():
            ends = {process_of[edge.source], process_of[edge.target]}
            if name in ends and len(ends) == 2:
                self._link_of[edge.id] = (ends - {name}).pop(), edge.transport
        sources = [node for node in graph.nodes_of(name) if node.operator == SOURCE]
        if sources and graph.model is not None:
            config = read_model_config(Path(graph.model.path))
            engine = Engine(
                graph.limits_of(name),
                graph.micro_batches,
                config.max_position_embeddings,
                config.vocab_size,
                config.eos_token_ids,
                chunk_tokens=graph.limits.chunk_tokens if graph.numerics == "strict" else 0,
            )
            page_size = graph.limits.page_size
            self._group = Group(
                sources[0],
                self._start.incarnation,
                engine,
                self._runner,
                self._send,
                page_size,
                self._device,
                *((self._failover.roll_back, self._failover.take_degraded) if self._failover is not None else ()),
            )
        if self._failover is not None and self._group is not None:
            self._failover.begin(self._runner, self._group.may_redispatch)

    # --- messages -------------------------------------------------------------------------------------------------------------

    def _on_control(self, message: Message) -> None:
        try:
            self._act(message)
        except Exception as error:  # the control connection must live on, to carry these output tail
            self._fault = self._fault or error
            self.stop()

    def _act(self, message: Message) -> None:
        control = from_message(message)
        match control:
            case Peers() if not self._peers.done():
                self._peers.set_result(control)
            case Stop():
                self.stop()
            case StatisticsRequest():
                self._send(self._statistics())
            case PeerLeft() | PeerJoined():
                if self._membership is not None:
                    self._membership.on_control(control)
            case _ if self._group is not None:
                self._group.on_control(control)
            case _:
                raise msgspec.ValidationError(f"{self._start.name} has no use for {message.kind!r}")

    def _on_lost(self, peer: Identity, reason: str) -> None:
        assert self._membership is not None
        self._membership.on_lost(peer, reason)

    def _on_failed(self, tag: Tag, error: OperatorError) -> None:
        if self._group is None:
            raise error
        self._group.fail_step(tag, error)

    def _on_step_end(self, firing: Firing) -> None:
        assert self._group is not None
        self._group.on_step_end(firing)

    def _post(self, edge: Edge, message: Message) -> None:
        assert self._links is not None
        self._links[self._link_of[edge.id]].post(message)

    def _send(self, control: Control) -> None:
        self.line.post(as_message(control))

    async def _flush(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FAREWELL_SECONDS):
                await self.line.flush()

    async def _run_links(self) -> None:
        """Run the links. A lost peer is reported, not raised: the peer failed, and its exit notification may be in flight."""
        assert self._links is not None
        try:
            await self._links.run()
        except* LinkLostError as errors:
            lost = first_error(errors)
            assert isinstance(lost, LinkLostError)
            self._send(LinkLost(lost.peer, lost.reason))
            await self._stopped.wait()

    def _statistics(self) -> Statistics:
        if self._runner is None or self._links is None:  # requested while it loads
            return Statistics(resident_bytes=self._seams.resident_bytes())
        counters = self._runner.statistics
        edges = tuple(
            EdgeStatistics(edge.name, edge.transport, *counters.sent[edge.id])
            for edge in self._graph.edges.values()
            if edge.id in counters.sent
        )
        return Statistics(
            edges=edges,
            num_firings=counters.num_firings,
            compute_seconds=counters.compute_seconds,
            inline_seconds=counters.inline_seconds,
            num_steps=self._group.num_steps if self._group is not None else 0,
            late_wakeups=sum(link.statistics().late_wakeups for link in self._links.values()),
            resident_bytes=self._seams.resident_bytes(),
            strict_blocks=self._strict_blocks,
            emulation=self._emulated.statistics() if self._emulated is not None else None,
            fallbacks=self._links.fallbacks(),
            num_redispatched=self._failover.num_redispatched if self._failover is not None else 0,
        )


def first_error(error: BaseException) -> BaseException:
    """The first error within nested exception groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
