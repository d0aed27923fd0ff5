"""The monitor as the launcher sees it: started beside the run, given everybody's signs of life, heard when it condemns.

Here: `Watching`. Not here: the verdicts (flowrt/reliability/detector.py, in the monitor's process), what follows from a death (revival.py,
which starts the monitor again, too). A run goes on without its monitor, and nothing that is told to it ever waits. Nobody else watches
the monitor, so it is asked twice a second; one that answers no more, since it is stopped or hangs, is ended and replaced.
"""

from __future__ import annotations

import asyncio

import msgspec

from flowrt.actors.control import Ask, Cleared, Condemned, Control, Heartbeat, Joined, Late, Suspected
from flowrt.actors.heartbeats import LAUNCHER_HEARTBEAT_SECONDS, send_heartbeats
from flowrt.graph.model import GATEWAY, MONITOR
from flowrt.launcher import events
from flowrt.launcher.control_connection import ControlConnection
from flowrt.launcher.hosts import Hosts
from flowrt.launcher.restarts import Revival, Run
from flowrt.reliability.answering import Answering
from flowrt.seams import Clock, Running

MONITOR_WORKER = "flowrt.workers.monitor:run_monitor"
ASK_SECONDS = 0.5
MONITOR_SECONDS = 10.0  # for the monitor to answer in: far more than it ever takes, since hardly anything is lost meanwhile


class _OwnSigns:
    """What the launcher's own beats tell: that its loop turns, and so how far silence on its lines means anything."""

    num_firings = 0
    running: Running | None = None

    def __init__(self, run_id: str) -> None:
        self.incarnation = run_id


class Watching:
    """The monitor of one run."""

    def __init__(self, run: Run, hosts: Hosts, revival: Revival, clock: Clock, run_id: str) -> None:
        self._run, self._hosts, self._revival, self._clock, self._run_id = run, hosts, revival, clock, run_id
        self._fenced: set[str] = set()  # marked dead by the present monitor, and not killed

    async def run(self, log_level: str) -> None:
        """Have the monitor started, and tell it that we live, until cancelled."""
        self._hosts.plan_beside(MONITOR, MONITOR_WORKER, log_level)
        self._revival.bring(MONITOR)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._attend(), name="questions to the monitor")
            await send_heartbeats(_OwnSigns(self._run_id), self._clock, self._relay, LAUNCHER_HEARTBEAT_SECONDS, GATEWAY)

    async def _attend(self) -> None:
        """See that the monitor answers."""
        answering = Answering(MONITOR_SECONDS, ASK_SECONDS)
        while True:
            await self._clock.sleep(ASK_SECONDS)
            monitor = self._run.workers.get(MONITOR)
            if monitor is None or not monitor.connected.done() or monitor.is_over:
                continue
            if answering.look(self._clock.now(), monitor.incarnation, monitor.last_word_seconds):
                self._revival.condemn(monitor, f"has given no sign for {MONITOR_SECONDS:g} s")
            else:
                monitor.try_tell(Ask())

    def on_sign(self, line: ControlConnection, sign: Heartbeat | Late) -> None:
        """A sign of life, or its lack, from a worker: for the monitor."""
        if line.connected.done() and not line.is_known_over and line.name != MONITOR:
            if isinstance(sign, Heartbeat):
                self._relay(msgspec.structs.replace(sign, process=line.name, pid=line.placed.pid))
            else:
                self._relay(msgspec.structs.replace(sign, by=line.name))

    def on_control(self, line: ControlConnection, control: Control) -> None:
        """What the monitor says."""
        if not isinstance(control, Suspected | Cleared | Condemned) or line.name != MONITOR:
            return
        accused = self._run.workers.get(control.process)
        if accused is None or accused.is_over or accused.told_to_stop or accused.incarnation != control.incarnation:
            return
        match control:
            case Suspected():
                self._run.on_event(events.WorkerSuspected(control.process, control.why))
            case Cleared():
                self._clear(control.process, control.why)
            case Condemned():
                is_killed = self._revival.outlives(accused.host)
                if not is_killed:
                    self._fenced.add(control.process)
                self._run.on_event(events.WorkerMarkedDead(control.process, control.why, is_killed))
                self._revival.condemn(accused, f"was held for dead ({control.why})")

    def on_connected(self, line: ControlConnection) -> None:
        """A life of the monitor is there: it learns who else is, and marks anew whom it finds dead."""
        if line.name == MONITOR:
            for name in sorted(self._fenced):
                self._clear(name, "the monitor was started again")
        for other in self._run.workers.values():
            if line.name == MONITOR and other is not line and other.connected.done() and not other.is_over and other.placed.task is None:
                line.post(Joined(other.name, other.incarnation, {}, other.placed.pid))

    def _clear(self, name: str, why: str) -> None:
        self._fenced.discard(name)
        self._run.on_event(events.WorkerCleared(name, why))

    def _relay(self, sign: Control) -> None:
        monitor = self._run.workers.get(MONITOR)
        if monitor is not None and monitor.connected.done() and not monitor.is_over:
            monitor.try_tell(sign)
