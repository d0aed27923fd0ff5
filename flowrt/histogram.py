"""A histogram in buckets, as Prometheus has them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence


class Histogram:
    """`edges`: rising upper bounds of its buckets; a last bucket has none. `counts`: of the values in each bucket so far."""

    def __init__(self, edges: Sequence[float], counts: Sequence[int] = (), total: float = 0.0) -> None:
        self.edges, self.total = tuple(edges), total
        self.counts = list(counts) or [0] * (len(edges) + 1)

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.edges, value)] += 1
        self.total += value

    @property
    def count(self) -> int:
        return sum(self.counts)

    def count_up_to(self, edge: float) -> int:
        """The number of values up to one of its edges."""
        return sum(self.counts[: self.edges.index(edge) + 1])
