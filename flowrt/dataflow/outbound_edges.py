"""Outbound edges: sends each output as soon as its edge has a credit, and accepts returned credits."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from types import MappingProxyType

import msgspec

from flowrt.actors.link import BadMessageError
from flowrt.dataflow.credits import CreditHeader, Window
from flowrt.dataflow.payload import Payload, by_reference, to_device_message, to_message
from flowrt.dataflow.region import OperatorError, Output, part_of
from flowrt.dataflow.schemas import MessageSchema
from flowrt.graph.model import Edge
from flowrt.transports.errors import InvalidMessageError, LimitError
from flowrt.transports.wire.message import Message, Tag


class OutboundEdge:
    """An edge to another worker. `window` is None for responses; `sent` counts messages and payload bytes.

    `outstanding`, for edges with a schema: requests without a response yet, by tag and part, with the sizes of their free dimensions.
    """

    __slots__ = ("edge", "outstanding", "peer", "schema", "sent", "to_message", "window")

    def __init__(
        self,
        edge: Edge,
        peer: str,
        window: Window | None,
        to_message: Callable[[Payload, int, Tag], Message],
        schema: MessageSchema | None = None,
    ) -> None:
        self.edge, self.peer, self.window, self.to_message, self.schema = edge, peer, window, to_message, schema
        self.sent = [0, 0]
        self.outstanding: dict[tuple[Tag, int | None], dict[str, int]] = {}


class OutboundEdges:
    """All edges that leave a worker.

    `edges` leave the process. Edges in `staying` lead to another worker of the same OS process and pass tensors by reference. Edges in
    `on_device` send tensors in device memory without a copy to the host; all others copy them to the host.

    `post(edge, message)` never waits. `on_unsent` receives each output of a closed edge. `peer_of` maps an edge to its target process.
    `schemas` holds the schemas of request edges whose responses are checked.
    """

    def __init__(
        self,
        edges: Iterable[Edge],
        staying: Collection[int],
        post: Callable[[Edge, Message], None],
        on_unsent: Callable[[Output], None],
        on_device: Collection[int] = (),
        peer_of: Callable[[Edge], str] = lambda edge: "",
        schemas: Mapping[int, MessageSchema] = MappingProxyType({}),
    ) -> None:
        self._post, self._on_unsent = post, on_unsent
        edges = list(edges)
        self.windows = {edge.id: Window(edge.credits) for edge in edges if edge.request_id is None}
        self.edges = {
            edge.id: OutboundEdge(
                edge, peer_of(edge), self.windows.get(edge.id), _coding(edge.id, staying, on_device), schemas.get(edge.id)
            )
            for edge in edges
        }
        self.sent = {edge_id: outbound.sent for edge_id, outbound in self.edges.items()}

    def take(self, output: Output) -> bool:
        """Send an output as soon as there is a credit. Returns False for an edge within the process. Raises OperatorError on failure."""
        outbound = self.edges.get(output.edge.id)
        if outbound is None:
            return False
        window = outbound.window
        if window is not None:
            if window.closed:
                self._on_unsent(output)
                return True
            if window.free == 0 or window.pending:
                window.pending.append(output)
                return True
            window.free -= 1
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
        window = self.windows.get(edge_id)
        if window is not None and window.closed:
            return
        if window is None or count < 1 or window.free + count > window.size:
            raise BadMessageError(f"{count} credits returned on edge {edge_id}, more than were outstanding")
        window.free += count
        while window.pending and window.free:
            window.free -= 1
            self._send(self.edges[edge_id], window.pending.popleft())

    def renew(self, edges: Iterable[int], closed: bool) -> None:
        """Discard all messages and credits in flight: the peer process has ended (`closed`), or a new incarnation has joined."""
        for edge in edges:
            if (window := self.windows.get(edge)) is not None:
                window.renew(closed)
                self.edges[edge].outstanding.clear()

    def waiting(self) -> list[Edge]:
        """Edges with an output that waits for a credit."""
        return [self.edges[edge].edge for edge, window in self.windows.items() if window.pending]

    def _send(self, outbound: OutboundEdge, output: Output) -> None:
        edge, payload, sent = outbound.edge, output.payload, outbound.sent
        try:
            message = outbound.to_message(payload, edge.id, output.tag)
            if outbound.schema is not None:
                outbound.outstanding[output.tag, part_of(payload)] = outbound.schema.sizes(payload)
            sent[0] += 1
            for tensor in payload.tensors:
                sent[1] += tensor.nbytes
            self._post(edge, message)
        except (LimitError, InvalidMessageError, TypeError) as error:
            raise OperatorError(f"a message on {edge} cannot be sent: {error}") from error


def _coding(edge: int, staying: Collection[int], on_device: Collection[int]) -> Callable[[Payload, int, Tag], Message]:
    if edge in staying:
        return by_reference
    return to_device_message if edge in on_device else to_message
