"""The monitor: a separate process that receives all heartbeats and reports which processes are suspect and which are dead.

The launcher runs it over one control connection, like any worker. flowrt/reliability/detector.py makes the decisions. The monitor
loads no torch, opens no channel and keeps no state that it cannot learn again: a restarted monitor learns the processes from PeerJoined
messages and heartbeats.

It receives Start, Peers and Stop; PeerJoined and PeerLeft; the Heartbeat and LateResponse messages of all processes; and LateProcess about
processes on other hosts, which it cannot sample. The launcher's own Heartbeat (process `gateway`) shows whether the control connection is
current. It sends DetectorReport.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

import msgspec

from flowrt.actors.control import (
    Connected,
    DetectorReport,
    Heartbeat,
    LateProcess,
    LateResponse,
    Listening,
    PeerJoined,
    PeerLeft,
    Peers,
    Start,
    Statistics,
    StatisticsRequest,
    Stop,
    from_message,
)
from flowrt.actors.control_link import ControlLink, run_controlled
from flowrt.graph.model import GATEWAY
from flowrt.graph.settings import ReliabilitySettings
from flowrt.reliability.detector import TICK_SECONDS, Detector, Operation, StateChange, Timeouts
from flowrt.seams import Seams
from flowrt.system.process_status import ProcessSample, ProcessTimes
from flowrt.transports.contract import Channel
from flowrt.transports.wire.message import Message

log = logging.getLogger("flowrt.monitor")

_MAX_REPORTS = 1 << 12  # messages that the launcher may be behind


class _Settings(msgspec.Struct):
    """The part of the graph that the monitor reads."""

    reliability: ReliabilitySettings = ReliabilitySettings()


async def run_monitor(control: Channel, seams: Seams) -> None:
    """Serve until Stop, or until the control connection ends."""
    await run_controlled(control, lambda start: Monitor(start, control, seams))


class Monitor:
    """One incarnation of the monitor. Created by `run_monitor`."""

    def __init__(self, start: Start, control: Channel, seams: Seams) -> None:
        settings = msgspec.json.decode(start.graph, type=_Settings).reliability
        self.detector = Detector(Timeouts(settings.suspect_seconds, settings.dead_seconds))
        self._name, self._seams = start.name, seams
        self._stopped = asyncio.Event()
        self.control = ControlLink(start.name, control, _MAX_REPORTS, self._on_message, self._stopped.set)
        self._pids: dict[str, int] = {}

    async def run(self) -> None:
        self.control.send(Listening({}, self._seams.resident_bytes()))
        async with asyncio.TaskGroup() as group:
            ticks = group.create_task(self._tick(), name=f"ticks of {self._name}")
            await self._stopped.wait()
            ticks.cancel()
        self.control.send(Statistics(resident_bytes=self._seams.resident_bytes()))
        await self.control.flush()

    async def _tick(self) -> None:
        clock = self._seams.clock
        due = clock.now() + TICK_SECONDS
        while True:
            await clock.sleep(max(0.0, due - clock.now()))
            if (now := clock.now()) >= due:
                samples = {name: sample for name in self.detector.silent() if (sample := self._sample(name)) is not None}
                self._report(self.detector.tick(now, samples))
                due = max(due + TICK_SECONDS, now)

    def _sample(self, process: str) -> ProcessSample | None:
        return self._seams.process_sample(pid) if (pid := self._pids.get(process, 0)) else None

    def _times(self, process: str, pid: int) -> ProcessTimes | None:
        self._pids[process] = pid
        return self._seams.process_times(pid) if pid else None

    def _on_message(self, message: Message) -> None:
        now, detector = self._seams.clock.now(), self.detector
        match from_message(message):
            case Heartbeat(process=process) if process == GATEWAY:
                detector.record_launcher_heartbeat(now)
            case Heartbeat(process=process) as heartbeat:
                operation = (
                    None if heartbeat.running is None else Operation(heartbeat.running, heartbeat.running_seconds, heartbeat.bound_seconds)
                )
                times = self._times(process, heartbeat.pid)
                self._report(detector.record_heartbeat(now, process, heartbeat.incarnation, heartbeat.sequence, operation, times))
            case LateProcess() as late:
                detector.record_sample(late.process, late.incarnation, late.sample, late.silent_seconds)
            case LateResponse() as late:
                seconds = late.waited_seconds, late.expected_seconds
                self._report(detector.record_report(now, late.process, late.incarnation, late.by, *seconds))
            case PeerJoined(process, incarnation, pid=pid, is_starting=is_starting):
                detector.add(now, process, incarnation, self._times(process, pid), is_starting)
            case PeerLeft(process, incarnation):
                detector.remove(now, process, incarnation)
            case Peers():  # also shows that the launcher runs
                detector.record_launcher_heartbeat(now)
                self.control.send(Connected())
            case StatisticsRequest():
                self.control.send(Statistics(resident_bytes=self._seams.resident_bytes()))
            case Stop():
                self._stopped.set()
            case other:
                log.warning("unexpected message %s at %s", other.kind, self._name)

    def _report(self, decisions: Sequence[StateChange]) -> None:
        for each in decisions:
            self.control.send(DetectorReport(each.process, each.incarnation, each.state, each.why, each.is_stopped))
