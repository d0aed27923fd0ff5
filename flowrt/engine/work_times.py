"""Measures the bubbles of a group: time in which it has sequences to run and its process computes nothing. Pure."""

from __future__ import annotations


class WorkTimes:
    """`working_seconds`: time in which sequences ran. `bubble_seconds`: of it, time in which the process did not compute, because every
    micro-batch waited for experts, for a message, or for its next step. Both only rise."""

    def __init__(self) -> None:
        self.working_seconds = self.bubble_seconds = 0.0
        self._idle_seconds = 0.0  # below bubble_seconds while a computation that began before counts at its end
        self._since = self._computed = 0.0
        self._is_working = False

    def note(self, now: float, compute_seconds: float, is_working: bool) -> None:
        """From `now` on, in seconds, sequences run or do not. `compute_seconds`: what the process has computed since its start."""
        if self._is_working:
            passed = now - self._since
            self.working_seconds += passed
            self._idle_seconds += passed - (compute_seconds - self._computed)
            self.bubble_seconds = max(self.bubble_seconds, self._idle_seconds)
        self._since, self._computed, self._is_working = now, compute_seconds, is_working
