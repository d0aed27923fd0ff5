"""Lists planted bugs of other hosts: of their clock offsets, and of the samples of their processes. See planting.py."""

from __future__ import annotations

from simulation.planting import Bug, bug

CLOCK = "flowrt.system.clock_offset"
SAMPLING = "flowrt.hosts.sampling"
LAUNCHER = "flowrt.launcher.launcher"

HOST_BUGS: tuple[Bug, ...] = (
    bug("clock-trip-backward", "a stamp seems to have been written after it has arrived", (
        CLOCK, "ClockExchange.receive", "stamp.sent_seconds + round_trip / 2 - now", "stamp.sent_seconds - round_trip / 2 - now")),
    bug("clock-held-ignored", "the other end seems to return a stamp at once", (
        CLOCK, "ClockExchange.receive", "now - stamp.returned_seconds - stamp.held_seconds", "now - stamp.returned_seconds")),
    bug("clock-drift-ignored", "an old offset seems to be as exact as when it was new", (
        CLOCK, "ClockOffset.error_at", " + self.drift * abs(seconds - self.at_seconds)", "")),
    # standstills of processes on other hosts
    bug("sample-without-silence", "the sample of a process on another host does not say for how long it has been silent", (
        SAMPLING, "RelayedWorker.tick", "self._send(sample, self._silent_seconds)", "self._send(sample, 0.0)")),
    bug("starting-elsewhere-unsampled", "samples of processes that start on another host do not reach the monitor", (
        LAUNCHER, "Launcher._on_worker_control", "if not self.state.has_ended(name):", "if self.state.is_usable(name):")),
    bug("sample-of-no-incarnation", "a sample does not name the incarnation of its process", (
        LAUNCHER, "Launcher._on_worker_control", "self._send_to_monitor(replace(control, process=name, incarnation=worker.incarnation))",
        "self._send_to_monitor(replace(control, process=name))")),
)  # fmt: skip
