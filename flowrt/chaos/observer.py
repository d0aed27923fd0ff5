"""Records deaths and restarts during a run: events of the launcher and notes of workers, with their times."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field
from typing import Any

from flowrt.chaos.orders import Note, note_of
from flowrt.graph.model import FORK_SERVER
from flowrt.launcher import events
from flowrt.seams import Clock

_EndOrReturn = events.WorkerLost | events.WorkerRestarted | events.WorkerGivenUp
ProcessEvent = _EndOrReturn | events.WorkerSuspected | events.WorkerCleared | events.WorkerMarkedDead


@dataclass
class InjectedFault:
    """A fault that was injected, or could not be (`missed` is then the reason)."""

    text: str
    kind: str
    process: str
    at: float  # the run's clock
    pid: int = 0
    incarnation: str = ""
    for_seconds: float = 0.0
    other: str = ""  # the far end, for faults of a link
    missed: str = ""
    is_noted: bool = False  # the process has reported when it began
    phase: str = ""  # of the process at that moment, where known

    def explains(self, name: str, at: float, dead_seconds: float) -> bool:
        """Whether this may have caused the loss of `name` at that time: short standstills and slowness must not."""
        if self.missed or name not in (self.process, self.other) or at < self.at:
            return False
        return self.kind in ("crash", "reset") or (self.kind != "slow" and self.for_seconds >= dead_seconds)


@dataclass
class RunObserver:
    """Receives every event (`on_event`) and every line of a worker (`take_line`)."""

    clock: Clock
    clients: Mapping[str, Set[str]] = field(default_factory=dict)  # process -> its clients, where known
    injected_faults: list[InjectedFault] = field(default_factory=list)
    seen: list[tuple[float, ProcessEvent]] = field(default_factory=list)  # with their times
    notes: list[tuple[str, Note]] = field(default_factory=list)
    held: dict[str, dict[str, int]] = field(default_factory=dict)
    failed: bool = False  # the run
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    def on_event(self, event: events.Event) -> None:
        match event:
            case events.ForkServerLost(how):
                event = events.WorkerLost(FORK_SERVER, how)
            case events.ForkServerRestarted(seconds):
                event = events.WorkerRestarted(FORK_SERVER, 0, seconds)
        if isinstance(event, ProcessEvent):
            self.seen.append((self.clock.now(), event))
        self.failed = self.failed or isinstance(event, events.RunFailed)
        self._notify()

    def take_line(self, process: str, line: str) -> bool:
        """Records the line and returns True if it is a note."""
        note = note_of(line)
        if note is None:
            return False
        if note.what == "held":
            self.held[process] = note.counts
        else:
            self.notes.append((process, note))
            self._correct(process, note)
        self._notify()
        return True

    async def wait_until(self, condition: Callable[[], bool], seconds: float) -> bool:
        """Wait until `condition()`, the timeout, or the failure of the run; returns `condition()`. Each event and note evaluates it."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, seconds)):
                while not condition() and not self.failed:
                    changed = self._changed  # others wait too: each round has an event of its own
                    await changed.wait()
        return condition()

    async def wait_failed(self, seconds: float) -> None:
        """Wait for `seconds`, or until the run fails."""
        await self.wait_until(lambda: False, seconds)

    def lost_seconds(self, injected: InjectedFault) -> float:
        """From the fault to the launcher's notice of the death; inf when it never came."""
        return self._first(events.WorkerLost, injected)

    def marked_seconds(self, injected: InjectedFault) -> float:
        """From the fault to the verdict of the monitor; inf when it never came."""
        return self._first(events.WorkerMarkedDead, injected)

    def is_lost(self, injected: InjectedFault) -> bool:
        return self.lost_seconds(injected) < math.inf

    def must_return(self, injected: InjectedFault) -> bool:
        """Whether the fault has ended its process, or is to."""
        return not injected.missed and (injected.kind == "crash" or self.is_lost(injected))

    def back_seconds(self, injected: InjectedFault) -> float:
        """From the fault to the return of the process; inf when it never returned."""
        return self._first(events.WorkerRestarted, injected)

    def has_returned(self, injected: InjectedFault) -> bool:
        """Whether the process came back at any time after the fault, be it after a later one."""
        restarts = [at for at, event in self.seen if isinstance(event, events.WorkerRestarted) and event.name == injected.process]
        return any(at >= injected.at for at in restarts)

    def is_given_up(self, injected: InjectedFault) -> bool:
        """Whether the process will not be restarted."""
        return self._first(events.WorkerGivenUp, injected) < math.inf

    def is_back_or_given_up(self, injected: InjectedFault) -> bool:
        return self.back_seconds(injected) < math.inf or self.is_given_up(injected)

    def left_seconds(self, injected: InjectedFault) -> float:
        """From the fault until the last client stopped using the process; inf when a client never reported that."""
        left: dict[str, float] = {}
        until = self._until(injected)
        for process, note in self.notes:
            if note.what == "left" and (note.peer, note.incarnation) == (injected.process, injected.incarnation) and note.at < until:
                left[process] = min(left.get(process, math.inf), note.at)
        return max(left.values()) - injected.at if left and left.keys() >= self.clients.get(injected.process, set()) else math.inf

    def as_json(self, begun: float) -> list[dict[str, Any]]:
        """The faults and their effects; `seconds` count from `begun`. Values that are not finite become null in JSON."""
        return [
            {
                "fault": injected.text,
                "pid": injected.pid,
                "phase": injected.phase or None,
                "seconds": round(injected.at - begun, 5),
                "missed": injected.missed or None,
                "left_seconds": round(self.left_seconds(injected), 5),
                "lost_seconds": round(self.lost_seconds(injected), 5),
                "back_seconds": round(self.back_seconds(injected), 5),
            }
            for injected in self.injected_faults
        ]

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _first(self, kind: type[ProcessEvent], injected: InjectedFault) -> float:
        until = self._until(injected)
        times = [at for at, event in self.seen if isinstance(event, kind) and event.name == injected.process and injected.at <= at < until]
        return min(times, default=math.inf) - injected.at

    def _until(self, injected: InjectedFault) -> float:
        """The time of the next fault of the same process; later events belong to that one."""
        later = (each.at for each in self.injected_faults if each.process == injected.process and each.at > injected.at and not each.missed)
        return min(later, default=math.inf)

    def _correct(self, process: str, note: Note) -> None:
        """A fault begins when the worker receives the order, not when it is sent."""
        for injected in self.injected_faults:
            if injected.process == process and injected.kind == note.what and injected.at <= note.at and not injected.is_noted:
                injected.at, injected.is_noted = note.at, True
                if note.what == "reset" and not note.counts.get("connections"):
                    injected.missed = f"no connection to {injected.other} was open"
                return
