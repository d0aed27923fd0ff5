"""One direction of a shared-memory channel: a ring of records and an area of payloads, written by one process, read by another.

Here: where things lie, `RingWriter`, `RingReader`. Synchronous; no descriptor, no event loop: shared_memory.py sleeps and wakes.

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
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from transports.codec import Envelope, Part, WireError, assemble, decode_envelope, encode, is_repeat
from transports.contract import ChannelStatistics, Limits
from transports.message import Message
from transports.window import SendWindow

if TYPE_CHECKING:
    from transports._words import Ledger, Memory

PAGE_BYTES = 4096
INLINE_BYTES = 8192
LINE_BYTES = 64
WORDS_BYTES = 8 * LINE_BYTES  # of one direction
HEAD, TAIL, TAKEN_MESSAGES, TAKEN_BYTES = 0, LINE_BYTES, LINE_BYTES + 8, LINE_BYTES + 16
RELEASED, READER_SLEEPS, WRITER_SLEEPS, CLOSED = 2 * LINE_BYTES, 3 * LINE_BYTES, 4 * LINE_BYTES, 5 * LINE_BYTES

_MAX_RECORDS_BYTES = 1 << 19
_ALIGNMENT = 32
_RECORD = struct.Struct("<IIIIQ")  # bytes of the whole record, kind, envelope bytes, payload bytes in the record, place in the area
_SKIP, _INLINE, _PLACED, _BEGIN, _CHUNK, _ABANDON = range(6)


class Layout(NamedTuple):
    """Sizes and offsets of both directions in one memory. Direction 0 is from the connector to the listener."""

    records_bytes: int
    area_bytes: int

    @classmethod
    def of(cls, limits: Limits) -> Layout:
        """The layout both ends derive from the limits they agreed on."""
        largest = _padded(_RECORD.size + limits.max_header_bytes + INLINE_BYTES)
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


class RingWriter:
    """The sending half. `wake` is called when the reader sleeps and there is something for it."""

    def __init__(
        self, memory: Memory, layout: Layout, direction: int, limits: Limits, counters: ChannelStatistics, wake: Callable[[], None]
    ) -> None:
        self._memory = memory
        self._words = layout.words(direction)
        view = memoryview(memory)
        self._records = view[layout.records(direction) :][: layout.records_bytes]
        self._area = view[layout.area(direction) :][: layout.area_bytes]
        self._limits = limits
        self._counters = counters
        self._window = SendWindow(limits)
        self._records_bytes = layout.records_bytes
        self._area_bytes = layout.area_bytes
        self._head = self._tail = 0
        self._placed = self._released = 0  # in the area
        self._sequence = 0
        self._chunks: _Chunks | None = None
        self._abandoned = False
        self._wake = wake

    def send(self, message: Message) -> bool:
        """Send `message` in one go, or return False with nothing done. Raises LimitError, InvalidMessageError."""
        parts = encode(message, self._sequence, self._limits)
        payload_bytes = sum(map(len, parts)) - len(parts[0]) if len(parts) > 1 else 0
        return self._send(parts, payload_bytes) or (self._refresh() and self._send(parts, payload_bytes))

    def advance(self, message: Message) -> bool:
        """As `send`, but a message that cannot go in one piece goes in chunks, over as many calls as it takes.

        Once it has begun, call it with the same message until True, or call `abandon`.
        """
        if self._chunks is None:
            if self.send(message):
                return True
            if not self._begin(message):
                return False
        return self._send_chunks() or (self._refresh() and self._send_chunks())

    def abandon(self) -> None:
        """Give up a message that `advance` has begun; the reader is told and drops what it has of it."""
        if self._chunks is not None:
            self._chunks = None
            self._abandoned = True
            self._flush_abandoned()

    def close(self) -> None:
        """Say that nothing more will come. Then let go of the memory."""
        self._memory.store(self._words + CLOSED, 1)
        self._chunks = None
        self._records.release()
        self._area.release()
        del self._memory

    def expect_room(self) -> bool:
        """The owner is about to sleep until there is more room. True when there is more already."""
        self._memory.raise_flag(self._words + WRITER_SLEEPS)
        return self.has_more_room()

    def has_more_room(self) -> bool:
        """Whether the reader has moved since the last attempt to send."""
        return self._memory.load(self._words + TAIL) != self._tail or self._memory.load(self._words + RELEASED) != self._released

    def _refresh(self) -> bool:
        """Read the reader's words. True when it has moved."""
        if not self.has_more_room():
            return False
        load, words = self._memory.load, self._words
        tail, released = load(words + TAIL), load(words + RELEASED)
        self._window.update(load(words + TAKEN_MESSAGES), load(words + TAKEN_BYTES))
        if not self._tail <= tail <= self._head or not self._released <= released <= self._placed:
            raise WireError("the peer's cursors are impossible")
        self._tail, self._released = tail, released
        return True

    def _send(self, parts: list[Part], payload_bytes: int) -> bool:
        if self._chunks is not None or not self._window.fits(payload_bytes) or (self._abandoned and not self._flush_abandoned()):
            return False
        envelope = parts[0]
        if payload_bytes <= INLINE_BYTES:
            at = self._reserve(_RECORD.size + len(envelope) + payload_bytes)
            if at < 0:
                return False
            position = self._put(at, _INLINE, envelope, payload_bytes, 0)
            if payload_bytes:
                records = self._records
                for part in parts[1:]:
                    end = position + len(part)
                    records[position:end] = part
                    position = end
        else:
            offsets, area_bytes = placement(list(map(len, parts[1:])))
            start = self._place(area_bytes)
            at = self._reserve(_RECORD.size + len(envelope)) if start >= 0 else -1
            if at < 0:
                return False
            base = start % self._area_bytes
            for offset, part in zip(offsets, parts[1:], strict=True):
                self._area[base + offset : base + offset + len(part)] = part
            self._placed = start + area_bytes
            self._put(at, _PLACED, envelope, 0, start)
        self._sequence += 1
        window, counters = self._window, self._counters
        window.sent_messages += 1
        window.sent_bytes += payload_bytes
        counters.messages_sent += 1
        counters.bytes_sent += payload_bytes
        if self._memory.publish(self._words + HEAD, self._head, self._words + READER_SLEEPS):
            self._wake()
        return True

    def _place(self, nbytes: int) -> int:
        """Where `nbytes` may go in the area, as a count of all its bytes ever used; -1 when nowhere (now)."""
        size = self._area_bytes
        if 4 * nbytes > size:
            return -1
        start = self._placed
        if self._released == start and start % size:
            # All of it is free: begin anew at its start, whose pages and cache lines are warm.
            return start + size - start % size
        if start % size + nbytes > size:
            start += size - start % size
        return start if start + nbytes - self._released <= size else -1

    def _reserve(self, nbytes: int) -> int:
        """The offset of a record of `nbytes` in the ring, with HEAD moved beyond it (not yet published); -1 when there is no room."""
        nbytes = _padded(nbytes)
        size = self._records_bytes
        at = self._head % size
        skipped = size - at if at + nbytes > size else 0
        if self._head + skipped + nbytes - self._tail > size:
            return -1
        if skipped:
            _RECORD.pack_into(self._records, at, skipped, _SKIP, 0, 0, 0)
            at = 0
        self._head += skipped + nbytes
        return at

    def _put(self, at: int, kind: int, envelope: Part, payload_bytes: int, start: int) -> int:
        """Write a record's head and envelope; returns where its payload goes."""
        begin = at + _RECORD.size
        end = begin + len(envelope)
        _RECORD.pack_into(self._records, at, _padded(end + payload_bytes - at), kind, len(envelope), payload_bytes, start)
        self._records[begin:end] = envelope
        return end

    def _publish(self) -> None:
        if self._memory.publish(self._words + HEAD, self._head, self._words + READER_SLEEPS):
            self._wake()

    def _begin(self, message: Message) -> bool:
        """Begin to send `message` in chunks, if that is how it must go and there is room to begin."""
        parts = encode(message, self._sequence, self._limits)
        payload_bytes = sum(map(len, parts)) - len(parts[0])
        if payload_bytes <= INLINE_BYTES or not self._window.fits(payload_bytes) or (self._abandoned and not self._flush_abandoned()):
            return False
        _, area_bytes = placement(list(map(len, parts[1:])))
        if 4 * area_bytes <= self._area_bytes and self._tail != self._head:
            return False  # the area may have room once the reader has read what is on the way
        at = self._reserve(_RECORD.size + len(parts[0]))
        if at < 0:
            return False
        self._put(at, _BEGIN, parts[0], 0, 0)
        self._chunks = _Chunks([memoryview(part) for part in parts[1:] if len(part)])
        self._publish()
        self._window.add(payload_bytes)
        return True

    def _send_chunks(self) -> bool:
        chunks = self._chunks
        assert chunks is not None
        while chunks.parts:
            piece = chunks.parts[0][chunks.offset :][: self._records_bytes // 4 - _RECORD.size]
            at = self._reserve(_RECORD.size + len(piece))
            if at < 0:
                return False
            self._put(at, _CHUNK, piece, 0, 0)
            self._publish()
            chunks.advance(len(piece))
        self._chunks = None
        self._sequence += 1
        self._counters.messages_sent += 1
        self._counters.bytes_sent += chunks.total_bytes
        return True

    def _flush_abandoned(self) -> bool:
        at = self._reserve(_RECORD.size)
        if at < 0:
            return False
        self._put(at, _ABANDON, b"", 0, 0)
        self._abandoned = False
        self._publish()
        return True


class _Chunks:
    """What is left to send of a message that goes in chunks."""

    def __init__(self, parts: list[memoryview]) -> None:
        self.parts = parts
        self.offset = 0
        self.total_bytes = sum(map(len, parts))

    def advance(self, nbytes: int) -> None:
        self.offset += nbytes
        if self.offset == len(self.parts[0]):
            del self.parts[0]
            self.offset = 0


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
            if self._head - self._tail < _RECORD.size or at + _RECORD.size > size:
                raise WireError("a record that is cut off")
            record_bytes, kind, envelope_bytes, payload_bytes, start = _RECORD.unpack_from(self._records, at)
            if (
                record_bytes % _ALIGNMENT
                or _RECORD.size + envelope_bytes + payload_bytes > record_bytes
                or record_bytes > min(self._head - self._tail, size - at)
            ):
                raise WireError(f"a record of {record_bytes} bytes that does not fit where it lies")
            begin = at + _RECORD.size
            message = None
            if kind in (_INLINE, _PLACED):
                message = self._whole(kind, begin, envelope_bytes, payload_bytes, start)
            elif kind == _CHUNK:
                message = self._chunk(self._records[begin : begin + envelope_bytes])
            elif kind == _BEGIN:
                self._begin(bytes(self._records[begin : begin + envelope_bytes]))
            elif kind == _ABANDON:
                self._drop()
            elif kind != _SKIP or not record_bytes:
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
        if kind == _PLACED:
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


def placement(sizes: list[int]) -> tuple[list[int], int]:
    """Where tensors of `sizes` bytes lie in one range of the area, each on a cache line of its own, and the bytes of the range."""
    offsets = []
    end = 0
    for size in sizes:
        offsets.append(end)
        end += (size + LINE_BYTES - 1) & -LINE_BYTES
    return offsets, end


def _padded(nbytes: int) -> int:
    return (nbytes + _ALIGNMENT - 1) & -_ALIGNMENT


def _pages(nbytes: int) -> int:
    return (nbytes + PAGE_BYTES - 1) & -PAGE_BYTES
