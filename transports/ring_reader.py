"""The receiving half of one direction of a shared-memory channel.

Here: RingReader. Not here: the layout and its rules (ring.py), waiting (shared_memory.py calls this and sleeps when nothing is there).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from transports.codec import Envelope, WireError, assemble, decode_envelope, is_repeat
from transports.contract import ChannelStatistics, Limits
from transports.message import Message
from transports.ring import (
    ABANDON,
    BEGIN,
    CHUNK,
    CLOSED,
    HEAD,
    INLINE,
    PLACED,
    READER_SLEEPS,
    RECORD,
    RECORD_ALIGNMENT,
    SKIP,
    TAIL,
    TAKEN_BYTES,
    TAKEN_MESSAGES,
    WRITER_SLEEPS,
    Layout,
    placement,
)  # fmt: skip

if TYPE_CHECKING:
    from transports._words import Ledger, Memory


class RingReader:
    """The receiving half. Everything in the memory was written by the peer and is believed only as far as it was checked.

    `wake` is called when the writer sleeps and there is room again.
    """

    def __init__(
        self,
        memory: Memory,
        ledger: Ledger,
        layout: Layout,
        direction: int,
        limits: Limits,
        counters: ChannelStatistics,
        wake: Callable[[], None],
    ) -> None:
        self._memory = memory
        self._ledger = ledger
        self._words = layout.words(direction)
        self._records = memoryview(memory)[layout.records(direction) :][: layout.records_bytes]
        self._limits = limits
        self._counters = counters
        self._records_bytes = layout.records_bytes
        self._head = self._tail = 0
        self._taken_messages = self._taken_bytes = 0
        self._expected = 0
        self._envelope: Envelope | None = None  # of a message that comes in chunks
        self._buffers: list[bytearray] = []
        self._index = self._filled = 0  # where the next chunk goes
        self._wake = wake

    def take(self) -> Message | None:
        """The next message that is here whole, else None. Raises WireError when what is here is not one."""
        size = self._records_bytes
        last = self._tail + size  # of a message in chunks, no more than one ring at a time: the loop must turn
        while self._tail < last:
            if self._tail == self._head:
                head = self._memory.load(self._words + HEAD)
                if head == self._tail:
                    return None
                if not 0 < head - self._tail <= size:
                    raise WireError("the peer's cursors are impossible")
                self._head = head
            at = self._tail % size
            if self._head - self._tail < RECORD.size or at + RECORD.size > size:
                raise WireError("a record that is cut off")
            record_bytes, kind, envelope_bytes, payload_bytes, start = RECORD.unpack_from(self._records, at)
            if (
                record_bytes % RECORD_ALIGNMENT
                or RECORD.size + envelope_bytes + payload_bytes > record_bytes
                or record_bytes > min(self._head - self._tail, size - at)
            ):
                raise WireError(f"a record of {record_bytes} bytes that does not fit where it lies")
            begin = at + RECORD.size
            message = None
            if kind in (INLINE, PLACED):
                message = self._whole(kind, begin, envelope_bytes, payload_bytes, start)
            elif kind == CHUNK:
                message = self._chunk(self._records[begin : begin + envelope_bytes])
            elif kind == BEGIN:
                self._begin(bytes(self._records[begin : begin + envelope_bytes]))
            elif kind == ABANDON:
                self._drop()
            elif kind != SKIP or not record_bytes:
                raise WireError(f"a record of kind {kind}")
            self._tail += record_bytes
            words = self._words
            if self._memory.publish(
                words + TAIL,
                self._tail,
                words + WRITER_SLEEPS,
                words + TAKEN_MESSAGES,
                self._taken_messages,
                words + TAKEN_BYTES,
                self._taken_bytes,
            ):
                self._wake()
            if message is not None:
                self._counters.messages_received += 1
                return message
        return None

    def expect_message(self) -> bool:
        """The owner is about to sleep until something comes. True when something came already."""
        self._memory.raise_flag(self._words + READER_SLEEPS)
        return self.has_records()

    def flag_is_up(self) -> bool:
        """Whether the writer has yet to notice that we sleep; lowering the flag is its promise to wake us."""
        return self._memory.load(self._words + READER_SLEEPS) == 1

    def has_records(self) -> bool:
        return self._memory.load(self._words + HEAD) != self._tail

    def peer_has_closed(self) -> bool:
        return self._memory.load(self._words + CLOSED) == 1

    def close(self) -> None:
        """Let go of the memory, but for what received tensors alias."""
        self._ledger.detach()
        self._records.release()
        self._buffers = []
        del self._memory

    def _whole(self, kind: int, begin: int, envelope_bytes: int, payload_bytes: int, start: int) -> Message | None:
        records = self._records
        if self._envelope is not None:
            raise WireError("a message within a message")
        position = begin + envelope_bytes
        envelope, sizes = decode_envelope(bytes(records[begin:position]), self._limits)
        buffers: list[object] = []
        total_bytes = sum(sizes)
        if kind == PLACED:
            offsets, area_bytes = placement(sizes)
            try:
                view = memoryview(self._ledger.lease(start, area_bytes))
            except (ValueError, OverflowError) as error:
                raise WireError(str(error)) from error
            buffers = [view[offset : offset + size] for offset, size in zip(offsets, sizes, strict=True)]
        elif sizes:
            if total_bytes != payload_bytes:
                raise WireError(f"tensors of {total_bytes} bytes were announced, {payload_bytes} came")
            for size in sizes:
                end = position + size
                buffers.append(bytearray(records[position:end]))
                position = end
        return self._deliver(envelope, buffers, total_bytes)

    def _begin(self, part: bytes) -> None:
        if self._envelope is not None:
            raise WireError("a message within a message")
        self._envelope, sizes = decode_envelope(part, self._limits)
        self._buffers = [bytearray(size) for size in sizes]
        self._index = self._filled = 0

    def _chunk(self, piece: memoryview) -> Message | None:
        envelope = self._envelope
        while envelope is not None and self._index < len(self._buffers) and self._filled == len(self._buffers[self._index]):
            self._index, self._filled = self._index + 1, 0  # tensors of no bytes have no chunks
        if envelope is None or self._index >= len(self._buffers):
            raise WireError("a chunk of no message")
        buffer = self._buffers[self._index]
        end = self._filled + len(piece)
        if end > len(buffer) or not len(piece):
            raise WireError("a chunk beyond its tensor")
        buffer[self._filled : end] = piece
        self._filled = end
        if end < len(buffer) or any(len(later) for later in self._buffers[self._index + 1 :]):
            return None
        buffers = self._buffers
        self._envelope, self._buffers = None, []
        return self._deliver(envelope, buffers, sum(map(len, buffers)))

    def _drop(self) -> None:
        if self._envelope is None:
            raise WireError("a message was abandoned that never began")
        self._taken(sum(map(len, self._buffers)))
        self._envelope, self._buffers = None, []

    def _deliver(self, envelope: Envelope, buffers: list[object] | list[bytearray], payload_bytes: int) -> Message | None:
        self._taken(payload_bytes)
        if envelope.sequence != self._expected and is_repeat(envelope.sequence, self._expected):
            self._counters.messages_dropped += 1
            return None
        self._expected += 1
        self._counters.bytes_received += payload_bytes
        return assemble(envelope, buffers)

    def _taken(self, payload_bytes: int) -> None:
        self._taken_messages += 1
        self._taken_bytes += payload_bytes
