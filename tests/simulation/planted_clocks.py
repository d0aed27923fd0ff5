"""Lists planted bugs of the clock offsets of other hosts. See planting.py."""

from __future__ import annotations

from simulation.planting import Bug, bug

CLOCK = "flowrt.clock_offset"

CLOCK_BUGS: tuple[Bug, ...] = (
    bug("clock-trip-backward", "a stamp seems to have been written after it has arrived", (
        CLOCK, "ClockExchange.receive", "stamp.sent_seconds + round_trip / 2 - now", "stamp.sent_seconds - round_trip / 2 - now")),
    bug("clock-held-ignored", "the other end seems to return a stamp at once", (
        CLOCK, "ClockExchange.receive", "now - stamp.returned_seconds - stamp.held_seconds", "now - stamp.returned_seconds")),
    bug("clock-drift-ignored", "an old offset seems to be as exact as when it was new", (
        CLOCK, "ClockOffset.error_at", " + self.drift * abs(seconds - self.at_seconds)", "")),
)  # fmt: skip
