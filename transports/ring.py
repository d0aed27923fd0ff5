"""One direction of a shared-memory channel: a ring of records and an area of payloads, written by one process, read by another.

Here: where things lie and what they mean. Not here: the two halves that use it (ring_writer.py, ring_reader.py, both synchronous,
without descriptors or an event loop) and who sleeps and wakes (shared_memory.py).

    words    64-bit words, each written by one side only, each side's on cache lines of their own
    records  a ring of bytes; a record is a 24-byte head and its body, padded to 32 bytes, never wrapped, copied out at once
    area     payloads above INLINE_BYTES, contiguous, handed out in order; the receiver's tensors alias it until they are gone

`HEAD` and `TAIL` count the bytes ever written and read in the record ring, so TAIL <= HEAD <= TAIL + its size. The writer stores HEAD
(release) after the bytes; the reader loads it (acquire) before it looks. `RELEASED` counts the area in the same way: everything before
it has been let go of. A payload goes, in this order of preference,

    inline   in the record, copied out once: up to INLINE_BYTES
    placed   in the area, not copied by the receiver: up to a quarter of the area, if there is room
    chunked  through the record ring in pieces, copied out into memory of its own: what is larger, and what finds the area
             occupied by tensors the receiver still holds although it has read all records. So held tensors never block anybody.

The flow-control window (window.py) is in the words too: TAKEN_MESSAGES and TAKEN_BYTES. A sleeping side raises its flag and looks
again; the other stores its cursor and then looks at the flag, with a full fence between the two on both sides (_words.c).
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from transports.contract import Limits

PAGE_BYTES = 4096
INLINE_BYTES = 8192
LINE_BYTES = 64
WORDS_BYTES = 8 * LINE_BYTES  # of one direction
HEAD, TAIL, TAKEN_MESSAGES, TAKEN_BYTES = 0, LINE_BYTES, LINE_BYTES + 8, LINE_BYTES + 16
RELEASED, READER_SLEEPS, WRITER_SLEEPS, CLOSED = 2 * LINE_BYTES, 3 * LINE_BYTES, 4 * LINE_BYTES, 5 * LINE_BYTES

_MAX_RECORDS_BYTES = 1 << 19
RECORD_ALIGNMENT = 32
RECORD = struct.Struct("<IIIIQ")  # bytes of the whole record, kind, envelope bytes, payload bytes in the record, place in the area
SKIP, INLINE, PLACED, BEGIN, CHUNK, ABANDON = range(6)


class Layout(NamedTuple):
    """Sizes and offsets of both directions in one memory. Direction 0 is from the connector to the listener."""

    records_bytes: int
    area_bytes: int

    @classmethod
    def of(cls, limits: Limits) -> Layout:
        """The layout both ends derive from the limits they agreed on."""
        largest = padded(RECORD.size + limits.max_header_bytes + INLINE_BYTES)
        records = _pages(max(2 * largest, min(limits.capacity_bytes // 8, _MAX_RECORDS_BYTES)))
        area = _pages(limits.capacity_bytes) - records
        return cls(records, area if area >= 8 * INLINE_BYTES else 0)

    @property
    def total_bytes(self) -> int:
        return PAGE_BYTES + 2 * (self.records_bytes + self.area_bytes)

    def words(self, direction: int) -> int:
        return direction * WORDS_BYTES

    def records(self, direction: int) -> int:
        return PAGE_BYTES + direction * (self.records_bytes + self.area_bytes)

    def area(self, direction: int) -> int:
        return self.records(direction) + self.records_bytes


def placement(sizes: list[int]) -> tuple[list[int], int]:
    """Where tensors of `sizes` bytes lie in one range of the area, each on a cache line of its own, and the bytes of the range."""
    offsets = []
    end = 0
    for size in sizes:
        offsets.append(end)
        end += (size + LINE_BYTES - 1) & -LINE_BYTES
    return offsets, end


def padded(nbytes: int) -> int:
    return (nbytes + RECORD_ALIGNMENT - 1) & -RECORD_ALIGNMENT


def _pages(nbytes: int) -> int:
    return (nbytes + PAGE_BYTES - 1) & -PAGE_BYTES
