"""Finds stop strings in streamed text, and holds back text that may be the beginning of one. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache


class StopStrings:
    """Releases text as soon as no stop string can begin in it. The text of a complete stop string is released only if it `is_included`.

    The text held back is shorter than the longest stop string.
    """

    def __init__(self, stops: Sequence[str], is_included: bool = False) -> None:
        """Raises ValueError for an empty stop string."""
        if not all(stops):
            raise ValueError("a stop string is empty, it needs at least one character")
        self._stops, self._is_included = tuple(stops), is_included
        self._num_begun = [0] * len(self._stops)  # characters of each that the text ends with
        self._held = ""

    def push(self, text: str, may_end: bool = True) -> tuple[str, bool]:
        """Add text. Returns (text that may be shown now, whether a stop string is complete). A complete one clears the held text. One that
        is complete while none `may_end` the output does not count, not even later; one that begins there may."""
        whole, found = self._held + text, []
        for index, stop in enumerate(self._stops):
            end, self._num_begun[index] = _follow(stop, self._num_begun[index], text, may_end)
            if end:
                end += len(self._held)
                found.append((end - len(stop), end))
        if found:
            self.flush()
            return whole[: min(found)[self._is_included]], True
        num_held = max(self._num_begun, default=0)
        self._held = whole[len(whole) - num_held :]
        return whole[: len(whole) - num_held], False

    def flush(self) -> str:
        """Return and clear the held text: a possible beginning of a stop string that the output did not complete."""
        held, self._held, self._num_begun = self._held, "", [0] * len(self._stops)
        return held


def _follow(stop: str, num_begun: int, text: str, may_end: bool) -> tuple[int, int]:
    """Where in `text` the stop string is complete first, if it may; 0: nowhere. And how many of its characters the text then ends with. As
    Knuth, Morris and Pratt do, in time linear in the text: both may be long, and chosen to take the most."""
    borders = _borders(stop)
    for at, character in enumerate(text, 1):
        while num_begun and stop[num_begun] != character:
            num_begun = borders[num_begun - 1]
        num_begun += stop[num_begun] == character
        if num_begun == len(stop):
            if may_end:
                return at, num_begun
            num_begun = borders[num_begun - 1]
    return 0, num_begun


@lru_cache(maxsize=1024)
def _borders(text: str) -> tuple[int, ...]:
    """For each beginning of the text: the length of the longest other beginning that it ends with."""
    borders = [0]
    for character in text[1:]:
        length = borders[-1]
        while length and text[length] != character:
            length = borders[length - 1]
        borders.append(length + (text[length] == character))
    return tuple(borders)
