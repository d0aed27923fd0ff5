"""The sending half of one direction of a shared-memory channel.

Here: RingWriter. Not here: the layout and its rules (ring.py), waiting (shared_memory.py calls this and sleeps when it says no).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from transports.codec import Part, WireError, encode
from transports.contract import ChannelStatistics, Limits
from transports.message import Message
from transports.ring import (
    ABANDON,
    BEGIN,
    CHUNK,
    CLOSED,
    HEAD,
    INLINE,
    INLINE_BYTES,
    PLACED,
    READER_SLEEPS,
    RECORD,
    RELEASED,
    SKIP,
    TAIL,
    TAKEN_BYTES,
    TAKEN_MESSAGES,
    WRITER_SLEEPS,
    Layout,
    padded,
    placement,
)  # fmt: skip
from transports.window import SendWindow

if TYPE_CHECKING:
    from transports._words import Memory


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

    def flag_is_up(self) -> bool:
        """Whether the reader has yet to notice that we sleep; lowering the flag is its promise to wake us."""
        return self._memory.load(self._words + WRITER_SLEEPS) == 1

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
            at = self._reserve(RECORD.size + len(envelope) + payload_bytes)
            if at < 0:
                return False
            position = self._put(at, INLINE, envelope, payload_bytes, 0)
            if payload_bytes:
                records = self._records
                for part in parts[1:]:
                    end = position + len(part)
                    records[position:end] = part
                    position = end
        else:
            offsets, area_bytes = placement(list(map(len, parts[1:])))
            start = self._place(area_bytes)
            at = self._reserve(RECORD.size + len(envelope)) if start >= 0 else -1
            if at < 0:
                return False
            base = start % self._area_bytes
            for offset, part in zip(offsets, parts[1:], strict=True):
                self._area[base + offset : base + offset + len(part)] = part
            self._placed = start + area_bytes
            self._put(at, PLACED, envelope, 0, start)
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
        nbytes = padded(nbytes)
        size = self._records_bytes
        at = self._head % size
        skipped = size - at if at + nbytes > size else 0
        if self._head + skipped + nbytes - self._tail > size:
            return -1
        if skipped:
            RECORD.pack_into(self._records, at, skipped, SKIP, 0, 0, 0)
            at = 0
        self._head += skipped + nbytes
        return at

    def _put(self, at: int, kind: int, envelope: Part, payload_bytes: int, start: int) -> int:
        """Write a record's head and envelope; returns where its payload goes."""
        begin = at + RECORD.size
        end = begin + len(envelope)
        RECORD.pack_into(self._records, at, padded(end + payload_bytes - at), kind, len(envelope), payload_bytes, start)
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
        at = self._reserve(RECORD.size + len(parts[0]))
        if at < 0:
            return False
        self._put(at, BEGIN, parts[0], 0, 0)
        self._chunks = _Chunks([memoryview(part) for part in parts[1:] if len(part)])
        self._publish()
        self._window.add(payload_bytes)
        return True

    def _send_chunks(self) -> bool:
        chunks = self._chunks
        assert chunks is not None
        while chunks.parts:
            piece = chunks.parts[0][chunks.offset :][: self._records_bytes // 4 - RECORD.size]
            at = self._reserve(RECORD.size + len(piece))
            if at < 0:
                return False
            self._put(at, CHUNK, piece, 0, 0)
            self._publish()
            chunks.advance(len(piece))
        self._chunks = None
        self._sequence += 1
        self._counters.messages_sent += 1
        self._counters.bytes_sent += chunks.total_bytes
        return True

    def _flush_abandoned(self) -> bool:
        at = self._reserve(RECORD.size)
        if at < 0:
            return False
        self._put(at, ABANDON, b"", 0, 0)
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
