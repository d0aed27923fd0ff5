"""The runner of one process: accepts messages and emitted tags, matches them, fires nodes, and sends the outputs.

Each worker has one Runner; model graphs and users' graphs run through it alike.

Credits. An edge that leaves the process has `credits` messages that may be in flight or unconsumed. The response to a request
returns the request's credit, so a responding process never waits for the requesting one. Other credits are returned when the firing
that consumed the message has ended, several in one message where the sender cannot need one sooner. A firing starts only when every
edge that it can reach has a credit left.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Protocol

import msgspec
import torch

from flowrt.actors.link import CREDIT, BadMessageError
from flowrt.dataflow.common_case import CommonCase, CommonCasePlans
from flowrt.dataflow.fences import Fences
from flowrt.dataflow.inbound_edges import InboundEdges, Orphans
from flowrt.dataflow.matching import Firing, MatchingTable
from flowrt.dataflow.outbound_edges import OutboundEdges
from flowrt.dataflow.parts import FAILED, FailedHeader
from flowrt.dataflow.payload import Payload
from flowrt.dataflow.ready_firings import ReadyFirings
from flowrt.dataflow.schemas import MessageSchema
from flowrt.dataflow.selection import by_layer, policy_of
from flowrt.dataflow.statistics import RunnerStatistics
from flowrt.dataflow.subgraph import (
    FailedFiringsError,
    FusedSubgraph,
    InferenceMode,
    NodeFunction,
    RoutedOutput,
    SendEarly,
    part_of,
    part_of_request,
    plan_of,
)
from flowrt.errors import OperatorError, as_line
from flowrt.graph.fuse import fuse
from flowrt.graph.model import Edge, Graph
from flowrt.seams import Clock, Compute
from flowrt.timer import LoopTimer, Sleeper, Timer
from flowrt.transports.wire.message import Message, Tag

log = logging.getLogger("flowrt.worker")

_NONE: Mapping[int, MessageSchema] = MappingProxyType({})
MAX_INLINE = 16  # short firings in a row before the loop gets a turn


class RunnerOwner(Protocol):
    """What a runner calls; nothing of it waits."""

    def post(self, edge: Edge, message: Message) -> None:
        """Pass a message to the link of that edge."""

    def on_sink(self, firing: Firing) -> None:
        """A node without a function fires."""

    def on_failed(self, tag: Tag, error: OperatorError) -> None:
        """A firing of that tag failed here. In a model graph, a firing that belongs to a request of another worker is excepted: that worker
        receives the error as the response, and its own `on_failed` is called. In a user's graph the runner has fenced the call at its first
        error; the other workers must `fence` it too."""

    def on_unsent(self, output: RoutedOutput) -> None:
        """An output was for a closed edge."""

    def on_response(self, edge: int, tag: Tag, message: Message) -> None:
        """A response has come; that of a node of this process has no tensors."""


_TYPES_OF_COMMON_CASE = Firing, Message, Payload, Tag, RoutedOutput, deque, InferenceMode


class Runner:
    """Runs the nodes of `process`.

    `functions` maps each node to its function; a node without one is a sink. `staying` and `on_device`: see OutboundEdges. `early`: long
    calls run on a separate thread, or in modelled time, so outputs to other workers are sent while the rest of the firing is computed.

    `accept` takes each message; one `settle` then runs the short firings without a turn of the loop. `schemas`, by edge: the required
    form of messages from other OS processes. `new_timer`: for selection policies that wait. `compiled`: the commonest case runs in C where
    the module has been built.
    """

    def __init__(
        self,
        graph: Graph,
        process: str,
        functions: Mapping[str, NodeFunction],
        compute: Compute,
        clock: Clock,
        owner: RunnerOwner,
        device: torch.device | None = None,
        staying: Collection[int] = (),
        early: bool = False,
        on_device: Collection[int] = (),
        schemas: Mapping[int, MessageSchema] = _NONE,
        new_timer: Callable[[], Timer] = LoopTimer,
        compiled: bool = False,
    ) -> None:
        nodes = graph.nodes_of(process)
        self._process = process
        self._sinks = {node.name for node in nodes if node.name not in functions}
        fused = frozenset(fuse(graph, process).fused) - self._sinks
        self._early, self._compute, self._clock, self._owner, post = early, compute, clock, owner, owner.post
        self._fences = Fences()
        self._isolates = graph.model is None
        self._takes_interrupts = graph.processes == "one"  # the user's own process: an interrupt on its loop is a Ctrl-C
        self._table = MatchingTable(nodes, graph.edges.values(), plan_of, part_of, self._fences.failed, self._fences.forgotten)
        self._subgraph = FusedSubgraph(graph, process, fused, functions, self._table)
        self._outbound = OutboundEdges(graph, process, post, self._on_unsendable, owner.on_unsent, staying, on_device, schemas, clock.now)
        device = None if device is None or device.type == "cpu" else device
        self._inbound = InboundEdges(graph, process, post, self._outbound, staying, device, schemas, self._fences)
        self._is_computing = False  # in the compute thread, which also uses the order of stateful nodes
        self._when_idle: dict[Callable[[], None], None] = {}  # called when it does not
        self._ready = ReadyFirings(compute.is_short, clock.now)
        self._common: CommonCase | None = None
        self._plans = CommonCasePlans(self._inbound, self._outbound, self._subgraph, self._table, self._ready, self._sinks)
        self._derive(graph)
        self._sleeper = Sleeper(clock.now, new_timer)  # for `run` when no firing is ready
        self._wake = self._sleeper.wake
        self._failure: Exception | None = None  # of a firing outside `run`, which raises it
        self.statistics = RunnerStatistics(sent=self._outbound.sent)
        self.edge_times, self.num_waiting = self._outbound.times, self._ready.num_waiting
        if compiled and CommonCase is not None:
            self._use_common_case(functions, CommonCase)

    def use(
        self, graph: Graph, staying: Collection[int] = (), on_device: Collection[int] = (), schemas: Mapping[int, MessageSchema] = _NONE
    ) -> None:
        """Use this graph from now on, in which the nodes of this process have the same inputs. New edges are open; `end_peer` closes those
        to a peer that has not joined yet, and must be called before the edges to a peer go."""
        self._table.use(graph.nodes_of(self._process), graph.edges.values())
        self._subgraph.use(graph)
        self._outbound.use(graph, staying, on_device, schemas)
        self._inbound.use(graph, staying, schemas)
        self._derive(graph)
        self._wake()

    def _derive(self, graph: Graph) -> None:
        nodes = graph.nodes_of(self._process)
        responses = [edge for node in nodes for edge in graph.edges_from(node.name) if edge.request_id is not None]
        self._responses = {edge.request_id: edge for edge in responses if graph.crosses(edge)}
        self._keeping = {*graph.responders.values()}  # nodes whose requests are consumed by the node that responds to them
        reach = {node.name: [self._outbound.edges[edge] for edge in self._subgraph.reachable(node.name)] for node in nodes}
        policies = {node.name: policy_of(node, graph.emulation) for node in nodes}
        self._ready.use(reach, policies)
        self._plans.one_by_one = {node for node, policy in policies.items() if policy.takes_one and node not in self._keeping}
        if self._common is not None:
            self._common.forget_plans()

    def _use_common_case(self, functions: Mapping[str, NodeFunction], common_case: type[CommonCase]) -> None:
        inbound, statistics, compute = self._inbound, self.statistics, self._compute
        self._common = common = common_case(
            self,
            self._plans,
            inbound,
            inbound.edges,
            self._outbound,
            self._subgraph,
            self._ready,
            self._fences,
            statistics,
            statistics.nodes,
            dict(functions),
            compute.is_short,
            compute.run_inline,
            self._clock.now,
            self._owner.post,
            *_TYPES_OF_COMMON_CASE,
            torch.is_inference_mode_enabled,
            self.accept,
            self.settle,
            self._send_early if self._early else None,
            MAX_INLINE,
        )
        self.accept = common.accept  # type: ignore[assignment, method-assign]
        self.settle = common.settle  # type: ignore[assignment, method-assign]

    # --- incoming messages -------------------------------------------------------------------------------------------------

    def emit(self, node: str, tag: Tag, outputs: Mapping[str, Payload]) -> None:
        """Send the messages of a new tag from a source node. Never waits; the source bounds the tags in flight."""
        for output in self._subgraph.route(Firing(node, tag, {}), outputs):
            self._emit(output)
        self._wake()

    def respond(self, firing: Firing, outputs: Mapping[str, Payload]) -> None:
        """Send the response of a request that `on_sink` has kept; once per request. No-op when its sender has ended."""
        if not self._fences.is_stale(firing.tag):
            for output in self._subgraph.route(firing, outputs):
                self._emit(output)
            self._inbound.consume(firing.via, firing.tag, [(edge, firing.tag) for edge in firing.via])

    def accept(self, peer: str, message: Message) -> None:
        """Accept a message from another process: data, or returned credits. Nothing is fired before `settle`.

        Raises BadMessageError when `peer` must not send this message. Then nothing has changed, except that a request may no longer be
        outstanding.
        """
        if message.kind == CREDIT:
            self._outbound.return_credits(peer, message)
            return
        inbound = self._inbound.edges.get(message.edge)
        if inbound is None:
            raise BadMessageError(f"a message of kind {message.kind[:80]!r} on edge {message.edge}, which does not lead here")
        tag = inbound.check(peer, message)
        edge = inbound.edge
        if edge.request_id is not None:
            self._outbound.release_request(edge.request_id, tag)
            self._owner.on_response(edge.id, tag, message)
        else:
            self._inbound.count_received(inbound)
        if self._fences.is_active and self._fences.is_stale(tag):
            self._drop(edge)
            return
        if message.kind == FAILED:
            header = message.decode_header(FailedHeader)
            self._inbound.consume(inbound.via)
            if not header.cause:  # else `on_response` has handled it
                self._report(tag, OperatorError(header.error))
            return
        payload = inbound.read(message)
        alone = inbound.alone.get(tag.layer)
        if alone is None:
            alone = inbound.alone[tag.layer] = self._table.alone(edge, tag.layer)
        if alone:  # the table would return the same firing more slowly
            self._fire(Firing(inbound.target, tag, {inbound.port: payload}, inbound.via))
            return
        try:
            firings = self._match(edge, tag, payload)
        except (ValueError, msgspec.DecodeError) as error:
            raise BadMessageError(f"a message on {edge} that does not fit what came before: {error}") from error
        for firing in firings:
            self._fire(firing)

    def settle(self, at_most: int = MAX_INLINE) -> None:
        """Run the firings that are expected to be short, and wake `run` for the rest. Called after all arrived messages are accepted. A
        node that batches several tags is left to `run`: more tags may arrive until its turn."""
        ready = self._ready
        if not ready or self._failure is not None:
            return
        now, run_inline, run = self._clock.now, self._compute.run_inline, self._subgraph.run
        send_early = self._send_early if self._early else None
        try:
            for _ in range(at_most):
                batch = ready.take(inline=True)
                if batch is None:
                    break
                start = now()
                try:
                    outputs = run_inline(batch[0].node, partial(run, batch, send_early))
                except (OperatorError, FailedFiringsError) as error:
                    self._end_failed(batch, error, start)
                else:
                    self._finish(batch, outputs, start, inline=True)
                if not ready:
                    return
        except Exception as error:  # `run` raises the error, not the link whose messages led to it
            self._failure = error
        if self._ready or self._failure is not None:
            self._wake()

    def _end_failed(self, batch: Sequence[Firing], error: Exception, start_seconds: float) -> None:
        if isinstance(error, OperatorError):
            self._fail(batch[0], error)
        elif isinstance(error, FailedFiringsError):
            self._fail_calls(batch, error, start_seconds, inline=True)
        else:
            raise error

    def fail(self, node: str, tag: Tag, error: OperatorError) -> bool:
        """Drop what a node has for a tag, and respond to the request to which it was to respond, with the error. False: it has nothing."""
        firing = self._table.take(node, tag)
        if firing is not None:
            self._fail(firing, error)
        return firing is not None

    def roll_back(self, source: str, epoch: int) -> int:
        """Invalidate all tags of `source` older than `epoch`: delete their rows and waiting firings, and return their credits. A firing
        that runs now ends without effect. Returns how many rows and firings were deleted."""
        self._fences.begin_epoch(source, epoch)
        return self._drop_stale()

    def fence(self, source: str, steps: Collection[int]) -> None:
        """Drop everything of these calls of a user's graph, now and when it arrives later, and return its credits. Stateful nodes do not
        wait for the calls. What these compute now ends without effect. No-op for fenced calls."""
        if self._fences.fail(source, steps):
            self._drop_stale()
            self._outbound.drop(self._fences)
            if not self._is_computing:
                self._release()
            self._wake()

    # --- peers of the edges ------------------------------------------------------------------------------------------

    def end_peer(self, peer: str, sources: Iterable[str] = ()) -> None:
        """Close the edges to a peer whose incarnation has ended, and drop all that is here of the tags of its `sources`.

        A firing of them that runs now, or of a request of the peer, ends without effect. A new incarnation of the peer begins with all
        credits.
        """
        for source in sources:
            self._fences.end_source(source)
        self._drop_stale()
        self._outbound.drop(self._fences)
        self._inbound.renew(peer)
        self._ready.drop(lambda firing: self._inbound.is_from(firing, peer))
        self._outbound.renew(peer, closed=True)
        self._wake()

    def is_waiting_for(self, peer: str, but: Collection[int] = ()) -> bool:
        """Whether a request to this peer is on its way, or has no response yet. `but`: edges that do not count."""
        return self._outbound.is_waiting_for(peer, but)

    def awaited(self, peer: str) -> set[Tag]:
        """The tags of requests that this peer has not responded to, also those of left epochs."""
        return self._outbound.awaited(peer)

    def edge_ids(self) -> set[int]:
        """The edges between this process and others."""
        return self._outbound.edges.keys() | self._inbound.edges.keys()

    def join_peer(self, peer: str) -> None:
        """Open the edges to a new incarnation of `peer`, with all credits free."""
        self._outbound.renew(peer, closed=False)
        self._wake()

    def missing(self, node: str, port: str, tag: Tag) -> list[int]:
        """Part ids that a gather port still waits for; [] when the tag is complete or its plan has not arrived."""
        return self._table.missing(node, port, tag)

    def replace_part(
        self, node: str, port: str, tag: Tag, part: int, by: Sequence[int], source: str, outputs: Mapping[str, Payload]
    ) -> None:
        """Replace `part` by the parts `by` at a gather port, and send `outputs` from `source`. No-op for a complete tag."""
        if self._table.supersede(node, port, tag, part, by):
            for output in self._subgraph.route(Firing(source, tag, {}), outputs):
                self._emit(output)
            self._wake()

    # --- the one task ---------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Fire until cancelled. Raises what `on_failed` raises."""
        loop, num_inline = asyncio.get_running_loop(), 0

        def send_from_thread(outputs: list[RoutedOutput]) -> None:
            loop.call_soon_threadsafe(self._send_early, outputs)

        modelled = getattr(self._compute, "at_modelled_time", None)
        send_beside: SendEarly = send_from_thread if modelled is None else modelled(self._send_early)

        try:
            while True:
                if self._failure is not None:
                    raise self._failure
                if num_inline >= MAX_INLINE:  # short firings never wait: without this, links might never get a turn
                    num_inline = 0
                    await asyncio.sleep(0)
                batch = self._ready.take()  # after the sleep: this batch must fire before anything that arrives later
                if batch is None:
                    num_inline = 0
                    await self._sleeper.sleep(self._ready.wake_at)
                    continue
                num_inline = num_inline + 1 if self._compute.is_short(batch[0].node) else 0
                self._inbound.ended.clear()
                for call in [batch] if self._isolates else by_layer(batch):
                    await self._run_batch(call, send_beside)
                del batch, call  # a sleeping runner holds no tensor: it may alias transport memory, which is freed in order
        finally:
            self._sleeper.close()

    async def _run_batch(self, batch: Sequence[Firing], send_beside: SendEarly) -> None:
        """Fire in one call. If that fails, fire each tag in its own, so that only tags with an error fail."""
        if self._fences.is_active and not (batch := self._inbound.without_stale(batch, self._fences)):
            return  # its epoch or client has ended since the call that failed
        node, start = batch[0].node, self._clock.now()
        short = self._compute.is_short(node)  # the call before may have changed it
        send_early = None if not self._early else self._send_early if short else send_beside
        self._is_computing = not short
        try:
            outputs = await self._compute.run(node, partial(self._subgraph.run, batch, send_early))
        except OperatorError as error:
            if len(batch) == 1:
                return self._fail(batch[0], error, self._inbound.orphans(batch))
        except FailedFiringsError as failed:
            return self._fail_calls(batch, failed, start, short, self._inbound.orphans(batch))
        else:
            return self._finish(batch, outputs, start, short, self._inbound.orphans(batch))
        finally:
            self._is_computing = False
            while self._when_idle:
                self._when_idle.popitem()[0]()
        for firing in batch:
            await self._run_batch((firing,), send_beside)

    def when_idle(self, call: Callable[[], None]) -> None:
        """Call this once the call in the compute thread has ended, at once without one: a firing that was rolled back still writes to what
        it was given. The same one is called once."""
        if self._is_computing:
            self._when_idle[call] = None
        else:
            call()

    def waiting(self) -> list[str]:
        """The missing inputs and credits of every unfinished tag, a line each."""
        rows = self._table.waiting()
        lines = [f"{node} at step {tag.step}, layer {tag.layer} of {tag.source} waits for {', '.join(empty)}" for node, tag, empty in rows]
        return lines + [f"{edge} waits for credits" for edge in self._outbound.waiting()]

    def snapshot(self) -> RunnerSnapshot:
        ready = [firing for firings in self._ready.values() for firing in firings]
        inbound = [edge for edge in self._inbound.edges.values() if edge.size]
        outbound = self._outbound.edges.values()
        return RunnerSnapshot(
            num_rows=len(self._table),
            sources={
                "ready firings": {firing.tag.source for firing in ready},
                "rows": self._table.sources(),
                "outputs": {output.tag.source for each in outbound for output in each.pending},
            },
            credits={each.edge.name: (each.free, each.size) for each in outbound if each.size},
            consumed={each.edge.name: (each.consumed, each.received - each.consumed) for each in inbound},
        )

    def leftovers(self) -> list[str]:
        """What is left when all tags have ended and no message is in flight."""
        left = self.waiting()
        if len(self._table):
            left.append(f"{len(self._table)} rows or held firings")
        left += [f"{len(firings)} firings of {node} never fired" for node, firings in self._ready.items()]
        unanswered = {each.edge.name: len(each.outstanding) for each in self._outbound.edges.values() if each.outstanding}
        return left + [f"{count} requests of {edge} without a response" for edge, count in unanswered.items()]

    # --- inside -----------------------------------------------------------------------------------------------------------

    def _finish(self, batch: Sequence[Firing], outputs: Sequence[RoutedOutput], start: float, inline: bool, orphans: Orphans = ()) -> None:
        """`orphans`: messages whose senders have ended since `run` took the batch; they get no response."""
        self.statistics.add_call(batch[0].node, len(batch), self._clock.now() - start, inline)
        responded: set[tuple[int, Tag | None]] = set()
        fences = self._fences
        for output in outputs:
            if fences.is_active and fences.is_stale(output.tag):
                continue
            if (request := output.edge.request_id) is not None:
                responded.add((request, output.tag))
            if not orphans or (request, output.tag) not in orphans:
                self._emit(output)
        for firing in batch:
            if firing.node not in self._keeping:
                self._inbound.consume_firing(firing, responded, orphans)
        if fences.is_active:
            self._end_fenced(batch)

    def _emit_current(self, output: RoutedOutput) -> None:
        if not self._fences.is_stale(output.tag):
            self._emit(output)

    def _end_fenced(self, batch: Sequence[Firing]) -> None:
        if any(self._fences.is_stale(firing.tag) for firing in batch):
            self._drop_stale()  # it became stale while it was computed: nodes fused behind it may have left rows
        self._release()

    def _fail(self, firing: Firing, error: OperatorError, orphans: Orphans = ()) -> None:
        """In a model graph: respond to a request of another worker with the error, which gives its credit back; report any other firing.
        `orphans`: as of `_finish`."""
        if not error.cause:
            log.error("%s", error, exc_info=error.__cause__)
        tag, is_stale = firing.tag, self._fences.is_stale(firing.tag)
        requests = [] if is_stale else [edge for edge in firing.via if edge in self._responses]
        for request in requests if not orphans else ():
            edge = self._responses[request]
            self._emit(RoutedOutput(edge, tag, Payload((), FailedHeader(str(error), part_of_request(firing), error.cause))))
        self._inbound.consume_firing(firing, [(request, tag) for request in requests], orphans)
        if not requests and not is_stale:
            self._owner.on_failed(tag, error)

    def _fail_calls(self, batch: Sequence[Firing], failed: FailedFiringsError, start: float, inline: bool, orphans: Orphans = ()) -> None:
        """In a user's graph: fence and report the calls that failed; the others of the batch go on."""
        for tag, error in failed.errors:
            self._report(tag, error)
        self._finish(batch, failed.outputs, start, inline, orphans)
        if failed.is_interrupted and inline and self._takes_interrupts:
            raise KeyboardInterrupt(str(failed.errors[0][1]))

    def _report(self, tag: Tag, error: OperatorError) -> None:
        """Report a failed tag, in a user's graph only the first of its call that fails here."""
        if not self._isolates:
            self._owner.on_failed(tag, error)
        elif not self._fences.has_failed(tag):
            self.fence(tag.source, (tag.step,))
            self._owner.on_failed(tag, error)

    def _on_unsendable(self, tag: Tag, error: OperatorError) -> None:
        if not self._isolates:
            raise error
        self._report(tag, error)

    def _send_early(self, outputs: list[RoutedOutput]) -> None:
        """Send outputs for other workers of a firing that continues on another thread or in a caller of this function."""
        try:
            for output in outputs:
                if not self._fences.is_stale(output.tag):
                    self._emit(output)
        except Exception as error:
            self._failure = self._failure or error
            self._wake()

    def _match(self, edge: Edge, tag: Tag, payload: Payload, via: tuple[int, ...] = ()) -> tuple[Firing, ...]:
        try:
            arrival = self._table.arrive(edge, tag, payload, via)
        except (ValueError, msgspec.DecodeError) as error:
            if not self._isolates:
                raise
            self._report(tag, OperatorError(as_line(f"{edge.source} failed at step {tag.step}: a message on {edge}: {error}"), edge.source))
            return ()
        if arrival.dropped:
            self._drop(edge)
        return arrival.firings

    def _fire(self, firing: Firing) -> None:
        node = firing.node
        if node in self._sinks:
            self._inbound.consume([edge for edge in firing.via if edge not in self._responses])
            self._owner.on_sink(firing)
        elif (firings := self._ready.get(node)) is not None:
            firings.append(firing)
        else:
            self._ready[node] = deque((firing,))

    def _emit(self, output: RoutedOutput) -> None:
        if not self._outbound.take(output):
            if output.edge.request_id is not None:
                message = Message("data", output.tag, output.edge.id, output.payload.header)
                self._owner.on_response(output.edge.id, output.tag, message)
            for firing in self._match(output.edge, output.tag, output.payload, output.via):
                self._fire(firing)

    def _drop(self, edge: Edge) -> None:
        self.statistics.num_dropped += 1
        self._inbound.consume((edge.id,))

    def _drop_stale(self) -> int:
        is_stale = self._fences.is_stale
        rows, via = self._table.drop(is_stale)
        firings, via_ready = self._ready.drop(lambda firing: is_stale(firing.tag))
        self._inbound.consume(via + via_ready)
        return rows + firings

    def _release(self) -> None:
        firings, via = self._table.release()
        self._inbound.consume(via)
        for firing in firings:
            self._fire(firing)


@dataclass(frozen=True)
class RunnerSnapshot:
    """What a runner has at a moment, for observers.

    sources: of the tags, by what is kept of them.
    credits: (free, all) of each outbound edge. consumed: of each incoming edge, messages that were consumed and whose credits were not
    returned, and messages that were not consumed.
    """

    num_rows: int
    sources: Mapping[str, set[str]]
    credits: Mapping[str, tuple[int, int]]
    consumed: Mapping[str, tuple[int, int]]
