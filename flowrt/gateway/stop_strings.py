"""Finds stop strings in streamed text, and holds back text that may be the beginning of one. Pure."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Releases text as soon as no stop string can begin in it. The text of a complete stop string is released only if it `is_included`.

    The text held back is shorter than the longest stop string.
    """

    def __init__(self, stops: Sequence[str], is_included: bool = False) -> None:
        """Raises ValueError for an empty stop string."""
        if not all(stops):
            raise ValueError("a stop string is empty, it needs at least one character")
        self._stops, self._is_included = tuple(stops), is_included
        self._held = ""

    def push(self, text: str, may_end: bool = True) -> tuple[str, bool]:
        """Add text. Returns (text that may be shown now, whether a stop string is complete). A complete one clears the held text. One that
        is complete while none `may_end` the output does not count, not even later; one that begins there may."""
        seen = len(self._held)
        text = self._held + text
        firsts = [(stop, max(0, seen - len(stop) + 1)) for stop in self._stops] if may_end else []  # the first place where it may begin
        found = [(at, at + len(stop)) for stop, first in firsts if (at := text.find(stop, first)) >= 0]
        if found:
            self._held = ""
            return text[: min(found)[self._is_included]], True
        num_held = max((overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held], False

    def flush(self) -> str:
        """Return and clear the held text: a possible beginning of a stop string that the output did not complete."""
        held, self._held = self._held, ""
        return held


def overlap(text: str, stop: str) -> int:
    """Length of the longest suffix of `text` that is a proper prefix of `stop`."""
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
