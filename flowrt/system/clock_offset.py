"""How much the clock of another host differs from this host's, and how exactly that is known. Pure.

Both ends of a connection stamp their messages with the time, and return the latest stamp that they have received, with the time that they
have held it. As in NTP (RFC 5905, section 8), half of the round trip bounds the error: the message took at least nothing, and at most
all of it. The stamp with the smallest bound counts, until the drift of the clocks has made a newer one better.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

MAX_DRIFT = 1e-4  # between two clocks, in seconds per second: quartz is within 50 ppm, and the system corrects it


class ClockStamp(msgspec.Struct, frozen=True, array_like=True):
    """`sent_seconds`: the time of the sender's clock. `returned_seconds`: that of the latest stamp that it has received, None before the
    first. `held_seconds`: for how long it has held that one."""

    sent_seconds: float
    returned_seconds: float | None = None
    held_seconds: float = 0.0


@dataclass(frozen=True)
class ClockOffset:
    """`seconds`: what the other clock shows more than the own one, known within `error_seconds` at `at_seconds` of the own clock."""

    seconds: float
    error_seconds: float
    at_seconds: float = 0.0
    drift: float = MAX_DRIFT

    def error_at(self, seconds: float) -> float:
        """The bound of the error at another time of the own clock."""
        return self.error_seconds + self.drift * abs(seconds - self.at_seconds)


SAME_CLOCK = ClockOffset(0.0, 0.0, drift=0.0)
UNKNOWN_CLOCK = ClockOffset(0.0, math.inf)


class ClockExchange:
    """One end of a connection. `now`: the own clock, of which `offset` says what the other end's shows more."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._latest: tuple[float, float] | None = None  # of the other end: its time in the stamp, and the own time of the arrival
        self.offset = UNKNOWN_CLOCK

    def stamp(self) -> ClockStamp:
        """The stamp of a message that is sent now."""
        now = self._now()
        return ClockStamp(now) if self._latest is None else ClockStamp(now, self._latest[0], now - self._latest[1])

    def receive(self, stamp: ClockStamp) -> None:
        """A message with this stamp has arrived. A stamp that no clock could have written is ignored."""
        now = self._now()
        if not math.isfinite(stamp.sent_seconds):
            return
        self._latest = stamp.sent_seconds, now
        if stamp.returned_seconds is None or not stamp.held_seconds >= 0.0:
            return
        round_trip = now - stamp.returned_seconds - stamp.held_seconds
        if not 0.0 <= round_trip < math.inf:
            return
        error = round_trip / 2 + MAX_DRIFT * (stamp.held_seconds + round_trip)
        if error <= self.offset.error_at(now):
            self.offset = ClockOffset(stamp.sent_seconds + round_trip / 2 - now, error, now)
