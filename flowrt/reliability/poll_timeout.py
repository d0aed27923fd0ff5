"""Decides whether a process that is polled at even intervals still responds. Pure: the clock is an argument.

The launcher uses it for the monitor (flowrt/launcher/monitor_client.py), because no other process watches the monitor. The detector
(detector.py) covers the processes that send heartbeats.
"""

from __future__ import annotations


class PollTimeout:
    """Tracks the silence of one process; call `has_expired` every `look_seconds`.

    Silence counts only while the observer itself runs: between two looks it grows by at most 1.5 `look_seconds`. An observer that was
    stopped or got no processor time did not read responses either; it finds them when it runs again.
    """

    def __init__(self, patience_seconds: float, look_seconds: float) -> None:
        self._patience_seconds, self._max_between = patience_seconds, 1.5 * look_seconds
        self._latest: tuple[str, float] | None = None
        self._silent = self._looked = 0.0

    def has_expired(self, now: float, incarnation: str, last_response_seconds: float) -> bool:
        """Returns whether this incarnation has been silent for too long. `last_response_seconds`: by any clock."""
        latest = incarnation, last_response_seconds
        if latest != self._latest:
            self._latest, self._silent = latest, 0.0
        else:
            self._silent += min(now - self._looked, self._max_between)
        self._looked = now
        return self._silent >= self._patience_seconds
