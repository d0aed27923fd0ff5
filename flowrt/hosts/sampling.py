"""Samples the workers of a host whose heartbeats are late, for the monitor, which reads /proc of its own host only.

The host server relays the heartbeats, so it sees when one is late. It sends the samples on the worker's own control connection, behind the
heartbeats that it has relayed: together they give the monitor the evidence that it would gather itself (flowrt/reliability/detector.py).
"""

from __future__ import annotations

from collections.abc import Callable

from flowrt.actors.control import Heartbeat, LateProcess, as_message
from flowrt.reliability.detector import SAMPLE_SECONDS, TICK_SECONDS, ObserverTime
from flowrt.seams import Seams
from flowrt.system.process_status import Activity, ProcessSample
from flowrt.transports.errors import TransportError
from flowrt.transports.wire.message import Message


class RelayedWorker:
    """A worker of process `pid`. `send`: as of the channel to the launcher on which its messages are relayed; False, without room. Its
    silence begins with its control connection."""

    def __init__(self, pid: int, send: Callable[[Message], bool], seams: Seams) -> None:
        self._pid, self._send_nowait, self._seams = pid, send, seams
        self._first: ProcessSample | None = None  # at the beginning of the silence: not sent yet
        self._begin_silence()

    def on_message(self, message: Message) -> None:
        """The worker has sent a message, which is not relayed yet."""
        if message.kind == Heartbeat.kind:
            self._begin_silence()

    def tick(self, now: float, passed: float) -> None:
        """Count `passed` seconds of silence, and send a sample once a heartbeat is late. A sample that finds no room is dropped."""
        self._silent_seconds += min(passed, max(0.0, now - self._received_at))
        if self._silent_seconds >= SAMPLE_SECONDS and (sample := self._seams.process_sample(self._pid)) is not None:
            if self._first is not None and self._send(self._first, 0.0):
                self._first = None
            self._send(sample, self._silent_seconds)

    def _begin_silence(self) -> None:
        self._received_at, self._silent_seconds = self._seams.clock.now(), 0.0
        times = self._seams.process_times(self._pid)
        self._first = ProcessSample(Activity.RUNNABLE, times) if times is not None else None  # it has just run

    def _send(self, sample: ProcessSample, silent_seconds: float) -> bool:
        try:
            return self._send_nowait(as_message(LateProcess(sample, silent_seconds)))
        except TransportError:  # the end of the connection is noticed where it is relayed
            return False


class Sampling:
    """The relayed workers of a host server."""

    def __init__(self, seams: Seams) -> None:
        self._seams, self.workers = seams, dict[str, RelayedWorker]()  # by the name of the control connection

    async def run(self) -> None:
        """Look for late heartbeats until cancelled."""
        clock, time = self._seams.clock, ObserverTime()
        while True:
            await clock.sleep(TICK_SECONDS)
            now = clock.now()
            passed = time.tick(now)
            for worker in self.workers.values():
                worker.tick(now, passed)
