"""The calls of a user's graph: live ones, and ended ones whose fences are not confirmed yet. Pure.

Each call has a step, from a counter. A call that has ended frees its place at once. One that has failed or was cancelled stays unconfirmed
until every worker has fenced it. At most as many calls are unconfirmed as may be live; these two bounds hold for the rows and credits
anywhere. A failed call thus takes no place from others, unless a worker confirms nothing.
"""

from __future__ import annotations

from collections.abc import Iterable


class CallTable:
    """The calls of a graph of these workers.

    At most `max_calls` calls are live, and no call begins `max_ahead` steps after the oldest live one (None: any number).
    """

    def __init__(self, workers: Iterable[str], max_calls: int, max_ahead: int | None = None) -> None:
        self._workers = frozenset(workers)
        self._max_calls, self._max_ahead = max_calls, max_ahead
        self._live: dict[int, None] = {}  # in order
        self._unconfirmed: dict[int, set[str]] = {}  # step -> workers that have not confirmed its fence
        self._next = 0

    def can_begin(self) -> bool:
        if len(self._live) >= self._max_calls or len(self._unconfirmed) >= self._max_calls:
            return False
        return self._max_ahead is None or not self._live or self._next - next(iter(self._live)) < self._max_ahead

    def begin(self) -> int:
        """Begin a call. Returns its step."""
        step = self._next
        self._next += 1
        self._live[step] = None
        return step

    def is_live(self, step: int) -> bool:
        return step in self._live

    def end(self, step: int) -> bool:
        """The output of a call has come. Returns False if the call is not live: it has failed, or was cancelled."""
        if step not in self._live:
            return False
        del self._live[step]
        return True

    def fence(self, step: int) -> bool:
        """End a call that has failed or was cancelled. Returns whether the workers must fence it now.

        Several workers may report the same call, and a part of a call may fail after its output has come.
        """
        if step in self._unconfirmed or not 0 <= step < self._next:
            return False
        self._live.pop(step, None)
        if self._workers:
            self._unconfirmed[step] = set(self._workers)
        return True

    def confirm(self, worker: str, steps: Iterable[int]) -> None:
        """A worker has fenced these calls."""
        for step in steps:
            if (workers := self._unconfirmed.get(step)) is not None:
                workers.discard(worker)
                if not workers:
                    del self._unconfirmed[step]

    def leftovers(self) -> list[str]:
        """What is left when all calls have ended, and no message is in flight."""
        waiting = [f"call {step} waits for {', '.join(sorted(workers))}" for step, workers in self._unconfirmed.items()]
        return [f"call {step} is live" for step in self._live] + waiting
