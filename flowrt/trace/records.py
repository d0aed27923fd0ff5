"""Records of a trace: what a worker computed, sent and received, and when. TraceRing is the ring that holds them in the worker.

All times are seconds of the clock that the processes of a host share (`Seams.machine_now`); in the simulation, virtual time. A WorkerTrace
has those of the launcher's host.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum

import msgspec

from flowrt.system.clock_offset import ClockOffset
from flowrt.transports.wire.message import Tag

MAX_KEPT = 1 << 16  # records that a worker keeps until the launcher collects them
MAX_PIECE = 1 << 12  # records of one message


class RecordKind(IntEnum):
    """CALL: one call of the compute seam; `name` is the node that it starts with. NODE: one node within the next CALL. SEND and RECEIVE:
    the handling of one message of the edge `name`. COMMIT: a token, at output position `part` of the request `name`."""

    CALL = 0
    NODE = 1
    SEND = 2
    RECEIVE = 3
    COMMIT = 4


class TraceRecord(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One record. A worker appends it as a plain tuple of these fields.

    `tags`: of the firings, or of the message. `part`: the part id of the message, if it has one. `num_rows` and `num_bytes`: of the inputs
    of the node, or of the message.
    """

    kind: RecordKind
    start_seconds: float
    end_seconds: float
    name: str
    tags: tuple[Tag, ...] = ()
    part: int | None = None
    num_rows: int = 0
    num_bytes: int = 0


RecordTuple = tuple[int, float, float, str, tuple[Tag, ...], int | None, int, int]


class TraceRing:
    """The newest records of one incarnation of a worker, oldest first. `now`: the clock of all records.

    `add` may be called in the compute thread, all else in the loop.
    """

    def __init__(self, now: Callable[[], float], max_kept: int | None = MAX_KEPT) -> None:
        self.now = now
        self.num_dropped = 0
        self._ring: deque[RecordTuple] = deque(maxlen=max_kept)

    def add(self, record: RecordTuple) -> None:
        ring = self._ring
        if len(ring) == ring.maxlen:
            self.num_dropped += 1
        ring.append(record)

    def take(self) -> Iterator[bytes]:
        """Remove all records. Yields them in pieces for `decode`, oldest first."""
        left = len(self._ring)
        while left:
            num = min(left, MAX_PIECE)
            yield msgspec.msgpack.encode([self._ring.popleft() for _ in range(num)])
            left -= num


@dataclass(frozen=True)
class WorkerTrace:
    """The records of one incarnation of a worker, in the order in which they were made.

    `num_dropped`: older records that are missing. `is_complete`: the last records are there; those of a killed process are not.
    `clock_error_seconds`: bounds what the times of the records are wrong by, since the clock of `host` is known so exactly.
    """

    worker: str
    incarnation: str
    records: Sequence[TraceRecord]
    num_dropped: int = 0
    is_complete: bool = True
    host: str = ""
    clock_error_seconds: float = 0.0


def align(records: Sequence[TraceRecord], offset: ClockOffset) -> tuple[list[TraceRecord], float]:
    """The records of a host, whose clock has this offset from the launcher's, in times of the launcher's clock; and the bound of their
    error. The records stay as they are while the offset is not known: then the bound is infinite."""
    if not records or not offset.seconds:
        shifted = list(records)
    else:
        shifted = [
            msgspec.structs.replace(each, start_seconds=each.start_seconds - offset.seconds, end_seconds=each.end_seconds - offset.seconds)
            for each in records
        ]
    ends = [shifted[0].start_seconds, shifted[-1].end_seconds] if shifted else [offset.at_seconds]
    return shifted, max(map(offset.error_at, ends))


NO_RECORDS = msgspec.msgpack.encode([])


def decode(piece: bytes) -> list[TraceRecord]:
    return _DECODER.decode(piece)


_DECODER = msgspec.msgpack.Decoder(list[TraceRecord])
