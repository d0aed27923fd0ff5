"""The memory layout of one direction of a shared-memory channel, written by one process and read by another.

The protocol is XCCL's for a pair (xDeepServe section 3.1, figure 4), with its "metadata area" and "managed data area".

    words    64-bit words, each written by one side only, each side's on cache lines of their own
    fields   one field of 32 bytes per copy thread and side: event id, chunk id, tail (and one word of the first for abandoned messages)
    records  a ring of bytes; a record is a 24-byte head and its body, padded to 32 bytes, never wrapped, at most half the ring, copied
             out at once; a SKIP reaches from the writer's position to the end of the ring and is published with the record after it
    slots    per copy thread a ring of SLOTS slots for the chunks of large payloads, copied out
    area     payloads above INLINE_BYTES, contiguous, used in order; the receiver's tensors alias it until they are freed

`HEAD` and `TAIL` count the bytes ever written and read in the record ring, so TAIL <= HEAD <= TAIL + its size. The writer stores HEAD
(release) after the bytes; the reader loads it (acquire) before it reads them. `RELEASED` counts the area in the same way: everything
before it is free; `HELD` is the number of bytes that are not. A payload takes the first possible path:

    INLINE   in the record, copied out once: up to INLINE_BYTES
    PLACED   in the area before its record, not copied by the receiver: up to half of the area, if there is room and no more than half of
             it is held
    BULK     the same, of a size that is worth a copy thread: the record is sent at once, then each copy thread copies its stripe and
             writes the event id into its field when it is done
    CHUNKED  through the slots, chunk k by copy thread k modulo their number. Each chunk is announced in the thread's field and acknowledged
             in the reader's, so one side drains while the other fills. This path takes what is larger, and what finds the area held by
             tensors that the receiver keeps although it has read all records; so held tensors never block a sender.

The event id of a message counts the messages up to it, abandoned ones too. Acknowledgements, credits (TAKEN_MESSAGES, TAKEN_BYTES; see
flow_control.py) and flags are words of their own, so they never wait behind a payload. A sleeping side sets its flag and checks again; the
other side stores its cursor and then reads the flag, with a full fence between the two on both sides (_words.h).
"""

from __future__ import annotations

from typing import NamedTuple

from flowrt.transports.contract import MAX_COPY_THREADS, Limits

PAGE_BYTES = 4096
INLINE_BYTES = 8192
LINE_BYTES = 64
HEAD, TAIL, TAKEN_MESSAGES, TAKEN_BYTES = 0, LINE_BYTES, LINE_BYTES + 8, LINE_BYTES + 16  # also in _records.c
RELEASED, HELD = 2 * LINE_BYTES, 2 * LINE_BYTES + 8
READER_SLEEPS, WRITER_SLEEPS, CLOSED = 3 * LINE_BYTES, 4 * LINE_BYTES, 5 * LINE_BYTES
FIELD_BYTES = 32
EVENT, CHUNK, CHUNK_TAIL, ABANDONED = 0, 8, 16, 24  # in a field
FIELDS = 6 * LINE_BYTES  # the writer's, in the reader's metadata area
ACKNOWLEDGED = FIELDS + MAX_COPY_THREADS * FIELD_BYTES  # the reader's, in the writer's metadata area
WORDS_BYTES = ACKNOWLEDGED + MAX_COPY_THREADS * FIELD_BYTES  # bytes of one direction

SLOTS = 4  # of a copy thread: one being filled, one being drained, and a late wake-up
RECORD_BYTES = 24  # the head of a record
RECORD_ALIGNMENT = 32
SKIP, INLINE, PLACED, BULK, CHUNKED = range(5)
_MAX_RECORDS_BYTES = 1 << 18
_MIN_SLOTS_BYTES = 1 << 17


class Layout(NamedTuple):
    """Sizes and offsets of both directions in one memory. Direction 0 is from the connector to the listener."""

    records_bytes: int
    slot_bytes: int
    copy_threads: int
    area_bytes: int

    @classmethod
    def of(cls, limits: Limits) -> Layout:
        """The layout that both ends derive from the agreed limits. One direction takes `capacity_bytes`, and a little more for records and
        slots when that is less than a MiB."""
        largest = RECORD_BYTES + RECORD_ALIGNMENT + limits.max_header_bytes + INLINE_BYTES
        records = _pages(max(2 * largest, min(limits.capacity_bytes // 8, _MAX_RECORDS_BYTES)))
        copy_threads = max(1, min(limits.copy_threads, MAX_COPY_THREADS))
        slot = max(PAGE_BYTES, max(limits.capacity_bytes // 8, _MIN_SLOTS_BYTES) // copy_threads // SLOTS // PAGE_BYTES * PAGE_BYTES)
        rest = limits.capacity_bytes - records - copy_threads * SLOTS * slot
        area = max(rest, limits.capacity_bytes // 2) // PAGE_BYTES * PAGE_BYTES
        return cls(records, slot, copy_threads, area if area >= 8 * INLINE_BYTES else 0)

    @property
    def slots_bytes(self) -> int:
        """The slots of one copy thread."""
        return SLOTS * self.slot_bytes

    @property
    def direction_bytes(self) -> int:
        return self.records_bytes + self.copy_threads * self.slots_bytes + self.area_bytes

    @property
    def total_bytes(self) -> int:
        return PAGE_BYTES + 2 * self.direction_bytes

    def words(self, direction: int) -> int:
        return direction * WORDS_BYTES

    def records(self, direction: int) -> int:
        return PAGE_BYTES + direction * self.direction_bytes

    def slots(self, direction: int, thread: int = 0) -> int:
        return self.records(direction) + self.records_bytes + thread * self.slots_bytes

    def area(self, direction: int) -> int:
        return self.slots(direction, self.copy_threads)


def pieces(sizes: list[int], begin: int, end: int) -> list[tuple[int, int, int]]:
    """Bytes [begin, end) of tensors of `sizes` bytes laid end to end: (tensor, offset in it, bytes) of each part of one tensor."""
    found = []
    start = 0
    for index, size in enumerate(sizes):
        first, last = max(begin, start), min(end, start + size)
        if first < last:
            found.append((index, first - start, last - first))
        start += size
    return found


def _pages(nbytes: int) -> int:
    return (nbytes + PAGE_BYTES - 1) & -PAGE_BYTES
