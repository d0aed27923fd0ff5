"""Counts the deaths of processes, and how long it took to notice them and to restart the processes. Pure."""

from __future__ import annotations

from collections import Counter

from flowrt.histogram import Histogram
from flowrt.launcher import events

_EDGES = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class OutageRecord:
    """`detection_seconds`: from the latest heartbeat to the first notice, of processes that send heartbeats. `outage_seconds`: from there
    until the next incarnation is connected."""

    def __init__(self) -> None:
        self.deaths: Counter[str] = Counter()
        self.detection_seconds, self.outage_seconds = Histogram(_EDGES), Histogram(_EDGES)
        self._down: set[str] = set()

    def note(self, event: events.Event, heartbeat_age: float | None) -> None:
        """`heartbeat_age`: of the process that the event is about."""
        match event:
            case events.WorkerMarkedDead(name) | events.WorkerLost(name, while_loading=False) if name not in self._down:
                self._down.add(name)
                self.deaths[name] += 1
                if heartbeat_age is not None:
                    self.detection_seconds.observe(heartbeat_age)
            case events.WorkerRestarted(name, seconds=seconds):
                self._down.discard(name)
                self.outage_seconds.observe(seconds)
            case events.WorkerCleared(name):
                self._down.discard(name)
