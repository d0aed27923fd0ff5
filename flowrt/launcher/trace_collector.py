"""Collects the records of a traced run: requests them from every worker while the run goes on, and keeps the newest until its end.

A process that is killed loses what it has recorded since the latest request.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Mapping
from contextlib import suppress

import msgspec

from flowrt.actors.control import TraceRecords, TraceRequest
from flowrt.actors.outputs import TokenEvent
from flowrt.graph.model import GATEWAY, MONITOR
from flowrt.launcher.control_connection import ControlConnection
from flowrt.system.clock_offset import SAME_CLOCK, ClockOffset
from flowrt.trace.records import RecordKind, TraceRecord, TraceRing, WorkerTrace, align, decode
from flowrt.transports.contract import Identity

COLLECT_SECONDS = 0.25
MAX_COLLECTED_BYTES = 1 << 26  # of a whole run; about half a million records


class TraceCollector:
    """`begin` when the run is up, `add` for each TraceRecords, `end` before the run stops; then `traces`.

    `now`: Seams.machine_now. `file`: where the owner of the run writes the trace at its end. The gateway's own records are the tokens of
    `add_token`.
    """

    def __init__(self, now: Callable[[], float], file: str = "", max_bytes: int = MAX_COLLECTED_BYTES) -> None:
        self.file = file
        self._commits = TraceRing(now)
        self._max_bytes, self._num_bytes = max_bytes, 0
        self._pieces: deque[tuple[Identity, bytes]] = deque()
        self._latest: dict[Identity, TraceRecords] = {}  # message of each incarnation
        self._clocks: dict[Identity, tuple[str, ClockOffset]] = {}  # the host of each incarnation, and what is known of its clock
        self._num_dropped = Counter[Identity]()  # here
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, workers: Mapping[str, ControlConnection]) -> None:
        """Request the records of these workers every COLLECT_SECONDS until `end`."""
        for name, connection in workers.items():
            if name != MONITOR:
                connection.send_if_room(TraceRequest())
        self._take_commits()
        self._timer = asyncio.get_running_loop().call_later(COLLECT_SECONDS, self.begin, workers)

    def end(self) -> None:
        """Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def add(self, worker: str, message: TraceRecords, host: str = "", clock: ClockOffset = SAME_CLOCK) -> None:
        """Keep the records of a worker on `host`, whose machine clock has the offset `clock`."""
        identity = Identity(worker, message.incarnation)
        self._latest[identity], self._clocks[identity] = message, (host, clock)
        self._pieces.append((identity, message.piece))
        self._num_bytes += len(message.piece)
        while self._num_bytes > self._max_bytes:
            oldest, piece = self._pieces.popleft()
            self._num_bytes -= len(piece)
            self._num_dropped[oldest] += len(_decode(piece))

    def add_token(self, event: TokenEvent) -> None:
        now = self._commits.now()
        self._commits.add((RecordKind.COMMIT, now, now, f"request {event.request}", (), event.index, 0, 0))

    def traces(self) -> list[WorkerTrace]:
        """The traces of all incarnations, in the order in which their first records came."""
        self._take_commits()
        records: dict[Identity, list[TraceRecord]] = {identity: [] for identity in self._latest}
        for identity, piece in self._pieces:
            records[identity] += _decode(piece)
        return [self._trace_of(each, message, records[each]) for each, message in self._latest.items()]

    def _trace_of(self, identity: Identity, latest: TraceRecords, records: list[TraceRecord]) -> WorkerTrace:
        host, clock = self._clocks[identity]
        aligned, error_seconds = align(records, clock)
        num_dropped = latest.num_dropped + self._num_dropped[identity]
        return WorkerTrace(identity.name, identity.incarnation, aligned, num_dropped, latest.is_last, host, error_seconds)

    def _take_commits(self) -> None:
        for piece in self._commits.take():
            self.add(GATEWAY, TraceRecords("", piece, self._commits.num_dropped, is_last=True))


def _decode(piece: bytes) -> list[TraceRecord]:
    """The records of a piece; none of one that is not a piece."""
    with suppress(msgspec.DecodeError):
        return decode(piece)
    return []
