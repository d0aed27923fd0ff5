"""Incoming edges: validates each received message before any other code uses it, and turns it into a payload.

A peer of the same run is authenticated but may have bugs. A message that fails a check ends the link to its sender and affects
nothing else in the run.
"""

from __future__ import annotations

import msgspec
import torch

from flowrt.actors.link import BadMessageError
from flowrt.dataflow.credits import Owed
from flowrt.dataflow.matching import arrives_at
from flowrt.dataflow.outbound_edges import OutboundEdge
from flowrt.dataflow.parts import PartHeader
from flowrt.dataflow.payload import Payload, from_message, from_reference
from flowrt.dataflow.schemas import MessageSchema
from flowrt.graph.model import Edge
from flowrt.transports.wire.message import Message, Tag

FAILED = "failed"  # kind of the response to a request whose firing failed


class FailedHeader(msgspec.Struct, frozen=True, array_like=True):
    """Header of a FAILED message: the error in one line, and the part id of the request if it has one."""

    error: str
    part: int | None = None


class InboundEdge:
    """An edge from another worker, `peer`. Turns a received message into a checked payload, or raises BadMessageError.

    `schema` is None for an edge whose messages are not described, and for an edge within this OS process. `requests` is the outbound
    edge whose responses arrive on this edge. If both edges have a schema, each response must match an outstanding request in tag, part
    and shape.
    """

    __slots__ = ("_device", "_layers", "_requests", "_schema", "alone", "by_reference", "edge", "owed", "peer", "port", "target", "via")

    def __init__(
        self,
        edge: Edge,
        peer: str,
        owed: Owed | None,
        by_reference: bool,
        device: torch.device | None = None,
        schema: MessageSchema | None = None,
        requests: OutboundEdge | None = None,
    ) -> None:
        self.edge, self.peer, self.owed, self.by_reference = edge, peer, owed, by_reference
        self.target, self.port, self.via = edge.target, edge.target_port, (edge.id,)
        self.alone: dict[int, bool] = {}  # by layer: whether one message of this edge is the only input of its node
        self._device, self._schema = device, schema
        self._requests = requests if requests is not None and requests.schema is not None and schema is not None else None
        self._layers: dict[int, bool] = {}  # whether this edge carries tags of that layer

    def check(self, peer: str, message: Message) -> Tag:
        """Return the tag of a message that `peer` may send now, and clear the outstanding request that it responds to.

        Raises BadMessageError for any other message.
        """
        tag = message.tag
        if peer != self.peer:
            raise BadMessageError(f"a message on {self.edge}, which leads here from {self.peer}")
        is_failed = message.kind == FAILED and self.edge.request_id is not None
        if tag is None or not (is_failed or message.kind == "data"):
            raise BadMessageError(f"a message of kind {message.kind[:80]!r} {'without' if tag is None else 'with'} a tag on {self.edge}")
        if self.owed is not None and self.owed.here >= self.owed.size:
            raise BadMessageError(f"more messages on {self.edge} than its {self.owed.size} credits allow")
        schema, sizes = self._schema, {}
        header_type: type[msgspec.Struct] | None = FailedHeader if is_failed else None
        if not is_failed:
            if schema is None:
                return tag
            header_type = schema.header
        if header_type is not None:
            try:
                header = message.decode_header(header_type)
            except msgspec.DecodeError as error:
                raise BadMessageError(f"a header on {self.edge} that cannot be read: {error}") from error
            if self._requests is not None:
                sizes = self._end_request(tag, header.part if isinstance(header, (PartHeader, FailedHeader)) else None)
        elif message.header is not None:
            raise BadMessageError(f"a header on {self.edge}, which takes none")
        if schema is not None:
            if not self._brings(tag.layer):
                raise BadMessageError(f"a message on {self.edge} for layer {tag.layer}")
            fault = schema.fault_of_tag(tag) or (None if is_failed else schema.fault_of_tensors(message.tensors, sizes))
            if fault is not None:
                raise BadMessageError(f"a message on {self.edge}, {_text(tag)}: {fault}")
        return tag

    def _end_request(self, tag: Tag, part: int | None) -> dict[str, int]:
        """Clear the request that a response belongs to. Returns the sizes of the request's free dimensions."""
        sizes = None if self._requests is None else self._requests.outstanding.pop((tag, part), None)
        if sizes is None:
            raise BadMessageError(f"a response on {self.edge} to no outstanding request: {_text(tag)}, part {part}")
        return sizes

    def read(self, message: Message) -> Payload:
        """Convert a checked message to a payload."""
        return from_reference(message) if self.by_reference else from_message(message, self._device)

    def _brings(self, layer: int) -> bool:
        known = self._layers.get(layer)
        if known is None:
            known = arrives_at(self.edge, layer)
            if known:
                self._layers[layer] = known
        return known


def _text(tag: Tag) -> str:
    return f"step {tag.step}, layer {tag.layer} of {tag.source[:80]}"
