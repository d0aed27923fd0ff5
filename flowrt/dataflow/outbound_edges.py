"""What leaves a process for other workers: edge by edge, as far as credits go.

Here: OutboundEdges. Not here: who fires and when (runner.py), credits that are given back (credits.py), channels (flowrt/actors). One per
runner, which asks it before a firing whether there is room, and hands it every output for somebody else.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from flowrt.dataflow.credits import Outgoing, Window
from flowrt.dataflow.payload import Payload, by_reference, to_device_message, to_message
from flowrt.dataflow.region import OperatorError, Output
from flowrt.graph.model import Edge
from flowrt.transports.errors import InvalidMessageError, LimitError
from flowrt.transports.wire.message import Message, Tag


class OutboundEdges:
    """`edges` leave the process; those in `staying` lead to another worker of the same OS process and carry the tensors themselves;
    those in `on_device` take tensors that lie on a device as they are, all others bring them to the host.

    `post(edge, message)` never waits. `on_unsent` is given what would leave on an edge that is closed.
    """

    def __init__(
        self,
        edges: Iterable[Edge],
        staying: Collection[int],
        post: Callable[[Edge, Message], None],
        on_unsent: Callable[[Output], None],
        on_device: Collection[int] = (),
    ) -> None:
        self._post, self._on_unsent = post, on_unsent
        edges = list(edges)
        self.windows = {edge.id: Window(edge.credits) for edge in edges if edge.request_id is None}
        self._outgoing = {edge.id: Outgoing(edge, self.windows.get(edge.id), _coding(edge.id, staying, on_device)) for edge in edges}
        self.sent = {edge_id: outgoing.sent for edge_id, outgoing in self._outgoing.items()}

    def take(self, output: Output) -> bool:
        """Send it as soon as there is a credit. False for what stays in this process. Raises OperatorError for what cannot be sent."""
        outgoing = self._outgoing.get(output.edge.id)
        if outgoing is None:
            return False
        window = outgoing.window
        if window is not None:
            if window.closed:
                self._on_unsent(output)
                return True
            if window.free == 0 or window.pending:
                window.pending.append(output)
                return True
            window.free -= 1
        self._send(outgoing, output)
        return True

    def release(self, edge_id: int, count: int) -> None:
        """Credits of an edge came back. Raises ValueError when they are more than were out."""
        window = self.windows.get(edge_id)
        if window is not None and window.closed:
            return
        if window is None or count < 1 or window.free + count > window.size:
            raise ValueError(f"{count} credits returned on edge {edge_id}, more than were outstanding")
        window.free += count
        while window.pending and window.free:
            window.free -= 1
            self._send(self._outgoing[edge_id], window.pending.popleft())

    def renew(self, edges: Iterable[int], closed: bool) -> None:
        """Whoever is at the other end is gone (closed), or somebody new is there: nothing is out, and nothing waits."""
        for edge in edges:
            if (window := self.windows.get(edge)) is not None:
                window.renew(closed)

    def waiting(self) -> list[Edge]:
        """Edges on which something waits for a credit."""
        return [self._outgoing[edge].edge for edge, window in self.windows.items() if window.pending]

    def _send(self, outgoing: Outgoing, output: Output) -> None:
        edge, payload, sent = outgoing.edge, output.payload, outgoing.sent
        try:
            message = outgoing.to_message(payload, edge.id, output.tag)
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
