"""Sums up the weights that the processes of a graph have loaded while the run starts, and describes the sum in one line. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from flowrt.launcher import events
from flowrt.launcher.start_checks import MemoryNeed, total_weight_bytes

SHOWN_SECONDS = 2.0  # a graph that loads in less time shows nothing
LINE_SECONDS = 10.0  # between two lines where a line cannot replace the one before


class LoadRecord:
    """`needs`: of all processes, by name.

    The process that fills shared weights is the only one that reports their bytes. Once a process has loaded them, they stay in memory:
    a process that loads again then reports only what it alone holds. Processes report at different times, so a sum is complete, and becomes
    an event, once each process that loads has reported since the sum before.
    """

    def __init__(self, needs: Mapping[str, MemoryNeed]) -> None:
        self._needs, self._total = needs, total_weight_bytes(needs.values())
        self._read: dict[str, int] = {}  # by process that loads
        self._loaded: set[str] = set()  # processes
        self._held: set[str] = set()  # shared weights, by MemoryNeed.shares
        self._awaited = set(needs)  # processes that have not reported since the latest complete sum
        self._began: float | None = None

    def note(self, event: events.Event, now: float) -> events.WeightsLoading | None:
        """The sum, if the event completes it, and loading takes long enough to be shown."""
        match event:
            case events.WorkerLoading(name=name, num_bytes=num_bytes) if name in self._needs:
                self._began = now if self._began is None else self._began
                self._read[name] = num_bytes
            case events.WorkerListening(name) if name in self._needs:
                self._loaded.add(name)
                self._held.add(self._needs[name].shares)
            case events.WorkerStarted(name) | events.WorkerLost(name) if name in self._needs:
                self._read.pop(name, None)
                self._loaded.discard(name)
                self._awaited.add(name)
                return None
            case _:
                return None
        self._awaited.discard(name)
        if self._awaited:
            return None
        self._awaited = self._needs.keys() - self._loaded
        seconds = 0.0 if self._began is None else now - self._began
        return events.WeightsLoading(self._num_bytes(), self._total, seconds) if seconds >= SHOWN_SECONDS else None

    def _num_bytes(self) -> int:
        own, shared = 0, {need.shares: need.shared_bytes if need.shares in self._held else 0 for need in self._needs.values()}
        for name, need in self._needs.items():
            own_bytes = need.weight_bytes - need.shared_bytes
            read = own_bytes if name in self._loaded else min(self._read.get(name, 0), need.weight_bytes)
            own += min(read, own_bytes)
            shared[need.shares] = min(shared[need.shares] + max(0, read - own_bytes), need.shared_bytes)
        return own + sum(shared.values())


def loading_text(loading: events.WeightsLoading) -> str:
    """ "loading weights 12.3 of 57.1 GB, 1.8 GB/s": the speed is that since the begin."""
    unit, size = ("GB", 1e9) if loading.total_bytes >= 1e9 else ("MB", 1e6)
    speed = loading.num_bytes / loading.seconds / size
    return f"loading weights {loading.num_bytes / size:.1f} of {loading.total_bytes / size:.1f} {unit}, {speed:.1f} {unit}/s"
