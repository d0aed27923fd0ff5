"""Stop strings over streamed text: what may be shown already, and where the text ends.

Here: StopStrings, pure. Not here: how text comes from tokens (a Detokenizer), what a match ends (gateway.py, its only caller).
"""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Shows text as soon as no stop string can begin in it, and never any of a stop string that was completed.

    The text held back is shorter than the longest stop string.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """ValueError for an empty stop string."""
        if not all(stops):
            raise ValueError("a stop string is empty, it needs at least one character")
        self._stops = tuple(stops)
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """(text that may be shown now, whether a stop string was completed). After a completed one nothing is held any more."""
        text = self._held + text
        found = [at for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self._held = ""
            return text[: min(found)], True
        num_held = max((self._overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held], False

    def flush(self) -> str:
        """The text still held: it was the beginning of a stop string, and the output ended before the rest came."""
        held, self._held = self._held, ""
        return held

    @staticmethod
    def _overlap(text: str, stop: str) -> int:
        """Length of the longest end of `text` with which `stop` begins."""
        for length in range(min(len(stop) - 1, len(text)), 0, -1):
            if text.endswith(stop[:length]):
                return length
        return 0
