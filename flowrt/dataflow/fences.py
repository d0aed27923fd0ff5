"""Fences: the tags whose messages are dropped, because their epoch or their call is over. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from flowrt.transports.wire.message import Tag

MAX_FAILED = 1 << 14  # calls to remember; the launching process lets no call of an ordered graph run further ahead of another


class Fences:
    """The epochs that sources have begun (model graphs), and the calls that have failed or were cancelled (graphs of user operators).

    A call is all tags of one source and step. The compute thread reads `failed` while the event loop adds to it.
    """

    def __init__(self) -> None:
        self.is_active = False  # whether any tag can be stale: read before each `is_stale`, because most runs never have one
        self.failed: dict[tuple[str, int], None] = {}  # (source, step), oldest first
        self._epochs: dict[str, int] = {}

    def begin_epoch(self, source: str, epoch: int) -> None:
        self._epochs[source], self.is_active = epoch, True

    def fail(self, source: str, steps: Iterable[int]) -> bool:
        """Fence calls. Returns False if all of them are fenced already."""
        fresh = [(source, step) for step in steps if (source, step) not in self.failed]
        for call in fresh:
            self.failed[call], self.is_active = None, True
            if len(self.failed) > MAX_FAILED:
                del self.failed[next(iter(self.failed))]
        return bool(fresh)

    def has_failed(self, tag: Tag) -> bool:
        return (tag.source, tag.step) in self.failed

    def is_stale(self, tag: Tag) -> bool:
        return tag.epoch < self._epochs.get(tag.source, 0) or (tag.source, tag.step) in self.failed
