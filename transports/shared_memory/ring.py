"""One direction of a shared-memory channel: records, lanes and an area of payloads, written by one process, read by another.

Here: where things lie and what they mean. Not here: the two halves that use it (ring_writer.py, ring_reader.py, both synchronous,
without an event loop) and who sleeps and wakes (shared_memory.py). The protocol is XCCL's for a pair (xDeepServe section 3.1, figure
4), with its "metadata area" and "managed data area"; the "application area" is a window (shared_window.py).

    words    64-bit words, each written by one side only, each side's on cache lines of their own
    fields   one field of 32 bytes per lane and side: event id, chunk id, tail (and one word that lane 0 uses for giving up)
    records  a ring of bytes; a record is a 24-byte head and its body, padded to 32 bytes, never wrapped, at most half the
             ring, copied out at once; a SKIP reaches from where the writer is to the end of the ring and is published with the
             record after it
    slots    per lane a ring of SLOTS slots for the chunks of large payloads, copied out
    area     payloads above INLINE_BYTES, contiguous, handed out in order; the receiver's tensors alias it until they are gone

`HEAD` and `TAIL` count the bytes ever written and read in the record ring, so TAIL <= HEAD <= TAIL + its size. The writer stores HEAD
(release) after the bytes; the reader loads it (acquire) before it looks. `RELEASED` counts the area in the same way: everything before
it has been let go of; `HELD` is how many bytes are not. A payload goes, in this order of preference,

    INLINE   in the record, copied out once: up to INLINE_BYTES
    PLACED   in the area before its record, and not copied by the receiver: up to half of the area, if there is room and no more than
             half of it is held
    BULK     the same, of a size that is worth a copier of its own: the record comes at once, then each lane copies its stripe and
             writes the event id into its field when it is done
    CHUNKED  through the lanes' slots, chunk k in lane k modulo their number, each chunk announced in its lane's field and
             acknowledged in the reader's, so that one side drains while the other fills: what is larger, and what finds the area held
             by tensors the receiver keeps although it has read all records. So held tensors never block anybody.

The event id of a message is its sequence number plus one. Acknowledgements, credits (TAKEN_MESSAGES, TAKEN_BYTES; window.py has their
arithmetic) and flags are words of their own, so they never wait behind a payload. A sleeping side raises its flag and looks again; the
other stores its cursor and then looks at the flag, with a full fence between the two on both sides (_words.h).
"""

from __future__ import annotations

from typing import NamedTuple

from flowrt.transports.contract import MAX_LANES, Limits

PAGE_BYTES = 4096
INLINE_BYTES = 8192
LINE_BYTES = 64
HEAD, TAIL, TAKEN_MESSAGES, TAKEN_BYTES = 0, LINE_BYTES, LINE_BYTES + 8, LINE_BYTES + 16  # _records.c knows these too
RELEASED, HELD = 2 * LINE_BYTES, 2 * LINE_BYTES + 8
READER_SLEEPS, WRITER_SLEEPS, CLOSED = 3 * LINE_BYTES, 4 * LINE_BYTES, 5 * LINE_BYTES
FLAGS_SLEEP, NUDGES = 6 * LINE_BYTES, 7 * LINE_BYTES  # the reader sleeps for flags of windows; the writer has set one
FIELD_BYTES = 32
EVENT, CHUNK, LANE_TAIL, GIVEN_UP = 0, 8, 16, 24  # in a field
FIELDS = 8 * LINE_BYTES  # the writer's, in the reader's metadata area
ACKNOWLEDGED = FIELDS + MAX_LANES * FIELD_BYTES  # the reader's, in the writer's metadata area
WORDS_BYTES = ACKNOWLEDGED + MAX_LANES * FIELD_BYTES  # of one direction

SLOTS = 4  # of a lane: enough for one to be filled, one to be drained, and a late wake-up
RECORD_BYTES = 24  # the head of a record
RECORD_ALIGNMENT = 32
SKIP, INLINE, PLACED, BULK, CHUNKED = range(5)
_MAX_RECORDS_BYTES = 1 << 18
_MIN_SLOTS_BYTES = 1 << 17


class Layout(NamedTuple):
    """Sizes and offsets of both directions in one memory. Direction 0 is from the connector to the listener."""

    records_bytes: int
    slot_bytes: int
    lanes: int
    area_bytes: int

    @classmethod
    def of(cls, limits: Limits) -> Layout:
        """The layout both ends derive from the limits they agreed on. One direction takes `capacity_bytes`, and what little more its
        records and slots need when that is less than a MiB."""
        largest = RECORD_BYTES + RECORD_ALIGNMENT + limits.max_header_bytes + INLINE_BYTES
        records = _pages(max(2 * largest, min(limits.capacity_bytes // 8, _MAX_RECORDS_BYTES)))
        lanes = max(1, min(limits.lanes, MAX_LANES))
        slot = max(PAGE_BYTES, max(limits.capacity_bytes // 8, _MIN_SLOTS_BYTES) // lanes // SLOTS // PAGE_BYTES * PAGE_BYTES)
        rest = limits.capacity_bytes - records - lanes * SLOTS * slot
        area = max(rest, limits.capacity_bytes // 2) // PAGE_BYTES * PAGE_BYTES
        return cls(records, slot, lanes, area if area >= 8 * INLINE_BYTES else 0)

    @property
    def lane_bytes(self) -> int:
        """Of one lane's ring of slots."""
        return SLOTS * self.slot_bytes

    @property
    def direction_bytes(self) -> int:
        return self.records_bytes + self.lanes * self.lane_bytes + self.area_bytes

    @property
    def total_bytes(self) -> int:
        return PAGE_BYTES + 2 * self.direction_bytes

    def words(self, direction: int) -> int:
        return direction * WORDS_BYTES

    def records(self, direction: int) -> int:
        return PAGE_BYTES + direction * self.direction_bytes

    def slots(self, direction: int, lane: int = 0) -> int:
        return self.records(direction) + self.records_bytes + lane * self.lane_bytes

    def area(self, direction: int) -> int:
        return self.slots(direction, self.lanes)


def placement(sizes: list[int]) -> tuple[list[int], int]:
    """Where tensors of `sizes` bytes lie in one range of the area, each on a cache line of its own, and the bytes of the range."""
    offsets = []
    end = 0
    for size in sizes:
        offsets.append(end)
        end += (size + LINE_BYTES - 1) & -LINE_BYTES
    return offsets, end


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
