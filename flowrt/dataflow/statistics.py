"""Counters of a runner: firings, messages, bytes and seconds since its start."""

from __future__ import annotations

import msgspec


class RunnerStatistics(msgspec.Struct):
    """Counters since the start.

    `sent` is (messages, payload bytes) per edge that leaves the process. `inline_seconds` is the part of `compute_seconds` that ran on
    the event loop.
    """

    num_firings: int = 0
    num_dropped: int = 0
    compute_seconds: float = 0.0
    inline_seconds: float = 0.0
    sent: dict[int, list[int]] = {}

    def add_call(self, num_firings: int, seconds: float, inline: bool) -> None:
        self.num_firings += num_firings
        self.compute_seconds += seconds
        self.inline_seconds += seconds if inline else 0.0
