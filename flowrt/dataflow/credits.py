"""Credits of edges between workers: what a sender may still send (`Window`), and what a receiver is to return (`Owed`)."""

from __future__ import annotations

from collections import deque

import msgspec

from flowrt.dataflow.region import Output


class CreditHeader(msgspec.Struct, frozen=True, array_like=True):
    """Header of a "credit" message: how many credits of its edge come back."""

    count: int


class Window:
    """Credits of one outgoing edge, and the outputs that wait for a credit. `closed` means that no process is at the other end."""

    __slots__ = ("closed", "free", "pending", "size")

    def __init__(self, size: int) -> None:
        self.size = size
        self.renew(closed=False)

    def renew(self, closed: bool) -> None:
        """Reset all credits and drop pending outputs, because the peer ended or its next incarnation starts.

        A closed edge blocks no firing: `OutboundEdges` passes its outputs to `on_unsent`.
        """
        self.closed = closed
        self.free = self.size
        self.pending: deque[Output] = deque()


class Owed:
    """Outstanding credits of one incoming edge. The receiver returns several in one message.

    Credits are returned once half of the edge's credits have gathered. If the sender has used all its credits, they are returned
    at once: all its messages are then here, consumed or not. No sender ever waits for a credit that is held back here.
    """

    __slots__ = ("consumed", "half", "here", "size")

    def __init__(self, size: int) -> None:
        self.size = size
        self.half = max(1, size // 2)
        self.here = 0  # received messages whose credit has not been returned
        self.consumed = 0  # how many of these are consumed

    def consume(self) -> int:
        """Record one consumed message. Returns how many credits to return now."""
        self.consumed += 1
        if self.consumed < self.half and self.here < self.size:
            return 0
        count, self.consumed = self.consumed, 0
        self.here -= count
        return count
