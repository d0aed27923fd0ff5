"""How one direction of a NIC serves messages in flight: times in, times out. Pure.

Each message brings work: the seconds that it would occupy the direction alone. Messages of one flow (a channel) follow each other; the
first messages of all flows share the direction equally, as fluid: with n flows each is served at 1/n of the speed. So bulk delays a small
message by no more than its share, and the direction is never idle while a message waits (processor sharing; Kleinrock, Queueing Systems
II, section 4.4).

All results are exact in model time, however late the caller asks: `step` returns one finish at a time, and work that the caller adds
because of it may begin at that very instant.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Hashable


class SharedLine:
    """One direction of a NIC. `time` is as far as it has been computed; nothing can begin before it."""

    def __init__(self) -> None:
        self.time = -math.inf
        self._served = 0.0  # the work that each message under way has been given since the line was last idle
        self._finishes: list[tuple[float, int, Hashable]] = []  # heap: at which `_served` the head of a flow is done
        self._begins: list[tuple[float, int, Hashable]] = []  # heap: heads of flows that arrive later
        self._waiting: dict[Hashable, deque[tuple[float, float]]] = {}  # flow -> (begin, work), the head's first
        self._count = 0  # breaks ties in the order of arrival

    @property
    def num_served(self) -> int:
        """How many flows share the line at `time`."""
        return len(self._finishes)

    def add(self, flow: Hashable, begin: float, work: float) -> float:
        """A message of `flow` arrives at `begin` (moved to `time` when that is later), behind all others of its flow.

        Returns by how much it was moved: 0.0 for one that came in time.
        """
        moved = max(0.0, self.time - begin)
        begin += moved
        queue = self._waiting.setdefault(flow, deque())
        queue.append((begin, work))
        if len(queue) == 1:
            self._enter(flow)
        return moved

    def next_event(self) -> float | None:
        """When something happens next if nothing is added: a finish or a begin. None: never."""
        finish = self._next_finish()
        if not self._begins:
            return finish
        begin = self._begins[0][0]
        return begin if finish is None else min(begin, finish)

    def step(self, until: float) -> tuple[float, Hashable] | None:
        """Go on to the next finish if it is not after `until`: (when, flow). Else, to the last begin before that: None.

        `time` stays at that begin or finish: what turns up later may still begin anywhere after it, as if it had been known.
        """
        while True:
            finish = self._next_finish()
            begin = self._begins[0][0] if self._begins else math.inf
            if finish is not None and finish <= begin and finish <= until:
                return self._finish(finish)
            if begin > until or not self._begins:
                return None
            self._go(begin)
            _, _, flow = heapq.heappop(self._begins)
            self._serve(flow)

    def finish_if_nothing_came(self, flow: Hashable) -> float | None:
        """When the message of `flow` that is served now would be done if no other message arrived; None when none is."""
        time, served, num_left = self.time, self._served, len(self._finishes)
        for at, _, other in sorted(self._finishes, key=lambda finish: finish[:2]):
            time, served, num_left = time + max(0.0, at - served) * num_left, max(at, served), num_left - 1
            if other == flow:
                return time
        return None

    # Inside.

    def _next_finish(self) -> float | None:
        if not self._finishes:
            return None
        return self.time + max(0.0, self._finishes[0][0] - self._served) * len(self._finishes)

    def _go(self, time: float) -> None:
        if self._finishes:
            self._served += (time - self.time) / len(self._finishes)
        self.time = time

    def _finish(self, time: float) -> tuple[float, Hashable]:
        self._served, _, flow = heapq.heappop(self._finishes)
        self.time = time
        queue = self._waiting[flow]
        queue.popleft()
        if queue:
            self._enter(flow)
        else:
            del self._waiting[flow]
        if not self._finishes:
            self._served = 0.0  # so that it never grows until differences drown in it
        return time, flow

    def _enter(self, flow: Hashable) -> None:
        """The head of `flow` is first in line now."""
        begin = self._waiting[flow][0][0]
        if begin > self.time:
            self._count += 1
            heapq.heappush(self._begins, (begin, self._count, flow))
        else:
            self._serve(flow)

    def _serve(self, flow: Hashable) -> None:
        self._count += 1
        heapq.heappush(self._finishes, (self._served + self._waiting[flow][0][1], self._count, flow))
