"""The launcher's client of the monitor: sends and relays heartbeats to it, and watches that it responds.

The detector itself (flowrt/reliability/detector.py) runs in the monitor's process. A run goes on without its monitor, and no message to the
monitor ever waits for room. No other process watches the monitor, so the launcher sends it a request twice a second. A monitor that stops
responding, because it is stopped or hangs, is killed and replaced. The run state (run_state.py) acts on its reports.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from msgspec.structs import replace

from flowrt.actors.control import Control, Heartbeat, LateResponse, StatisticsRequest
from flowrt.actors.heartbeats import LAUNCHER_HEARTBEAT_SECONDS, send_heartbeats
from flowrt.graph.model import GATEWAY, MONITOR
from flowrt.launcher.control_connection import ControlConnection
from flowrt.launcher.run_state import RunState
from flowrt.reliability.poll_timeout import PollTimeout
from flowrt.seams import Clock

POLL_SECONDS = 0.5
MONITOR_SECONDS = 10.0  # time limit for the monitor's responses; generous, since a run loses little without its monitor


class MonitorClient:
    """`step` passes an event to the run state. The client sends the launcher's own heartbeats: they show that its loop runs, and only then
    does a worker's silence mean anything."""

    def __init__(
        self, state: RunState, step: Callable[..., None], workers: Mapping[str, ControlConnection], clock: Clock, run_id: str
    ) -> None:
        self._state, self._step, self._workers, self._clock, self._run_id = state, step, workers, clock, run_id

    async def run(self) -> None:
        """Send requests and the launcher's heartbeats to the monitor, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._watch_monitor(), name="requests to the monitor")
            await send_heartbeats(self._run_id, lambda: (0, None), self._clock, self._send, LAUNCHER_HEARTBEAT_SECONDS, GATEWAY)

    def relay(self, worker: ControlConnection, control: Heartbeat | LateResponse) -> None:
        """Relay a worker's message to the monitor."""
        if worker.name != MONITOR and self._state.is_usable(worker.name):
            is_heartbeat = isinstance(control, Heartbeat)
            self._send(replace(control, process=worker.name, pid=worker.pid) if is_heartbeat else replace(control, by=worker.name))

    async def _watch_monitor(self) -> None:
        """Request a response periodically, and fence the monitor when it sends nothing for MONITOR_SECONDS."""
        timeout = PollTimeout(MONITOR_SECONDS, POLL_SECONDS)
        while True:
            await self._clock.sleep(POLL_SECONDS)
            if not self._state.is_usable(MONITOR):
                continue
            monitor = self._workers[MONITOR]
            if timeout.has_expired(self._clock.now(), monitor.incarnation, monitor.last_message_seconds):
                self._step(self._state.fence, MONITOR, f"sent nothing for {MONITOR_SECONDS:g} s")
            else:
                monitor.send_if_room(StatisticsRequest())

    def _send(self, control: Control) -> None:
        if self._state.is_usable(MONITOR):
            self._workers[MONITOR].send_if_room(control)
