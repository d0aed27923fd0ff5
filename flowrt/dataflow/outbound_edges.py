"""Outbound edges: sends each output as soon as its edge has a credit, and accepts returned credits."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType

import msgspec

from flowrt.actors.control import LATENCY_EDGES
from flowrt.actors.link import BadMessageError
from flowrt.dataflow.fences import Fences
from flowrt.dataflow.parts import FAILED, FailedHeader, PartHeader
from flowrt.dataflow.payload import Payload, by_reference, to_device_message, to_message, with_int8_rows
from flowrt.dataflow.schemas import MessageSchema
from flowrt.dataflow.subgraph import RoutedOutput
from flowrt.errors import OperatorError, as_line, error_text
from flowrt.graph.model import INPUT, Edge, Graph
from flowrt.histogram import Histogram
from flowrt.transports.errors import InvalidMessageError, LimitError
from flowrt.transports.wire.message import Message, Tag

_NONE: Mapping[int, MessageSchema] = MappingProxyType({})


class EdgeTimes:
    """`wait_seconds`: time in which something was ready and the edge had no credit. `latency`: of requests, from the sending to the
    response; one is measured at a time. `measured` is its tag."""

    def __init__(self) -> None:
        self.wait_seconds = 0.0
        self.latency = Histogram(LATENCY_EDGES)
        self.measured: Tag | None = None
        self._sent = 0.0
        self._blocked: float | None = None

    def reset(self) -> None:
        """The peer has ended, or its next incarnation begins with all credits."""
        self.measured = self._blocked = None

    def block(self, now: float) -> None:
        """Something waits for a credit."""
        if self._blocked is None:
            self._blocked = now

    def unblock(self, now: float) -> None:
        """There is a credit again."""
        if self._blocked is not None:
            self.wait_seconds += now - self._blocked
            self._blocked = None

    @property
    def is_blocked(self) -> bool:
        return self._blocked is not None

    def begin(self, tag: Tag, now: float) -> None:
        self.measured, self._sent = tag, now

    def end(self, now: float) -> None:
        """The response to the measured request has come."""
        self.measured = None
        self.latency.observe(now - self._sent)


class CreditHeader(msgspec.Struct, frozen=True, array_like=True):
    """Header of a message of kind CREDIT: how many credits of its edge come back."""

    count: int


class OutboundEdge:
    """An edge to the process `peer`, with its credits. `sent` counts messages and payload bytes.

    `free` of `size` credits are left, and `pending` outputs wait for one; a response needs no credit (`size` 0). `closed` means that no
    process is at the other end. `outstanding`, for edges with a schema: requests without a response yet, by tag and part, with the sizes of
    their free dimensions. `declared`: the schema by which the receiver checks messages, where no operator's declaration has checked them.
    `has_responses`: its messages are requests.
    """

    def __init__(
        self,
        edge: Edge,
        peer: str,
        to_message: Callable[[Payload, int, Tag], Message],
        max_bytes: int,
        schema: MessageSchema | None,
        declared: MessageSchema | None,
        has_responses: bool = False,
    ) -> None:
        self.edge, self.peer, self.to_message, self.max_bytes = edge, peer, to_message, max_bytes
        self.schema, self.declared = schema, declared
        self.size = edge.credits if edge.request_id is None else 0
        self.sent, self.times, self.has_responses = [0, 0], EdgeTimes(), has_responses
        self.renew(closed=False)

    @property
    def is_plain(self) -> bool:
        """Whether to send a message takes no more than a credit: no schema, no response, no coding."""
        unchecked = self.schema is None and self.declared is None
        return self.size > 0 and unchecked and not self.has_responses and not self.edge.int8

    def plan(self, apply: Callable[[Tag], Tag] | None) -> tuple[object, ...]:
        """How the compiled case of the runner sends on a plain edge, whose step of tags is `apply`."""
        return self, self.edge, self.edge.id, apply, self.to_message, self.max_bytes, self.sent

    def renew(self, closed: bool) -> None:
        """Reset all credits, and drop pending outputs and requests, because the peer ended or its next incarnation starts.

        A closed edge blocks no firing: `OutboundEdges` passes its outputs to `on_unsent`.
        """
        self.closed = closed
        self.free = self.size
        self.times.reset()
        self.pending: deque[RoutedOutput] = deque()
        self.outstanding: dict[tuple[Tag, int | None], dict[str, int]] = {}


class OutboundEdges:
    """All edges that leave the worker `process`, by id.

    Edges in `staying` lead to another worker of the same OS process and pass tensors by reference. Edges in `on_device` send tensors in
    device memory without a copy to the host; all others copy them to the host. `post(edge, message)` never waits. `on_unsendable` receives
    the tag of each output that the edge cannot carry, and the error; `on_unsent` receives each output of a closed edge. `schemas` holds the
    schemas of edges; those of requests check their responses. `now` returns seconds.
    """

    def __init__(
        self,
        graph: Graph,
        process: str,
        post: Callable[[Edge, Message], None],
        on_unsendable: Callable[[Tag, OperatorError], None],
        on_unsent: Callable[[RoutedOutput], None],
        staying: Collection[int] = (),
        on_device: Collection[int] = (),
        schemas: Mapping[int, MessageSchema] = _NONE,
        now: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._post, self._on_unsendable, self._on_unsent, self._now = post, on_unsendable, on_unsent, now
        self._process = process
        self.edges: dict[int, OutboundEdge] = {}
        self.sent: dict[int, list[int]] = {}  # by edge, as OutboundEdge.sent
        self.times: dict[int, EdgeTimes] = {}
        self._gone: set[int] = set()  # edges of earlier graphs
        self.use(graph, staying, on_device, schemas)

    def use(
        self, graph: Graph, staying: Collection[int] = (), on_device: Collection[int] = (), schemas: Mapping[int, MessageSchema] = _NONE
    ) -> None:
        """Use the edges of this graph from now on. Those that are here already keep their credits and messages; those that are not in it
        carry nothing more."""
        process = self._process
        with_responses = {edge.request_id for edge in graph.edges.values()}
        requests = {edge.request_id for edge in graph.edges.values() if edge.id in schemas}  # of responses that are checked
        found = {edge.id: edge for edge in graph.edges.values() if graph.nodes[edge.source].process == process and graph.crosses(edge)}
        for edge in found.values():
            source, target = graph.ends_of(edge)
            if edge.id not in self.edges:
                coding = by_reference if edge.id in staying else to_device_message if edge.id in on_device else to_message
                schema = schemas.get(edge.id) if edge.id in requests and edge.id not in staying else None
                max_bytes = max(graph.limits_of(end).max_message_bytes for end in (source, target))
                is_declared_here = edge.source == INPUT or graph.nodes[edge.source].outputs[edge.source_port].tensors
                declared = None if is_declared_here or edge.id in staying or graph.model is not None else schemas.get(edge.id)
                self.edges[edge.id] = OutboundEdge(edge, target, coding, max_bytes, schema, declared, edge.id in with_responses)
        for edge_id in self.edges.keys() - found.keys():
            del self.edges[edge_id], self.sent[edge_id], self.times[edge_id]
            self._gone.add(edge_id)
        self._gone -= found.keys()
        self.sent |= {edge_id: outbound.sent for edge_id, outbound in self.edges.items()}
        self.times |= {edge_id: outbound.times for edge_id, outbound in self.edges.items()}

    def take(self, output: RoutedOutput) -> bool:
        """Send an output as soon as there is a credit. Returns False for an edge within the process."""
        outbound = self.edges.get(output.edge.id)
        if outbound is None:
            if is_gone := output.edge.id in self._gone:
                self._on_unsent(output)
            return is_gone
        if outbound.size:
            if outbound.closed:
                self._on_unsent(output)
                return True
            if outbound.free == 0 or outbound.pending:
                outbound.pending.append(output)
                outbound.times.block(self._now())
                return True
            outbound.free -= 1
        self._send(outbound, output)
        return True

    def return_credits(self, peer: str, message: Message) -> None:
        """Accept credits from `peer`. Raises BadMessageError if the edge does not lead to `peer`, or for more than are outstanding."""
        outbound = self.edges.get(message.edge)
        try:
            count = message.decode_header(CreditHeader).count
        except msgspec.DecodeError as error:
            raise BadMessageError(f"returned credits that cannot be read: {error}") from error
        if outbound is None or outbound.peer != peer:
            raise BadMessageError(f"{count} credits of edge {message.edge}, which does not lead to {peer}")
        self.release(message.edge, count)

    def release(self, edge_id: int, count: int) -> None:
        """Add returned credits to an edge and send what waits for them. Raises BadMessageError for more than are outstanding."""
        outbound = self.edges[edge_id]
        if outbound.closed:
            return
        if count < 1 or outbound.free + count > outbound.size:
            raise BadMessageError(f"{count} credits returned on edge {edge_id}, more than were outstanding")
        outbound.free += count
        if outbound.times.is_blocked:
            outbound.times.unblock(self._now())
        while outbound.pending and outbound.free:
            outbound.free -= 1
            self._send(outbound, outbound.pending.popleft())

    def release_request(self, edge_id: int, tag: Tag) -> None:
        """Add the credit of a request whose response has come."""
        self.release(edge_id, 1)
        times = self.times[edge_id]
        if times.measured == tag:
            times.end(self._now())

    def is_waiting_for(self, peer: str, but: Collection[int] = ()) -> bool:
        """Whether a request to this peer waits for its credit, or has no response yet. `but`: edges that do not count."""
        edges = (each for each in self.edges.values() if each.peer == peer and each.has_responses and each.edge.id not in but)
        return any(each.free < each.size or each.pending for each in edges)

    def awaited(self, peer: str) -> set[Tag]:
        """The tags of requests that this peer was sent and has not responded to, also those of left epochs."""
        return {tag for each in self.edges.values() if each.peer == peer for tag, _ in each.outstanding}

    def drop(self, fences: Fences) -> None:
        """Drop pending outputs of stale tags, which hold no credit, and outstanding requests of failed calls and ended sources, which may
        get no response. The response to a request of a left epoch still comes, and must match."""
        for outbound in self.edges.values():
            outbound.pending = deque(output for output in outbound.pending if not fences.is_stale(output.tag))
            outbound.times.measured = None
            for key in [key for key in outbound.outstanding if fences.is_void(key[0])]:
                del outbound.outstanding[key]

    def renew(self, peer: str, closed: bool) -> None:
        """Discard all messages and credits in flight to `peer`: it has ended (`closed`), or a new incarnation has joined."""
        for outbound in self.edges.values():
            if outbound.peer == peer:
                outbound.renew(closed)

    def waiting(self) -> list[Edge]:
        """Edges with an output that waits for a credit."""
        return [outbound.edge for outbound in self.edges.values() if outbound.pending]

    def _send(self, outbound: OutboundEdge, output: RoutedOutput) -> None:
        edge, num_bytes = outbound.edge, 0
        request: tuple[Tag, int | None] | None = None
        try:
            payload = with_int8_rows(output.payload) if edge.int8 else output.payload
            for tensor in payload.tensors:
                num_bytes += tensor.numel() * tensor.itemsize
            if num_bytes > outbound.max_bytes:  # before the memory of an expanded tensor is allocated
                raise LimitError(f"it has {num_bytes} bytes, limits.max_message_bytes is {outbound.max_bytes}")
            message = outbound.to_message(payload, edge.id, output.tag)
            if isinstance(payload.header, FailedHeader):
                message.kind = FAILED
            if outbound.declared is not None and (fault := outbound.declared.fault_of_tensors(message.tensors, {})):
                raise InvalidMessageError(fault)
            if outbound.schema is not None:
                request = output.tag, payload.header.part if isinstance(payload.header, PartHeader) else None
                outbound.outstanding[request] = outbound.schema.sizes(payload)
            self._post(edge, message)
        except Exception as error:  # a tensor of a subclass runs foreign code
            if request is not None:
                outbound.outstanding.pop(request, None)
            self._on_send_error(outbound, output.tag, error)
            return
        if outbound.has_responses and outbound.times.measured is None:
            outbound.times.begin(output.tag, self._now())
        outbound.sent[0] += 1
        outbound.sent[1] += num_bytes

    def _on_send_error(self, outbound: OutboundEdge, tag: Tag, error: Exception) -> None:
        outbound.free += outbound.size > 0
        edge = outbound.edge
        where = f"{edge.source} failed at step {tag.step}, layer {tag.layer}"
        cause = error_text(error).removeprefix(f"{type(error).__name__}: ")
        self._on_unsendable(tag, OperatorError(as_line(f"{where}: a message on {edge} cannot be sent: {cause}"), edge.source))
