"""The monitor: a process of its own that hears everybody's beats and says who is suspect and who is dead.

Here: `run_monitor`, its entry, led by the launcher over one control line like any worker. Not here: the decisions
(flowrt/reliability/detector.py), beats (flowrt/actors/beats.py), what follows from a verdict (flowrt/cluster). It loads no torch, opens
no channel and holds nothing that is not learned again: one that is started anew knows whom it is told of, or whose beat it hears first.

Told: Start, Peers, Stop; Joined and Left; everybody's Beat and Late, each with its process. The launcher's own Beat (process `gateway`)
shows how far the line can be trusted. It says Suspected, Cleared, Condemned.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence

import msgspec

from flowrt.actors.control import (
    Ask,
    Beat,
    Cleared,
    Condemned,
    Connected,
    Control,
    Joined,
    Late,
    Left,
    Listening,
    Peers,
    Start,
    Statistics,
    Stop,
    Suspected,
    as_message,
    from_message,
)
from flowrt.actors.links import Link, LinkLostError
from flowrt.graph.model import GATEWAY, ReliabilitySettings
from flowrt.reliability import detector
from flowrt.reliability.detector import LAG_SECONDS, Detector, State, Timeouts
from flowrt.seams import Seams, processor_of
from flowrt.transports.contract import Channel
from flowrt.transports.wire.message import Message

log = logging.getLogger("flowrt.monitor")

TICK_SECONDS = 0.05
BLOCKED_SHARE = 0.25  # of a processor: a loop that computes for so much of the time is blocked, not starved
FAREWELL_SECONDS = 2.0
_MOST_WORDS = 1 << 12  # that the launcher may be behind


class _Settings(msgspec.Struct):
    """What it reads of the graph."""

    reliability: ReliabilitySettings = ReliabilitySettings()


class Starvation:
    """Which of the silent processes stand in line for a processor: their loops would turn if they had their turn. `look_at`: as
    processor_of."""

    def __init__(self, look_at: Callable[[int], tuple[bool, float] | None] = processor_of) -> None:
        self._look_at = look_at
        self._first: dict[str, tuple[int, float, float]] = {}  # process -> pid, when it was first looked at, what it had used by then

    def look(self, now: float, silent: Mapping[str, int]) -> list[str]:
        """`silent`: process -> pid. One that uses the processor and is silent all the same is not starved: its loop is blocked."""
        self._first = {name: first for name, first in self._first.items() if silent.get(name) == first[0]}
        starved = []
        for name, pid in silent.items():
            standing = self._look_at(pid) if pid else None
            if standing is None:
                continue
            wants, used = standing
            _, since, used_then = self._first.setdefault(name, (pid, now, used))
            if wants and used - used_then <= BLOCKED_SHARE * (now - since):
                starved.append(name)
        return starved


async def run_monitor(control: Channel, seams: Seams) -> None:
    """Serve until Stop, or until the control line ends."""
    start = from_message(await control.recv())
    if not isinstance(start, Start):
        raise msgspec.ValidationError(f"a monitor's first message is Start, not {start.kind!r}")
    monitor = Monitor(start, control, seams)
    try:
        async with asyncio.TaskGroup() as group:
            line = group.create_task(monitor.run_line(), name=f"control of {start.name}")
            await monitor.run()
            line.cancel()
    finally:
        await control.aclose()


class Monitor:
    """One life of the monitor. Made by `run_monitor`."""

    def __init__(self, start: Start, control: Channel, seams: Seams) -> None:
        settings = msgspec.json.decode(start.graph, type=_Settings).reliability
        self.detector = Detector(Timeouts(settings.suspect_seconds, settings.dead_seconds))
        self._name, self._seams = start.name, seams
        self._line = Link(control, _MOST_WORDS, self._on_message)
        self._stopped = asyncio.Event()
        self._pids: dict[str, int] = {}
        self._starvation = Starvation()
        self._due = seams.clock.now() + TICK_SECONDS  # the next tick

    async def run_line(self) -> None:
        """Read and write the control line; when it ends, however it ends, so does the monitor."""
        try:
            await self._line.run()
        except LinkLostError:
            log.info("%s: the launcher is gone", self._name)
        finally:
            self._stopped.set()

    async def run(self) -> None:
        self._say(Listening({}, self._seams.resident_bytes()))
        async with asyncio.TaskGroup() as group:
            ticks = group.create_task(self._tick(), name=f"ticks of {self._name}")
            await self._stopped.wait()
            ticks.cancel()
        self._say(Statistics(resident_bytes=self._seams.resident_bytes()))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FAREWELL_SECONDS):
                await self._line.flush()

    async def _tick(self) -> None:
        clock = self._seams.clock
        while True:
            await clock.sleep(max(0.0, self._due - clock.now()))
            if (now := clock.now()) >= self._due:
                self._look(now)

    def _look(self, now: float) -> None:
        silent = [name for name, life in self.detector.lives.items() if life.state is State.SUSPECT]
        self.detector.starved(now, self._starvation.look(now, {name: self._pids.get(name, 0) for name in silent}))
        self._tell(self.detector.tick(now, now - self._due))
        self._due += TICK_SECONDS
        if self._due <= now:
            self._due = now + TICK_SECONDS

    def _on_message(self, message: Message) -> None:
        now, judge = self._seams.clock.now(), self.detector
        if now - self._due > LAG_SECONDS:  # we were stopped: to be noted before what has come meanwhile is weighed
            self._look(now)
        match from_message(message):
            case Beat() as beat if beat.process == GATEWAY:
                self._tell(judge.path_beat(now, beat.lag_seconds))
            case Beat() as beat:
                self._pids[beat.process] = beat.pid
                operation = beat.running, beat.running_seconds, beat.bound_seconds
                self._tell(judge.beat(now, beat.process, beat.incarnation, beat.sequence, *operation))
            case Late() as late:
                self._tell(judge.reported(now, late.process, late.incarnation, late.by, late.waited_seconds, late.expected_seconds))
            case Joined() as joined:
                judge.joined(now, joined.process, joined.incarnation)
            case Left() as left:
                judge.left(now, left.process, left.incarnation)
            case Peers():  # a sign of the launcher's own: should it stand still now, all others are silent with it
                self._tell(judge.path_beat(now, 0.0))
                self._say(Connected())
            case Ask():
                self._say(Statistics(resident_bytes=self._seams.resident_bytes()))
            case Stop():
                self._stopped.set()
            case other:
                log.warning("%s has no use for %s", self._name, other.kind)

    def _tell(self, decisions: Sequence[detector.Decision]) -> None:
        for each in decisions:
            match each:
                case detector.Suspected(process, incarnation, why):
                    self._say(Suspected(process, incarnation, why))
                case detector.Cleared(process, incarnation, why):
                    self._say(Cleared(process, incarnation, why))
                case detector.Condemned(process, incarnation, why):
                    self._say(Condemned(process, incarnation, why))

    def _say(self, control: Control) -> None:
        self._line.post(as_message(control))
