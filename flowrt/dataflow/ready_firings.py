"""The firings that have all their inputs and wait for the compute seam: which of them run next."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import islice

from flowrt.dataflow.matching import Firing
from flowrt.dataflow.outbound_edges import OutboundEdge
from flowrt.dataflow.selection import SelectionPolicy


class ReadyFirings(dict[str, deque[Firing]]):
    """Ready firings by node, each in order of arrival; a node without any has no entry.

    `is_short(node)`: whether a call is expected to be short. `now` returns seconds. `use` follows.
    """

    def __init__(self, is_short: Callable[[str], bool], now: Callable[[], float]) -> None:
        super().__init__()
        self._is_short, self._now = is_short, now
        self._nodes: dict[str, tuple[Sequence[OutboundEdge], SelectionPolicy | None]] = {}
        self.wake_at: float | None = None  # when a policy that waits for more firings selects some, as of the last `take`

    def use(self, reach: Mapping[str, Sequence[OutboundEdge]], policies: Mapping[str, SelectionPolicy]) -> None:
        """`reach`: by node, the edges that a firing may send on; it starts only when each has a credit. `policies`: by node, which of its
        firings run next, if it may select several."""
        self._nodes = {node: (reach[node], None if policy.takes_one else policy) for node, policy in policies.items()}

    def reach_of(self, node: str) -> Sequence[OutboundEdge]:
        """The edges that a firing of a node may send on."""
        return tuple(self._nodes[node][0])

    def take(self, inline: bool = False) -> list[Firing] | None:
        """The firings of the next call: those that the policy of the oldest ready node selects. `inline`: only short nodes of one tag."""
        self.wake_at = None
        for node, firings in self.items():
            reach, policy = self._nodes[node]
            if inline and (policy is not None or not self._is_short(node)):
                continue
            num_free = 1 if policy is None else len(firings)
            for outbound in reach:
                if outbound.free < num_free:
                    num_free = outbound.free
            if num_free < 1:
                for outbound in reach:
                    if outbound.free < 1:
                        outbound.times.block(self._now())
                continue
            if policy is None:
                batch = [firings.popleft()]
            else:
                selected = policy.select(list(islice(firings, num_free)), self._now())
                if isinstance(selected, float):
                    self.wake_at = selected if self.wake_at is None else min(selected, self.wake_at)
                    continue
                batch = list(selected)
                if len(batch) == len(firings):
                    firings.clear()
                else:
                    taken = set(map(id, batch))
                    firings = deque(firing for firing in firings if id(firing) not in taken)
            del self[node]
            if firings:
                self[node] = firings  # at the end: other nodes get their turn first
            return batch
        return None

    def num_waiting(self) -> dict[str, int]:
        """By node, the firings that wait for their turn or for credits."""
        return {node: len(firings) for node, firings in self.items()}

    def drop(self, is_dropped: Callable[[Firing], bool]) -> tuple[int, list[int]]:
        """Delete some firings. Returns how many, and one edge id per message of theirs, as MatchingTable.drop."""
        via: list[int] = []
        dropped = 0
        for node, firings in list(self.items()):
            old = [firing for firing in firings if is_dropped(firing)]
            via += [edge for firing in old for edge in firing.via]
            dropped += len(old)
            kept = deque(firing for firing in firings if not is_dropped(firing))
            del self[node]
            if kept:
                self[node] = kept
        return dropped, via
