"""Incoming edges: validates each received message before any other code uses it, turns it into a payload, and returns credits.

A peer of the same run is authenticated but may have bugs. A message that fails a check ends the link to its sender and affects
nothing else in the run.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from typing import TypeAlias

import msgspec
import torch

from flowrt.actors.link import CREDIT, BadMessageError
from flowrt.dataflow.fences import Fences
from flowrt.dataflow.matching import Firing, arrives_at
from flowrt.dataflow.outbound_edges import CreditHeader, OutboundEdge, OutboundEdges
from flowrt.dataflow.parts import FAILED, FailedHeader, PartHeader
from flowrt.dataflow.payload import INDEX_TYPES, TORCH_DTYPES, Payload, from_int8_rows, from_message, from_reference
from flowrt.dataflow.schemas import MessageSchema
from flowrt.graph.model import Edge, Graph
from flowrt.transports.wire.message import Message, Tag

Orphans: TypeAlias = Collection[tuple[int | None, Tag]]  # edge and tag of messages whose sender has ended


class InboundEdge:
    """An edge from another worker, `peer`. Turns a received message into a checked payload, or raises BadMessageError.

    `schema` is None for an edge whose messages are not described, and for an edge within this OS process. `requests` is the outbound
    edge whose responses arrive on this edge. If it keeps its outstanding requests, each response must match one in tag, part and, where
    this edge has a schema, shape. `fences`: a response to a fenced call, or for an ended source, need not match. `dtype`: of rows that
    travel as INT8.

    Outstanding credits: of the edge's `size` credits, `received` belong to messages that are here, and `consumed` of these messages have
    been consumed. A response has no credit of its own (`size` 0): it returns its request's.
    """

    def __init__(
        self,
        edge: Edge,
        peer: str,
        by_reference: bool,
        device: torch.device | None,
        schema: MessageSchema | None,
        requests: OutboundEdge | None,
        fences: Fences,
        dtype: torch.dtype,
    ) -> None:
        self.edge, self.peer = edge, peer
        self.target, self.port, self.via = edge.target, edge.target_port, (edge.id,)
        self.alone: dict[int, bool] = {}  # by layer: whether one message of this edge is the only input of its node
        self.size = edge.credits if edge.request_id is None else 0
        self.half = max(1, self.size // 2)
        self.received = self.consumed = 0
        self.schema, self._fences = schema, fences
        index_types = INDEX_TYPES - {"int8"} if edge.int8 else INDEX_TYPES  # INT8 rows are dequantized at once, which is a copy
        read = from_reference if by_reference else partial(from_message, device=device, index_types=index_types)
        # Converts a checked message to a payload.
        self.read: Callable[[Message], Payload] = (lambda message: from_int8_rows(read(message), dtype)) if edge.int8 else read
        has_schemas = requests is not None and requests.schema is not None and schema is not None
        self._requests = requests if has_schemas else None
        self._layers: dict[int, bool] = {}  # whether this edge carries tags of that layer

    def check(self, peer: str, message: Message) -> Tag:
        """Return the tag of a message that `peer` may send now, and clear the outstanding request that it responds to.

        Raises BadMessageError for any other message.
        """
        tag = message.tag
        if peer != self.peer:
            raise BadMessageError(f"a message on {self.edge}, which leads here from {self.peer}")
        is_failed = message.kind != "data" and message.kind == FAILED and self.edge.request_id is not None
        if tag is None or not (is_failed or message.kind == "data"):
            raise BadMessageError(f"a message of kind {message.kind[:80]!r} {'without' if tag is None else 'with'} a tag on {self.edge}")
        if self.size and self.received >= self.size:
            raise BadMessageError(f"more messages on {self.edge} than its {self.size} credits allow")
        schema = self.schema
        if is_failed:
            header_type: type[msgspec.Struct] | None = FailedHeader
        elif schema is not None:
            header_type = schema.header
        else:
            return tag
        sizes: dict[str, int] = {}
        if header_type is not None:
            try:
                header = message.header = message.decode_header(header_type)  # decoded once: the payload carries it on
            except msgspec.DecodeError as error:
                raise BadMessageError(f"a header on {self.edge} that cannot be read: {error}") from error
            if self._requests is not None:
                sizes = self._end_request(tag, header, self._requests)
        elif message.header is not None:
            raise BadMessageError(f"a header on {self.edge}, which takes none")
        elif self._requests is not None:  # of a user's graph, whose messages have no parts
            self._requests.outstanding.pop((tag, None), None)
        if schema is not None:
            if not self._carries_layer(tag.layer):
                raise BadMessageError(f"a message on {self.edge} for layer {tag.layer}")
            fault = schema.fault_of_tag(tag) or (None if is_failed else schema.fault_of_tensors(message.tensors, sizes))
            if fault is not None:
                raise BadMessageError(f"a message on {self.edge}, {_text(tag)}: {fault}")
        return tag

    def is_plain_at(self, layer: int) -> bool:
        """Whether a message at this layer has no header, is no response, and uses a credit."""
        if self.edge.request_id is not None or not self.size:
            return False
        return self.schema is None or (self.schema.header is None and self._carries_layer(layer))

    def _end_request(self, tag: Tag, header: msgspec.Struct, requests: OutboundEdge) -> dict[str, int]:
        """Clear the request that a response belongs to. Returns the sizes of its free dimensions."""
        part = header.part if isinstance(header, (PartHeader, FailedHeader)) else None
        sizes = requests.outstanding.pop((tag, part), None)
        if sizes is None and not self._fences.is_void(tag):  # that was sent before the fence came there
            raise BadMessageError(f"a response on {self.edge} to no outstanding request: {_text(tag)}, part {part}")
        return sizes or {}

    def _carries_layer(self, layer: int) -> bool:
        arrives = self._layers.get(layer)
        if arrives is None:
            arrives = arrives_at(self.edge, layer)
            if arrives:
                self._layers[layer] = arrives
        return arrives


class InboundEdges:
    """All edges that lead to the worker `process` from others, by id. `post(edge, message)` carries returned credits.

    `ended`: peers that have ended since the batch was taken that is being computed. What the batch consumes of them returns no credit, and
    a request gets no response: the next incarnation has all credits and does not know the request.
    """

    def __init__(
        self,
        graph: Graph,
        process: str,
        post: Callable[[Edge, Message], None],
        outbound: OutboundEdges,
        staying: Collection[int],
        device: torch.device | None,
        schemas: Mapping[int, MessageSchema],
        fences: Fences,
    ) -> None:
        self._post, self._process, self._outbound, self._device, self._fences = post, process, outbound, device, fences
        self.ended = set[str]()
        self.edges: dict[int, InboundEdge] = {}
        self.use(graph, staying, schemas)

    def use(self, graph: Graph, staying: Collection[int], schemas: Mapping[int, MessageSchema]) -> None:
        """Use the edges of this graph from now on. Those that are here already keep their credits."""
        process, outbound, device, fences = self._process, self._outbound, self._device, self._fences
        dtype = torch.float32 if graph.model is None else TORCH_DTYPES[graph.model.dtype]
        found = {edge.id: edge for edge in graph.edges.values() if graph.nodes[edge.target].process == process and graph.crosses(edge)}
        for gone in self.edges.keys() - found.keys():
            del self.edges[gone]
        for edge in found.values():
            if edge.id not in self.edges:
                source = graph.nodes[edge.source].process
                schema = None if edge.id in staying else schemas.get(edge.id)
                requests = None if edge.request_id is None else outbound.edges.get(edge.request_id)
                self.edges[edge.id] = InboundEdge(edge, source, edge.id in staying, device, schema, requests, fences, dtype)

    def renew(self, peer: str) -> None:
        """Forget the credits of all edges from `peer`, whose incarnation has ended."""
        self.ended.add(peer)
        for inbound in self.edges.values():
            if inbound.peer == peer:
                inbound.received = inbound.consumed = 0

    def orphans(self, batch: Iterable[Firing]) -> Orphans:
        """Those messages of the batch that is being computed whose sender has ended since the batch was taken."""
        return {(edge, firing.tag) for firing in batch for edge in firing.via if self._is_from(edge, self.ended)} if self.ended else set()

    def without_stale(self, batch: Iterable[Firing], fences: Fences) -> list[Firing]:
        """Consume the messages of the stale firings of a batch that is about to be computed. Returns the others."""
        fresh, stale = list[Firing](), list[Firing]()
        for firing in batch:
            (stale if fences.is_stale(firing.tag) else fresh).append(firing)
        orphans = self.orphans(stale)
        for firing in stale:
            self.consume_firing(firing, (), orphans)
        return fresh

    def consume_firing(self, firing: Firing, responded: Collection[tuple[int, Tag | None]], orphans: Orphans) -> None:
        """Consume the messages of a firing. `responded`, `orphans`: those with a response, and those that need none."""
        via = [edge for edge in firing.via if (edge, firing.tag) not in orphans] if orphans else firing.via
        self.consume(via, firing.tag, responded)

    def is_from(self, firing: Firing, peer: str) -> bool:
        """Whether a firing consumes a credit of `peer`."""
        return any(self._is_from(edge, (peer,)) for edge in firing.via)

    def _is_from(self, edge: int, peers: Collection[str]) -> bool:
        inbound = self.edges.get(edge)
        return inbound is not None and inbound.size > 0 and inbound.peer in peers

    def consume(self, via: Iterable[int], tag: Tag | None = None, responded: Collection[tuple[int, Tag | None]] = ()) -> None:
        """Return the credits of messages that came along the edges `via`, but for requests of `tag` that were responded to.

        Credits are returned once half of the edge's credits have gathered. If the sender has used all its credits, they are returned
        at once: all its messages are then here, consumed or not. No sender ever waits for a credit that is held back here.
        """
        for edge_id in via:
            inbound = self.edges.get(edge_id)
            if inbound is None or not inbound.size:
                continue
            if responded and (edge_id, tag) in responded:
                inbound.received -= 1
                continue
            inbound.consumed += 1
            if inbound.consumed >= inbound.half or inbound.received >= inbound.size:
                self._return_held(inbound)

    def count_received(self, inbound: InboundEdge) -> None:
        """A message has come, perhaps with the last credit of the sender, while some are held back here."""
        inbound.received += 1
        if inbound.consumed and inbound.received >= inbound.size:
            self._return_held(inbound)

    def _return_held(self, inbound: InboundEdge) -> None:
        count, inbound.consumed = inbound.consumed, 0
        inbound.received -= count
        self._post(inbound.edge, Message(CREDIT, edge=inbound.edge.id, header=CreditHeader(count)))


def _text(tag: Tag) -> str:
    return f"step {tag.step}, layer {tag.layer} of {tag.source[:80]}"
