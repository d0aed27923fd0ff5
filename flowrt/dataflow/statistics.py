"""Counters of a runner: firings, messages, bytes and seconds since its start."""

from __future__ import annotations

import msgspec


class NodeCounts(msgspec.Struct):
    """Counters of a node, or of a fused subgraph under the name of its first node."""

    num_calls: int = 0
    num_firings: int = 0
    compute_seconds: float = 0.0
    inline_seconds: float = 0.0


class RunnerStatistics(msgspec.Struct):
    """Counters since the start.

    `sent` is (messages, payload bytes) per edge that leaves the process. `inline_seconds` is the part of `compute_seconds` that ran on
    the event loop.
    """

    num_dropped: int = 0
    sent: dict[int, list[int]] = {}
    nodes: dict[str, NodeCounts] = {}

    @property
    def num_firings(self) -> int:
        return sum(counts.num_firings for counts in self.nodes.values())

    @property
    def compute_seconds(self) -> float:
        return sum(counts.compute_seconds for counts in self.nodes.values())

    @property
    def inline_seconds(self) -> float:
        return sum(counts.inline_seconds for counts in self.nodes.values())

    def add_call(self, node: str, num_firings: int, seconds: float, inline: bool) -> None:
        if (counts := self.nodes.get(node)) is None:
            counts = self.nodes[node] = NodeCounts()
        counts.num_calls += 1
        counts.num_firings += num_firings
        counts.compute_seconds += seconds
        if inline:
            counts.inline_seconds += seconds
