"""Credits of edges between workers: what a sender may still send (`Window`), and what a receiver is to return (`Owed`)."""

from __future__ import annotations

from collections import deque

import msgspec

from flowrt.dataflow.region import Output


class CreditHeader(msgspec.Struct, frozen=True, array_like=True):
    """Header of a "credit" message: how many credits of its edge come back."""

    count: int


class Window:
    """Credits of one outgoing edge, and the outputs that wait for one. `closed`: there is nobody at the other end."""

    __slots__ = ("closed", "free", "pending", "size")

    def __init__(self, size: int) -> None:
        self.size = size
        self.renew(closed=False)

    def renew(self, closed: bool) -> None:
        """Nothing is out and nothing waits: the end of the other side, or the beginning of its next life. A closed edge holds up no
        firing: what is sent on it takes another way."""
        self.closed = closed
        self.free = self.size
        self.pending: deque[Output] = deque()


class Owed:
    """Credits of one incoming edge that are to go back, several in one message.

    They may wait until half of the edge's credits have gathered, because a sender that could need one earlier is known: it has used
    all that it has, so all its messages are here, consumed or not. Then they go back at once, and nobody waits for a credit held here.
    """

    __slots__ = ("consumed", "half", "here", "size")

    def __init__(self, size: int) -> None:
        self.size = size
        self.half = max(1, size // 2)
        self.here = 0  # messages that came and whose credit has not gone back
        self.consumed = 0  # of these, the ones used up

    def consume(self) -> int:
        """One more message is used up. Returns how many credits go back now."""
        self.consumed += 1
        if self.consumed < self.half and self.here < self.size:
            return 0
        count, self.consumed = self.consumed, 0
        self.here -= count
        return count
