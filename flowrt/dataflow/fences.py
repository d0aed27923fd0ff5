"""Fences: the tags whose messages are dropped, because their epoch or their call is over. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from flowrt.transports.wire.message import Tag

ENDED = 1 << 62  # the epoch of a source whose incarnation has ended: each of its tags is older
MAX_ENDED = 64  # ended sources of a node to remember: only a firing that runs while its source ends can still carry their tags
MAX_FAILED = 1 << 14  # calls to remember; the launching process lets no call of an ordered graph run further ahead of another


class Fences:
    """Epochs that sources have begun, sources that have ended (model graphs), and calls that have failed or were cancelled (user graphs).

    A call is all tags of one source and step. The compute thread reads `failed` while the event loop adds to it.
    """

    def __init__(self) -> None:
        self.is_active = False  # whether any tag can be stale: read before each `is_stale`, because most runs never have one
        self.failed: dict[tuple[str, int], None] = {}  # (source, step), oldest first
        self.forgotten: dict[str, int] = {}  # source -> the latest failed step not in `failed` any more; all earlier calls have ended
        self._epochs: dict[str, int] = {}
        self._ended: dict[str, None] = {}  # sources
        self._ended_of: dict[str, deque[str]] = {}  # by node: its sources, oldest first

    def begin_epoch(self, source: str, epoch: int) -> None:
        self._epochs[source], self.is_active = epoch, True

    def end_source(self, source: str) -> None:
        """Make every tag of a source stale, because its incarnation has ended. Idempotent."""
        self.begin_epoch(source, ENDED)
        if source in self._ended:
            return
        self._ended[source] = None
        ended = self._ended_of.setdefault(source.partition("@")[0], deque())
        ended.append(source)
        if len(ended) > MAX_ENDED:
            oldest = ended.popleft()
            del self._ended[oldest], self._epochs[oldest]

    def has_ended(self, source: str) -> bool:
        return source in self._ended

    def fail(self, source: str, steps: Iterable[int]) -> bool:
        """Fence calls. Returns False if all of them are fenced already."""
        fresh = [(source, step) for step in steps if (source, step) not in self.failed]
        for call in fresh:
            self.failed[call], self.is_active = None, True
            if len(self.failed) > MAX_FAILED:
                oldest, number = next(iter(self.failed))
                del self.failed[oldest, number]
                self.forgotten[oldest] = max(number, self.forgotten.get(oldest, number))
        return bool(fresh)

    def has_failed(self, tag: Tag) -> bool:
        return (tag.source, tag.step) in self.failed

    def is_void(self, tag: Tag) -> bool:
        """Whether no process needs to respond to a request of this tag: its call has failed, or its source has ended."""
        return self.has_failed(tag) or self.has_ended(tag.source)

    def is_stale(self, tag: Tag) -> bool:
        return tag.epoch < self._epochs.get(tag.source, 0) or (tag.source, tag.step) in self.failed
