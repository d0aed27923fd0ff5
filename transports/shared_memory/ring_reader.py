"""The receiving half of one direction of a shared-memory channel.

Here: RingReader. Not here: the layout and its rules (ring.py), the bytes of a record (_records.c), waiting (shared_memory.py calls
this and sleeps when nothing is there).
"""

from __future__ import annotations

import mmap
import os
from typing import TYPE_CHECKING

from flowrt.transports.contract import ChannelStatistics, Limits
from flowrt.transports.shared_memory.ring import (
    ACKNOWLEDGED,
    BULK,
    CHUNK,
    CHUNKED,
    CLOSED,
    EVENT,
    FIELD_BYTES,
    FIELDS,
    GIVEN_UP,
    INLINE,
    LANE_TAIL,
    PLACED,
    READER_SLEEPS,
    WRITER_SLEEPS,
    Layout,
    pieces,
    placement,
)  # fmt: skip
from flowrt.transports.wire.codec import Envelope, WireError, assemble, decode_envelope, is_repeat
from flowrt.transports.wire.message import Message

if TYPE_CHECKING:
    from flowrt.transports.native._words import Ledger, Memory

MAX_REPEATS = 64  # in a row; this side's writer never repeats a message, and each one costs the event loop time
OWN_MAPPING_BYTES = 1 << 22  # from here on memory comes from the kernel, in huge pages, zeroed by it and not by us


