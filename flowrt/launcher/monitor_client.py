"""The launcher's client of the monitor: starts the monitor, relays heartbeats to it, and acts on its reports.

The detector itself (flowrt/reliability/detector.py) runs in the monitor's process. A run goes on without its monitor, and no message to the
monitor ever waits for room. No other process watches the monitor, so the launcher sends it a request twice a second. A monitor that stops
responding, because it is stopped or hangs, is killed and replaced.
"""

from __future__ import annotations

import asyncio

import msgspec

from flowrt.actors.control import Control, DetectorReport, Heartbeat, LateResponse, PeerJoined, StatisticsRequest
from flowrt.actors.heartbeats import LAUNCHER_HEARTBEAT_SECONDS, send_heartbeats
from flowrt.graph.model import GATEWAY, MONITOR
from flowrt.launcher import events
from flowrt.launcher.control_connection import ControlConnection
from flowrt.launcher.hosts import Hosts
from flowrt.launcher.restarts import Revival, Run
from flowrt.reliability.detector import ProcessState
from flowrt.reliability.poll_timeout import PollTimeout
from flowrt.seams import Clock, Running

MONITOR_WORKER = "flowrt.workers.monitor:run_monitor"
ASK_SECONDS = 0.5
MONITOR_SECONDS = 10.0  # time limit for the monitor's responses; generous, since a run loses little without its monitor


class _OwnSigns:
    """The source of the launcher's own heartbeats. They show that its loop runs: only then does a worker's silence mean anything."""

    num_firings = 0
    running: Running | None = None

    def __init__(self, run_id: str) -> None:
        self.incarnation = run_id


class Watching:
    """The launcher's client of the monitor of one run."""

    def __init__(self, run: Run, hosts: Hosts, revival: Revival, clock: Clock, run_id: str) -> None:
        self._run, self._hosts, self._revival, self._clock, self._run_id = run, hosts, revival, clock, run_id
        self._fenced: set[str] = set()  # marked dead by the present monitor, and not killed

    async def run(self, log_level: str) -> None:
        """Start the monitor and send it the launcher's heartbeats, until cancelled."""
        self._hosts.plan_beside(MONITOR, MONITOR_WORKER, log_level)
        self._revival.bring(MONITOR)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._attend(), name="questions to the monitor")
            await send_heartbeats(_OwnSigns(self._run_id), self._clock, self._relay, LAUNCHER_HEARTBEAT_SECONDS, GATEWAY)

    async def _attend(self) -> None:
        """Send StatisticsRequest to the monitor periodically, and mark it dead when it sends nothing for MONITOR_SECONDS."""
        timeout = PollTimeout(MONITOR_SECONDS, ASK_SECONDS)
        while True:
            await self._clock.sleep(ASK_SECONDS)
            monitor = self._run.workers.get(MONITOR)
            if monitor is None or not monitor.connected.done() or monitor.is_over:
                continue
            if timeout.has_expired(self._clock.now(), monitor.incarnation, monitor.last_word_seconds):
                self._revival.condemn(monitor, f"has given no sign for {MONITOR_SECONDS:g} s")
            else:
                monitor.try_tell(StatisticsRequest())

    def on_sign(self, line: ControlConnection, sign: Heartbeat | LateResponse) -> None:
        """Relay a worker's Heartbeat or LateResponse to the monitor."""
        if line.connected.done() and not line.is_known_over and line.name != MONITOR:
            if isinstance(sign, Heartbeat):
                self._relay(msgspec.structs.replace(sign, process=line.name, pid=line.placed.pid))
            else:
                self._relay(msgspec.structs.replace(sign, by=line.name))

    def on_control(self, line: ControlConnection, control: Control) -> None:
        """Act on the monitor's DetectorReport about a current incarnation. Ignores other messages."""
        if not isinstance(control, DetectorReport) or line.name != MONITOR:
            return
        accused = self._run.workers.get(control.process)
        if accused is None or accused.is_over or accused.told_to_stop or accused.incarnation != control.incarnation:
            return
        match control.state:
            case ProcessState.SUSPECT:
                self._run.on_event(events.WorkerSuspected(control.process, control.why))
            case ProcessState.ALIVE:
                self._clear(control.process, control.why)
            case ProcessState.DEAD:
                is_killed = self._revival.outlives(accused.host)
                if not is_killed:
                    self._fenced.add(control.process)
                self._run.on_event(events.WorkerMarkedDead(control.process, control.why, is_killed))
                self._revival.condemn(accused, f"was held for dead ({control.why})")

    def on_connected(self, line: ControlConnection) -> None:
        """Notify the monitor of a connected worker. When the monitor itself connects, clear the fenced workers, since the new monitor
        marks dead ones again, and notify it of all connected workers. Workers in this loop are left out."""
        if line.name == MONITOR:
            for name in sorted(self._fenced):
                self._clear(name, "the monitor was started again")
        for other in self._run.workers.values():
            if line.name == MONITOR and other is not line and other.connected.done() and not other.is_over and other.placed.task is None:
                line.post(PeerJoined(other.name, other.incarnation, {}, other.placed.pid))

    def _clear(self, name: str, why: str) -> None:
        self._fenced.discard(name)
        self._run.on_event(events.WorkerCleared(name, why))

    def _relay(self, sign: Control) -> None:
        monitor = self._run.workers.get(MONITOR)
        if monitor is not None and monitor.connected.done() and not monitor.is_over:
            monitor.try_tell(sign)
