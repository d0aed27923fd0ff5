"""Measures one outbound edge: how long firings and outputs waited for its credits, and how long its requests took."""

from __future__ import annotations

from flowrt.histogram import Histogram
from flowrt.transports.wire.message import Tag

LATENCY_EDGES = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)  # upper bounds in seconds


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