class RingReader:
    """The receiving half. Everything in the memory was written by the peer and is believed only as far as it was checked."""

    def __init__(
        self, memory: Memory, ledger: Ledger, layout: Layout, direction: int, limits: Limits, counters: ChannelStatistics, wake_fd: int = -1
    ) -> None:
        from flowrt.transports.native._words import Records

        self._memory = memory
        self._ledger = ledger
        self._layout = layout
        self._words = words = layout.words(direction)
        records = Records(memory, words, layout.records(direction), layout.records_bytes, wake_fd)
        self._next, self._took, self._unread = records.next, records.took, records.unread
        view = memoryview(memory)
        self._slots = [view[layout.slots(direction, lane) :][: layout.lane_bytes] for lane in range(layout.lanes)]
        self._limits = limits
        self._counters = counters
        self._wake_fd = wake_fd
        self._expected = 0
        self._num_repeats = 0  # since the last message that was due
        self._lane_tails = [0] * layout.lanes  # bytes of slots ever emptied
        self._num_dropped = 0  # messages that the writer gave up
        self._arriving: _Arriving | None = None  # a message that the lanes bring

    def take(self) -> Message | None:
        """The next message that is here whole, else None. Raises WireError when what is here is not one."""
        while True:
            if self._arriving is not None:
                return self._take_arriving(self._arriving)
            try:
                record = self._next()
            except ValueError as error:
                raise WireError(str(error)) from error
            if record is None:
                return None
            kind, start, payload_bytes, part, payload = record
            envelope, sizes = decode_envelope(part, self._limits)
            if kind == INLINE:
                if len(sizes) == 1 and sizes[0] == payload_bytes and payload is not None:
                    message = self._deliver(envelope, [payload], payload_bytes)
                elif sum(sizes) == payload_bytes:
                    message = self._deliver(envelope, _cut(payload, sizes) if sizes else [], payload_bytes)
                else:
                    raise WireError(f"tensors of {sum(sizes)} bytes were announced, {payload_bytes} came")
            elif kind == PLACED:
                total = sum(sizes)
                if total != payload_bytes:
                    raise WireError(f"tensors of {total} bytes were announced, {payload_bytes} placed")
                message = self._deliver(envelope, self._placed(sizes, start), total)
            else:
                self._arrive(kind, start, envelope, sizes)
                continue
            if message is not None:
                return message

    def expect_message(self) -> bool:
        """The owner is about to sleep until something comes. True when something came already."""
        self._memory.raise_flag(self._words + READER_SLEEPS)
        return self.has_something()

    def flag_is_up(self) -> bool:
        """Whether the writer has yet to notice that we sleep; lowering the flag is its promise to wake us."""
        return self._memory.load(self._words + READER_SLEEPS) == 1

    def has_something(self) -> bool:
        """Whether `take` has something to do."""
        arriving = self._arriving
        if arriving is None:
            return self._unread()
        if arriving.buffers is None:
            return self._stripes_are_there(arriving)
        lane = arriving.number % self._layout.lanes
        return self._field(lane, LANE_TAIL) != self._lane_tails[lane] or self._field(0, GIVEN_UP) != self._num_dropped

    def peer_has_closed(self) -> bool:
        return self._memory.load(self._words + CLOSED) == 1

    def close(self) -> None:
        """Let go of the memory, but for what received tensors alias."""
        self._ledger.detach()
        for slots in self._slots:
            slots.release()
        self._arriving = None
        del self._memory, self._next, self._took, self._unread

    def _field(self, lane: int, word: int) -> int:
        return self._memory.load(self._words + FIELDS + lane * FIELD_BYTES + word)

    def _placed(self, sizes: list[int], start: int) -> list[object]:
        offsets, area_bytes = placement(sizes)
        try:
            view = memoryview(self._ledger.lease(start, area_bytes))
        except (ValueError, OverflowError) as error:
            raise WireError(str(error)) from error
        return [view[offset : offset + size] for offset, size in zip(offsets, sizes, strict=True)]

    def _arrive(self, kind: int, start: int, envelope: Envelope, sizes: list[int]) -> None:
        """A message that the lanes bring was announced."""
        if kind == CHUNKED and start != envelope.sequence + 1:
            raise WireError(f"event {start} was announced for message {envelope.sequence}")
        total = sum(sizes)
        if not total or kind not in (BULK, CHUNKED):
            raise WireError(f"a record of kind {kind} for {total} bytes")
        placed = self._placed(sizes, start) if kind == BULK else None
        self._arriving = _Arriving(envelope, sizes, total, placed, None if placed else [_allocate(size) for size in sizes])

    def _take_arriving(self, arriving: _Arriving) -> Message | None:
        if arriving.placed is not None:
            if not self._stripes_are_there(arriving):
                return None
            buffers = arriving.placed
        else:
            if not self._drain(arriving):
                return None
            buffers = list(arriving.buffers or ())
        self._arriving = None
        self._took(arriving.total)
        return self._deliver(arriving.envelope, buffers, arriving.total)

    def _stripes_are_there(self, arriving: _Arriving) -> bool:
        event = arriving.envelope.sequence + 1
        return all(self._field(lane, EVENT) >= event for lane in range(self._layout.lanes))

    def _drain(self, arriving: _Arriving) -> bool:
        """Copy the chunks that are here out of the lanes' slots, no more than all the slots hold: the loop must turn. True at the end."""
        layout, num_lanes, event = self._layout, self._layout.lanes, arriving.envelope.sequence + 1
        slot, ring = layout.slot_bytes, layout.lane_bytes
        given_up = self._field(0, GIVEN_UP) != self._num_dropped  # looked at before the tails, which move no more after it
        last = arriving.read + num_lanes * ring
        while arriving.read < min(last, arriving.total):
            lane = arriving.number % num_lanes
            tail, head = self._lane_tails[lane], self._field(lane, LANE_TAIL)
            if head == tail:
                if given_up:
                    self._drop(arriving)
                return False
            if not slot <= head - tail <= ring or self._field(lane, EVENT) < event:
                raise WireError(f"lane {lane} is at event {self._field(lane, EVENT)} and byte {head} when {event} and {tail} were due")
            end = min(arriving.read + slot, arriving.total)
            at = tail % ring
            assert arriving.buffers is not None
            for index, begin, nbytes in pieces(arriving.sizes, arriving.read, end):
                memoryview(arriving.buffers[index])[begin : begin + nbytes] = self._slots[lane][at : at + nbytes]  # type: ignore[arg-type]
                at += nbytes
            self._acknowledge(lane, event, arriving.number, tail + slot)
            arriving.read, arriving.number = end, arriving.number + 1
        return arriving.read == arriving.total

    def _acknowledge(self, lane: int, event: int, chunk: int, tail: int) -> None:
        self._lane_tails[lane] = tail
        words = self._words
        field = words + ACKNOWLEDGED + lane * FIELD_BYTES
        if self._memory.publish(field + LANE_TAIL, tail, words + WRITER_SLEEPS, field + EVENT, event, field + CHUNK, chunk):
            self._wake()

    def _drop(self, arriving: _Arriving) -> None:
        """The writer has given up the message that is arriving, and nothing of it is in any slot."""
        self._arriving = None
        self._num_dropped += 1
        self._took(arriving.total)

    def _deliver(self, envelope: Envelope, buffers: list[object], payload_bytes: int) -> Message | None:
        counters = self._counters
        if envelope.sequence != self._expected and is_repeat(envelope.sequence, self._expected):
            counters.messages_dropped += 1
            self._num_repeats += 1
            if self._num_repeats > MAX_REPEATS:
                raise WireError(f"more than {MAX_REPEATS} repeated messages in a row")
            return None
        self._expected += 1
        self._num_repeats = 0
        counters.messages_received += 1
        counters.bytes_received += payload_bytes
        return assemble(envelope, buffers)

    def _wake(self) -> None:
        if self._wake_fd >= 0:
            os.eventfd_write(self._wake_fd, 1)


class _Arriving:
    """A message on its way through the lanes: into `placed`, which aliases the area, or by chunks into `buffers`."""

    __slots__ = ("buffers", "envelope", "number", "placed", "read", "sizes", "total")

    def __init__(self, envelope: Envelope, sizes: list[int], total: int, placed: list[object] | None, buffers: list[object] | None) -> None:
        self.envelope = envelope
        self.sizes = sizes
        self.total = total
        self.placed = placed
        self.buffers = buffers
        self.read = 0
        self.number = 0  # of the next chunk


def _allocate(nbytes: int) -> object:
    """Memory for a tensor that comes in chunks."""
    if nbytes < OWN_MAPPING_BYTES:
        return bytearray(nbytes)
    mapping = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    mapping.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(mapping)


def _cut(payload: bytearray | None, sizes: list[int]) -> list[object]:
    """Each tensor's bytes as memory of its own, for alignment."""
    view = memoryview(payload or b"")
    buffers: list[object] = []
    start = 0
    for size in sizes:
        buffers.append(bytearray(view[start : start + size]))
        start += size
    return buffers
