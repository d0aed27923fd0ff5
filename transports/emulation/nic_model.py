"""Models how one direction of a NIC serves the messages in flight, as a pure computation on times.

The work of a message is the number of seconds for which it alone would occupy the direction. Messages of one flow (a channel) are served in
order. The first messages of all flows share the direction equally, as fluid: with n flows, each is served at 1/n of the speed. So bulk
delays a small message by no more than its share, and the direction is never idle while a message waits (processor sharing; Kleinrock,
Queueing Systems II, section 4.4). Messages of high priority do not share: one after another has the whole direction, and all others
wait meanwhile, as acknowledgements in a queue of their own (MegaScale-Infer section 5).

All results are exact in model time, however late the caller calls: `step` returns one finish at a time, and work that the caller adds in
response may begin at that instant.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Hashable

MAX_PAUSES = 256  # that are remembered while nothing else happens


class SharedDirection:
    """One direction of a NIC, computed up to `time`; no message can begin before `time`."""

    def __init__(self) -> None:
        self.time = -math.inf
        self._served = 0.0  # work done for each message in service since the line was last idle
        self._finishes: list[tuple[float, int, Hashable]] = []  # heap: value of `_served` at which the head of a flow is done
        self._begins: list[tuple[float, int, Hashable]] = []  # heap: heads of flows that begin later
        self._waiting: dict[Hashable, deque[tuple[float, float]]] = {}  # flow -> (begin, work) of its messages, head first
        self._count = 0  # breaks ties in the order of arrival
        self._pauses: deque[tuple[float, float]] = deque()  # from when until when messages of high priority are served, in order

    def interrupt(self, begin: float, work: float) -> tuple[float, float]:
        """Serves a message of high priority that arrives at `begin`, behind earlier ones alone.

        Returns when it has passed, and the seconds by which `begin` was moved, see `add`.
        """
        moved, passed = max(0.0, self.time - begin), self.passing(begin, work)
        self._pauses.append((passed - work, passed))
        next_event = self.next_event()
        if len(self._pauses) > MAX_PAUSES and (next_event is None or next_event >= self._pauses[0][1]):
            self._go(self._pauses[0][1])  # else a direction on which nothing else happens would remember all of them
        return passed, moved

    def passing(self, begin: float, work: float) -> float:
        """Returns when a message of high priority that arrives at `begin` would have passed."""
        return max(begin, self.time, self._pauses[-1][1] if self._pauses else begin) + work

    def add(self, flow: Hashable, begin: float, work: float) -> float:
        """Adds a message of `flow` that arrives at `begin` (moved to `time` when `time` is later), behind all others of its flow.

        Returns the seconds by which `begin` was moved: 0.0 for a message added in time.
        """
        moved = max(0.0, self.time - begin)
        begin += moved
        queue = self._waiting.setdefault(flow, deque())
        queue.append((begin, work))
        if len(queue) == 1:
            self._enter(flow)
        return moved

    def next_event(self) -> float | None:
        """Returns the time of the next finish or begin if no message is added, or None without one."""
        finish = self._next_finish()
        if not self._begins:
            return finish
        begin = self._begins[0][0]
        return begin if finish is None else min(begin, finish)

    def step(self, until: float) -> tuple[float, Hashable] | None:
        """Advances to the next finish and returns (time, flow) if it is not after `until`; otherwise advances to the last begin not after
        `until` and returns None.

        `time` stays at that begin or finish, so messages added later may still begin at any time after it.
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

    def finish_without_arrivals(self, flow: Hashable) -> float | None:
        """Returns when the message of `flow` in service would be done if no other message arrived; None when none is in service."""
        time, served, num_sharing = self.time, self._served, len(self._finishes)
        for at, _, other in sorted(self._finishes, key=lambda finish: finish[:2]):
            time, served, num_sharing = self._after(time, max(0.0, at - served) * num_sharing), max(at, served), num_sharing - 1
            if other == flow:
                return time
        return None

    # Internal.

    def _next_finish(self) -> float | None:
        if not self._finishes:
            return None
        return self._after(self.time, max(0.0, self._finishes[0][0] - self._served) * len(self._finishes))

    def _after(self, time: float, work: float) -> float:
        """When so much work is done that begins at `time`, besides messages of high priority."""
        for begin, end in self._pauses:
            if time + work <= begin:
                break
            if end > time:
                work -= max(0.0, begin - time)
                time = end
        return time + work

    def _go(self, time: float) -> None:
        if self._finishes:
            paused = sum(max(0.0, min(end, time) - max(begin, self.time)) for begin, end in self._pauses)
            self._served += (time - self.time - paused) / len(self._finishes)
        self._reach(time)

    def _reach(self, time: float) -> None:
        self.time = time
        while len(self._pauses) > 1 and self._pauses[0][1] <= time:  # the last one says when the next may begin
            self._pauses.popleft()

    def _finish(self, time: float) -> tuple[float, Hashable]:
        self._served, _, flow = heapq.heappop(self._finishes)
        self._reach(time)
        queue = self._waiting[flow]
        queue.popleft()
        if queue:
            self._enter(flow)
        else:
            del self._waiting[flow]
        if not self._finishes:
            self._served = 0.0  # keeps the value small, so that differences keep their precision
        return time, flow

    def _enter(self, flow: Hashable) -> None:
        """Starts serving the head of `flow`, or schedules it when it begins later."""
        begin = self._waiting[flow][0][0]
        if begin > self.time:
            self._count += 1
            heapq.heappush(self._begins, (begin, self._count, flow))
        else:
            self._serve(flow)

    def _serve(self, flow: Hashable) -> None:
        self._count += 1
        heapq.heappush(self._finishes, (self._served + self._waiting[flow][0][1], self._count, flow))
