"""The trace of a simulated run, in virtual time. It reads the rings of the workers without messages, so that a traced run takes the same
course as the run that is not traced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flowrt.actors.control import TraceRecords
from flowrt.launcher.trace_collector import TraceCollector
from flowrt.trace.records import NO_RECORDS, TraceRing, WorkerTrace
from flowrt.transports.contract import Identity


class SimulatedTrace:
    """One run each: `begin`, then `begin_worker` for each incarnation of a worker, and `traces` after the end, whatever the run raised."""

    def __init__(self) -> None:
        self.collector = TraceCollector(lambda: 0.0)
        self._now: Callable[[], float] = lambda: 0.0
        self._rings: list[tuple[Identity, TraceRing]] = []

    def begin(self, now: Callable[[], float]) -> None:
        self._now, self.collector = now, TraceCollector(now)

    def begin_worker(self, name: str, worker: Any) -> None:
        """Trace this incarnation. Call it before the worker loads."""
        worker.trace_ring = TraceRing(self._now)
        self._rings.append((Identity(name, worker.incarnation), worker.trace_ring))

    def traces(self) -> list[WorkerTrace]:
        for identity, ring in self._rings:
            for piece in (*ring.take(), NO_RECORDS):
                self.collector.add(identity.name, TraceRecords(identity.incarnation, piece, ring.num_dropped, is_last=True))
        return self.collector.traces()
