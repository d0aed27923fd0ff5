"""The firings that have all their inputs and wait for the compute seam: which of them run next."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence

from flowrt.dataflow.matching import Firing
from flowrt.dataflow.outbound_edges import OutboundEdge
from flowrt.transports.wire.message import Tag


class ReadyFirings(dict[str, deque[Firing]]):
    """Ready firings by node, each in order of arrival; a node without any has no entry.

    `reach`: by node, the edges that a firing may send on; it starts only when each has a credit. `batching`: nodes that take several tags
    in one call. `is_short(node)`: whether a call is expected to be short. `is_alone(firing)`: whether it needs a call of its own.
    """

    def __init__(
        self,
        reach: Mapping[str, Sequence[OutboundEdge]],
        batching: Collection[str],
        is_short: Callable[[str], bool],
        is_alone: Callable[[Firing], bool],
    ) -> None:
        super().__init__()
        self._reach, self._batching, self._is_short, self._is_alone = reach, batching, is_short, is_alone

    def take(self, inline: bool = False) -> list[Firing] | None:
        """The firings of the next call: the oldest ready node with as many tags as it may batch. `inline`: only short nodes of one tag."""
        for node, firings in self.items():
            num_free = len(firings)
            if node in self._batching:
                if inline:
                    continue
            elif inline and not self._is_short(node):
                continue
            elif num_free > 1:
                num_free = 1
            if num_free > 1:
                num_free = max(1, next((place for place, firing in enumerate(firings) if self._is_alone(firing)), num_free))
            for outbound in self._reach[node]:
                if outbound.free < num_free:
                    num_free = outbound.free
            if num_free < 1:
                continue
            del self[node]
            if num_free == len(firings):
                return list(firings)
            batch = [firings.popleft() for _ in range(num_free)]
            self[node] = firings  # at the end: other nodes get their turn first
            return batch
        return None

    def drop(self, stale: Callable[[Tag], bool]) -> tuple[int, list[int]]:
        """Delete the firings of stale tags. Returns how many, and one edge id per message of theirs, as MatchingTable.drop."""
        via: list[int] = []
        dropped = 0
        for node, firings in list(self.items()):
            old = [firing for firing in firings if stale(firing.tag)]
            via += [edge for firing in old for edge in firing.via]
            dropped += len(old)
            kept = deque(firing for firing in firings if not stale(firing.tag))
            del self[node]
            if kept:
                self[node] = kept
        return dropped, via
