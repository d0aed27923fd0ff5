"""What was seen of deaths and returns while a run went on: events of the launcher and notes of workers, with their times.

Here: Watch, and Deed (a fault that was carried out). Not here: doing the faults (inject.py), figures (report.py).
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field

from flowrt.chaos.orders import Note, note_of
from flowrt.launcher import events
from flowrt.seams import Clock

Told = (
    events.WorkerLost
    | events.WorkerRestarted
    | events.WorkerGivenUp
    | events.WorkerSuspected
    | events.WorkerCleared
    | events.WorkerMarkedDead
)


@dataclass
class Deed:
    """A fault that was carried out, or could not be (`missed` then says why)."""

    text: str
    kind: str
    process: str
    at: float  # the run's clock
    pid: int = 0
    incarnation: str = ""
    for_seconds: float = 0.0
    other: str = ""  # the process at the far end, of those that befall a link
    missed: str = ""
    is_noted: bool = False  # the process has said itself when it began

    def explains(self, name: str, at: float, dead_seconds: float) -> bool:
        """Whether the loss of `name` at that time may come of this: short standstills and slowness must not."""
        if self.missed or name != self.process or at < self.at:
            return False
        return self.kind in ("crash", "reset") or (self.kind != "slow" and self.for_seconds >= dead_seconds)


@dataclass
class Watch:
    """Tell it every event (`on_event`), and every line of a worker (`takes_line`)."""

    clock: Clock
    clients: Mapping[str, Set[str]] = field(default_factory=dict)  # process -> who uses it, where that is known
    deeds: list[Deed] = field(default_factory=list)
    seen: list[tuple[float, Told]] = field(default_factory=list)  # events of deaths and lives
    notes: list[tuple[str, Note]] = field(default_factory=list)
    held: dict[str, dict[str, int]] = field(default_factory=dict)
    failed: bool = False  # the run
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    def on_event(self, event: events.Event) -> None:
        if isinstance(event, Told):
            self.seen.append((self.clock.now(), event))
            self._ring()
        if isinstance(event, events.RunFailed):
            self.failed = True
            self._ring()

    def takes_line(self, process: str, line: str) -> bool:
        """Whether the line is a note, which is taken in then."""
        note = note_of(line)
        if note is None:
            return False
        if note.what == "held":
            self.held[process] = note.counts
        else:
            self.notes.append((process, note))
            self._correct(process, note)
        self._ring()
        return True

    async def wait_until(self, come: Callable[[], bool], seconds: float) -> bool:
        """Wait until `come()`, or for so long, or until the run fails; whether it came. Looked at after each event and note."""
        try:
            async with asyncio.timeout(max(0.0, seconds)):
                while not come() and not self.failed:
                    changed = self._changed  # others wait too: each round has a bell of its own
                    await changed.wait()
        except TimeoutError:
            pass
        return come()

    async def wait_failed(self, seconds: float) -> None:
        """Wait for so long, or until the run fails."""
        await self.wait_until(lambda: False, seconds)

    def lost_seconds(self, deed: Deed) -> float:
        """From the deed to the launcher's knowing that the process is gone; inf when it never did."""
        return self._first(events.WorkerLost, deed)

    def back_seconds(self, deed: Deed) -> float:
        """From the deed to the moment at which the process works again; inf when it never does."""
        return self._first(events.WorkerRestarted, deed)

    def is_given_up(self, deed: Deed) -> bool:
        """Whether the process will not be started again."""
        return self._first(events.WorkerGivenUp, deed) < math.inf

    def left_seconds(self, deed: Deed) -> float:
        """From the deed until the last of its clients used the process no more; inf when one of them, or all, never said so."""
        left: dict[str, float] = {}
        until = self._until(deed)
        for process, note in self.notes:
            if note.what == "left" and (note.peer, note.incarnation) == (deed.process, deed.incarnation) and note.at < until:
                left[process] = min(left.get(process, math.inf), note.at)
        return max(left.values()) - deed.at if left and left.keys() >= self.clients.get(deed.process, set()) else math.inf

    def _ring(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _first(self, kind: type[Told], deed: Deed) -> float:
        until = self._until(deed)
        times = [at for at, event in self.seen if isinstance(event, kind) and event.name == deed.process and deed.at <= at < until]
        return min(times, default=math.inf) - deed.at

    def _until(self, deed: Deed) -> float:
        """When the next fault befell the same process: what is seen from then on comes of that one."""
        later = (each.at for each in self.deeds if each.process == deed.process and each.at > deed.at and not each.missed)
        return min(later, default=math.inf)

    def _correct(self, process: str, note: Note) -> None:
        """A worker begins to suffer when it has the order, not when it was sent."""
        for deed in self.deeds:
            if deed.process == process and deed.kind == note.what and deed.at <= note.at and not deed.is_noted:
                deed.at, deed.is_noted = note.at, True
                if note.what == "reset" and not note.counts.get("connections"):
                    deed.missed = f"no connection to {deed.other} was open"
                return
