"""Whether somebody who is asked at even intervals still answers. Pure: the clock is an argument.

Here: Answering. Not here: who asks whom (flowrt/launcher/monitor_client.py asks the monitor, which nobody else watches), what follows. The
detector is for those who beat; this one looks from the other side, at somebody whose only duty is to hear.
"""

from __future__ import annotations


class Answering:
    """To be looked at every `look_seconds`. Only time in which we looked ourselves counts: an asker that was stopped, or had no processor,
    has not listened either, and finds the answers when it comes back."""

    def __init__(self, patience_seconds: float, look_seconds: float) -> None:
        self._patience_seconds, self._most_between = patience_seconds, 1.5 * look_seconds
        self._heard: tuple[str, float] | None = None
        self._silent = self._looked = 0.0

    def look(self, now: float, life: str, last_word_seconds: float) -> bool:
        """Whether this life has been silent for too long. `last_word_seconds`: when it last said anything, by any clock."""
        heard = life, last_word_seconds
        if heard != self._heard:
            self._heard, self._silent = heard, 0.0
        else:
            self._silent += min(now - self._looked, self._most_between)
        self._looked = now
        return self._silent >= self._patience_seconds
