"""The receiving half of one direction of a shared-memory channel."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flowrt.transports.channel.blocks import Block, BlockPool, block_bytes, placement
from flowrt.transports.contract import ChannelStatistics, Limits
from flowrt.transports.shared_memory import ring
from flowrt.transports.shared_memory.ring import Layout, pieces
from flowrt.transports.wire.codec import Envelope, WireError, assemble, decode_envelope, is_repeat, learn, split_buffers
from flowrt.transports.wire.message import Message, Tag, Tensor

if TYPE_CHECKING:
    from flowrt.transports.native._words import Leases, Memory

MAX_REPEATS = 64  # in a row; this side's writer never repeats a message, and each one costs the event loop time
MIN_BLOCK_BYTES = 1 << 22  # from this size on, memory is worth keeping for the next message


class RingReader:
    """The receiving half. The peer wrote everything in the memory, so every value is copied and checked before use."""

    def __init__(
        self, memory: Memory, leases: Leases, layout: Layout, direction: int, limits: Limits, counters: ChannelStatistics, wake_fd: int = -1
    ) -> None:
        from flowrt.transports.native._words import KnownEnvelopes, Records

        self._memory = memory
        self._leases = leases
        self._layout = layout
        self._words = words = layout.words(direction)
        records = Records(memory, words, layout.records(direction), layout.records_bytes, wake_fd)
        self._next_message, self._took, self._unread = records.next_message, records.took, records.unread
        self._known = KnownEnvelopes(Message, Tag, Tensor)
        view = memoryview(memory)
        self._slots = [view[layout.slots(direction, thread) :][: layout.slots_bytes] for thread in range(layout.copy_threads)]
        self._limits = limits
        self._counters = counters
        self._wake_fd = wake_fd
        self._expected = 0
        self._num_repeats = 0  # since the last message that was due
        self._slot_tails = [0] * layout.copy_threads  # bytes of slots ever emptied
        self._num_dropped = 0  # messages that the writer abandoned
        self._arriving: _Arriving | None = None  # a message that copy threads transfer
        self._blocks = BlockPool(block_bytes(limits.max_message_bytes))

    def take(self) -> Message | None:
        """The next complete message, or None. Raises WireError for anything else."""
        while True:
            if self._arriving is not None:
                return self._take_arriving(self._arriving)
            try:
                record = self._next_message(self._known, self._expected)
            except ValueError as error:
                raise WireError(str(error)) from error
            if record is None:
                return None
            if not isinstance(record, tuple):
                self._count(record.tensors[0].spec.nbytes if record.tensors else 0)
                return record
            kind, start, payload_bytes, part, payload = record
            envelope, sizes = decode_envelope(part, self._limits)
            if kind == ring.INLINE:
                if len(sizes) == 1 and sizes[0] == payload_bytes and payload is not None:
                    message = self._deliver(envelope, [payload], payload_bytes)
                elif sum(sizes) == payload_bytes:
                    message = self._deliver(envelope, split_buffers(memoryview(payload or b""), 0, sizes) if sizes else [], payload_bytes)
                else:
                    raise WireError(f"tensors of {sum(sizes)} bytes were announced, {payload_bytes} arrived")
            elif kind == ring.PLACED:
                total = sum(sizes)
                if total != payload_bytes:
                    raise WireError(f"tensors of {total} bytes were announced, {payload_bytes} placed")
                message = self._deliver(envelope, self._placed(sizes, start), total)
            else:
                self._arrive(kind, start, envelope, sizes)
                continue
            if message is not None:
                if kind == ring.INLINE and not self._known.is_full:
                    learn(self._known, message, envelope.header, part, envelope.sequence, payload_bytes)
                return message

    def expect_message(self) -> bool:
        """Sets the sleep flag of this side. True when a message arrived already."""
        self._memory.raise_flag(self._words + ring.READER_SLEEPS)
        return self.has_message()

    def flag_is_up(self) -> bool:
        """Whether the writer has not yet cleared the sleep flag; it clears the flag when it wakes this side."""
        return self._memory.load(self._words + ring.READER_SLEEPS) == 1

    def has_message(self) -> bool:
        """Whether `take` can make progress."""
        arriving = self._arriving
        if arriving is None:
            return self._unread()
        if arriving.is_placed:
            return self._has_all_stripes(arriving)
        thread = arriving.number % self._layout.copy_threads
        return self._field(thread, ring.CHUNK_TAIL) != self._slot_tails[thread] or self._field(0, ring.ABANDONED) != self._num_dropped

    def peer_has_closed(self) -> bool:
        return self._memory.load(self._words + ring.CLOSED) == 1

    def close(self) -> None:
        """Releases the memory, except what received tensors alias."""
        self._leases.detach()
        for slots in self._slots:
            slots.release()
        self._arriving = None
        self._blocks.close()
        del self._memory, self._next_message, self._took, self._unread

    def _field(self, thread: int, word: int) -> int:
        return self._memory.load(self._words + ring.FIELDS + thread * ring.FIELD_BYTES + word)

    def _placed(self, sizes: list[int], start: int) -> list[object]:
        offsets, area_bytes = placement(sizes)
        try:
            view = memoryview(self._leases.lease(start, area_bytes))
        except (ValueError, OverflowError) as error:
            raise WireError(str(error)) from error
        return [view[offset : offset + size] for offset, size in zip(offsets, sizes, strict=True)]

    def _arrive(self, kind: int, start: int, envelope: Envelope, sizes: list[int]) -> None:
        """A record announced a message that copy threads transfer."""
        event = envelope.sequence + self._num_dropped + 1
        if kind == ring.CHUNKED and start != event:
            raise WireError(f"event {start} was announced for message {envelope.sequence}")
        total = sum(sizes)
        if not total or kind not in (ring.BULK, ring.CHUNKED):
            raise WireError(f"a record of kind {kind} for {total} bytes")
        block = None
        offsets, nbytes = placement(sizes)
        if kind == ring.BULK:
            buffers = self._placed(sizes, start)
        elif nbytes < MIN_BLOCK_BYTES:
            buffers = [bytearray(size) for size in sizes]
        else:
            block = self._blocks.take(nbytes)
            lease = self._blocks.lease(block)
            buffers = [lease[offset : offset + size] for offset, size in zip(offsets, sizes, strict=True)]
        self._arriving = _Arriving(envelope, event, sizes, total, buffers, kind == ring.BULK, block)

    def _take_arriving(self, arriving: _Arriving) -> Message | None:
        if not (self._has_all_stripes(arriving) if arriving.is_placed else self._drain(arriving)):
            return None
        self._arriving = None
        self._took(arriving.total)
        return self._deliver(arriving.envelope, arriving.buffers, arriving.total, not arriving.is_placed)

    def _has_all_stripes(self, arriving: _Arriving) -> bool:
        return all(self._field(thread, ring.EVENT) >= arriving.event for thread in range(self._layout.copy_threads))

    def _drain(self, arriving: _Arriving) -> bool:
        """Copies chunks out of the slots, at most as many as all slots hold, to bound the time in the event loop. True at the end."""
        layout, num_copy_threads, event = self._layout, self._layout.copy_threads, arriving.event
        slot, slots = layout.slot_bytes, layout.slots_bytes
        abandoned = self._field(0, ring.ABANDONED) != self._num_dropped  # read before the tails, which do not change after it
        last = min(arriving.read + num_copy_threads * slots, arriving.total)
        if arriving.block is not None:
            arriving.block.populate(last)
        while arriving.read < last:
            thread = arriving.number % num_copy_threads
            tail, head = self._slot_tails[thread], self._field(thread, ring.CHUNK_TAIL)
            if head == tail:
                if abandoned:
                    self._drop(arriving)
                return False
            if not slot <= head - tail <= slots or self._field(thread, ring.EVENT) < event:
                found = f"event {self._field(thread, ring.EVENT)} and byte {head}"
                raise WireError(f"copy thread {thread} is at {found}, expected {event} and {tail}")
            end = min(arriving.read + slot, arriving.total)
            at = tail % slots
            for index, begin, nbytes in pieces(arriving.sizes, arriving.read, end):
                memoryview(arriving.buffers[index])[begin : begin + nbytes] = self._slots[thread][at : at + nbytes]  # type: ignore[arg-type]
                at += nbytes
            self._acknowledge(thread, event, arriving.number, tail + slot)
            arriving.read, arriving.number = end, arriving.number + 1
        return arriving.read == arriving.total

    def _acknowledge(self, thread: int, event: int, chunk: int, tail: int) -> None:
        self._slot_tails[thread] = tail
        words = self._words
        field = words + ring.ACKNOWLEDGED + thread * ring.FIELD_BYTES
        if self._memory.publish(
            field + ring.CHUNK_TAIL, tail, words + ring.WRITER_SLEEPS, field + ring.EVENT, event, field + ring.CHUNK, chunk
        ):
            self._wake()

    def _drop(self, arriving: _Arriving) -> None:
        """The writer abandoned the arriving message, and its last chunk has been copied out."""
        self._arriving = None
        self._num_dropped += 1
        self._took(arriving.total)

    def _deliver(self, envelope: Envelope, buffers: list[object], payload_bytes: int, is_private: bool = False) -> Message | None:
        counters = self._counters
        if envelope.sequence != self._expected and is_repeat(envelope.sequence, self._expected):
            counters.messages_dropped += 1
            self._num_repeats += 1
            if self._num_repeats > MAX_REPEATS:
                raise WireError(f"more than {MAX_REPEATS} repeated messages in a row")
            return None
        self._count(payload_bytes)
        return assemble(envelope, buffers, is_private)

    def _count(self, payload_bytes: int) -> None:
        self._expected += 1
        self._num_repeats = 0
        counters = self._counters
        counters.messages_received += 1
        counters.bytes_received += payload_bytes

    def _wake(self) -> None:
        if self._wake_fd >= 0:
            os.eventfd_write(self._wake_fd, 1)


@dataclass(slots=True)
class _Arriving:
    """A message that copy threads transfer: in place, into `buffers` that alias the area, or by chunks into `buffers` of its own."""

    envelope: Envelope
    event: int
    sizes: list[int]
    total: int
    buffers: list[object]
    is_placed: bool
    block: Block | None = None  # the memory of `buffers`, when it is worth reusing
    read: int = 0
    number: int = 0  # of the next chunk
