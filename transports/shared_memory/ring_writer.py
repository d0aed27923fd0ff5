"""The sending half of one direction of a shared-memory channel: chooses the path of each payload and its place in the area."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

from flowrt.transports.channel.blocks import placement
from flowrt.transports.channel.bulk_copy import MIN_BYTES, CopyThreads, threshold_bytes
from flowrt.transports.channel.flow_control import SendWindow
from flowrt.transports.contract import ChannelStatistics, Limits
from flowrt.transports.errors import InvalidMessageError
from flowrt.transports.shared_memory import ring
from flowrt.transports.shared_memory.ring import Layout, pieces
from flowrt.transports.wire.codec import WireError, encode, encode_envelope, header_bytes, learn, tensor_bytes, with_own_tensors
from flowrt.transports.wire.message import Lent, Message, Tag, Tensor

if TYPE_CHECKING:
    from flowrt.transports.native._words import Memory

FIRST_AREA_BYTES = 1 << 20  # the part of an area used, and so allocated, until more is on the way at once
_MAX_PLACED_BYTES = (1 << 32) - 1  # a record's head has 32 bits for them
_NOTHING: list[object] = []
_NO_SIZES: list[int] = []


class RingWriter:
    """The sending half. Wakes the reader through `wake_fd`; copy threads write to `own_fd` when their copies are done."""

    def __init__(
        self,
        memory: Memory,
        layout: Layout,
        direction: int,
        limits: Limits,
        counters: ChannelStatistics,
        wake_fd: int = -1,
        own_fd: int = -1,
    ) -> None:
        from flowrt.transports.native._words import KnownEnvelopes, Records

        self._memory = memory
        self._layout = layout
        self._direction = direction
        self._words = words = layout.words(direction)
        self._limits = limits
        self._counters = counters
        self._window = SendWindow(limits)
        self._wake_fd = wake_fd
        records = Records(memory, words, layout.records(direction), layout.records_bytes, wake_fd)
        self._put, self._put_message = records.put, records.put_message
        self._known = KnownEnvelopes(Message, Tag, Tensor)
        self.copy_threads = CopyThreads(
            memory, words + ring.FIELDS, ring.FIELD_BYTES, words + ring.READER_SLEEPS, layout.copy_threads, wake_fd, own_fd
        )
        self._slot_heads = [0] * layout.copy_threads  # bytes of slots ever filled, and given back
        self._slot_tails = [0] * layout.copy_threads
        self._last_event = 0  # the last one that every copy thread announced
        self._has_slots = False
        self._area = layout.area(direction)
        self._area_bytes = layout.area_bytes
        self._used_bytes = 0  # the part of the area that is used and allocated
        self._placed = self._released = 0  # bytes of the area
        self._begun = 0  # the last position at which the whole area was free: nothing before it is used, even if not yet released
        self._seen: tuple[int, ...] = ()
        self._sequence = 0
        self._chunks: _Chunks | None = None
        self._num_abandoned = 0
        self._abandoned_after = 0  # messages sent when the last one was abandoned
        self.copying = False  # whether the last message is still being copied

    def send(self, message: Message, later: bool = False) -> bool:
        """Sends `message` at once, or returns False with nothing done. Raises LimitError, InvalidMessageError.

        Copy threads copy payloads from `threshold_bytes` on. Without `later` this returns False for them, because the caller cannot wait.
        With `later` they are copied after this returns (`copying`, `copy_threads`); their tensors must not change until then.
        """
        if self._chunks is None and self._window.fits(ring.INLINE_BYTES):
            try:
                put = self._put_message(self._known, message, self._sequence)
            except RuntimeError as error:
                raise WireError(str(error)) from error
            if put is not None:
                self._count(put)
                return True
        if message.lent is not None and message.payload_bytes <= ring.INLINE_BYTES:
            message = with_own_tensors(message)
        envelope, sizes, total = encode_envelope(message, self._sequence, self._limits)
        bulk = total >= MIN_BYTES and total >= threshold_bytes()
        if bulk and not later:
            return False
        if self._send(message, envelope, sizes, total, bulk):
            return True
        if self._refresh() and self._send(message, envelope, sizes, total, bulk):
            return True
        if total <= ring.INLINE_BYTES or message.lent is not None or not self._begin(message, envelope, sizes, total, True):
            return False
        sent = self._send_chunks()
        if not later:
            self.copy_threads.wait()
            self.copying = False
        return sent

    def advance(self, message: Message) -> bool:
        """As `send`, but sends a message that does not fit at once in chunks, over several calls.

        After the first chunk, call it with the same message until True, or call `abandon`.
        """
        if self._chunks is None:
            if self.send(message, True):
                return True
            if not self._begin(message, *encode_envelope(message, self._sequence, self._limits), False):
                return False
        return self._send_chunks() or (self._refresh() and self._send_chunks())

    def abandon(self) -> None:
        """Abandons a message that `advance` has begun; the reader drops the chunks that it has."""
        if self._chunks is not None:
            self._chunks = None
            self.copy_threads.wait()
            self._last_event = self._event()  # the reader may still read its chunks, and expects no less than this until it has
            self._num_abandoned += 1
            self._abandoned_after = self._window.sent_messages
            words = self._words
            if self._memory.publish(words + ring.FIELDS + ring.ABANDONED, self._num_abandoned, words + ring.READER_SLEEPS):
                self._wake()

    def close(self, in_order: bool = True) -> None:
        """Finishes the copies, marks the end (of an orderly close), and releases the memory."""
        self.copy_threads.close()
        if in_order:
            self._memory.store(self._words + ring.CLOSED, 1)
        self._chunks = None
        del self._memory, self._put, self._put_message

    def expect_room(self) -> bool:
        """Sets the sleep flag of this side. True when there is more room already."""
        self._memory.raise_flag(self._words + ring.WRITER_SLEEPS)
        return self.has_more_room()

    def flag_is_up(self) -> bool:
        """Whether the reader has not yet cleared the sleep flag; it clears the flag when it wakes this side."""
        return self._memory.load(self._words + ring.WRITER_SLEEPS) == 1

    def has_more_room(self) -> bool:
        """Whether the reader has advanced since the last attempt to send."""
        return self._look() != self._seen

    def _look(self) -> tuple[int, ...]:
        load, words = self._memory.load, self._words
        acknowledged = words + ring.ACKNOWLEDGED + ring.CHUNK_TAIL
        tails = [load(acknowledged + thread * ring.FIELD_BYTES) for thread in range(self._layout.copy_threads)]
        return (
            load(words + ring.TAIL),
            load(words + ring.TAKEN_MESSAGES),
            load(words + ring.TAKEN_BYTES),
            load(words + ring.RELEASED),
            *tails,
        )

    def _refresh(self) -> bool:
        """Reads the reader's words. True when it has advanced."""
        seen = self._look()
        if seen == self._seen:
            return False
        _, taken_messages, taken_bytes, released, *tails = seen
        self._window.update(taken_messages, taken_bytes)
        if not self._released <= released <= self._placed:
            raise WireError("the peer's cursor of the area is outside of what was sent")
        for before, now, head in zip(self._slot_tails, tails, self._slot_heads, strict=True):
            if not before <= now <= head:
                raise WireError("the peer acknowledges chunks that were not sent")
        self._seen, self._released, self._slot_tails = seen, released, tails
        return True

    def _send(self, message: Message, envelope: bytes, sizes: list[int], total: int, bulk: bool) -> bool:
        window = self._window
        if self._chunks is not None or not window.fits(total):
            return False
        if total <= ring.INLINE_BYTES:
            tensors = message.tensors
            buffers = _NOTHING if not tensors else [tensors[0].data] if len(tensors) == 1 else [tensor.data for tensor in tensors]
            try:
                if not self._put(ring.INLINE, 0, total, envelope, sizes, buffers):
                    return False
            except (ValueError, TypeError, BufferError) as error:
                self._refuse(message, error)
            except RuntimeError as error:
                raise WireError(str(error)) from error
            if not self._known.is_full and (message.tag is None or message.header is None):  # others are never repeated
                learn(self._known, message, header_bytes(message), envelope, self._sequence, total)
        else:
            offsets, area_bytes = placement(sizes)
            start = self._place(area_bytes)
            if start < 0:
                return False
            if bulk or total > _MAX_PLACED_BYTES:
                parts = list(map(tensor_bytes, message.tensors))
                self._start_copy_threads()
                if not self._put_record(ring.BULK, start, 0, envelope):
                    return False
                self._copy_stripes(parts, self._area + start % self._area_bytes, offsets)
            else:
                at = self._area + start % self._area_bytes
                if message.lent is None:
                    self._fill(message, sizes, at, offsets)
                else:
                    envelope = self._take_lent(message, message.lent, sizes, at, offsets)
                if not self._put_record(ring.PLACED, start, total, envelope):
                    return False
            if self._released == self._placed:
                self._begun = start
            self._placed = start + area_bytes
        self._count(total)
        return True

    def _event(self) -> int:
        """The event id of the next message. None is used twice: a copy thread may announce an abandoned message late."""
        return self._sequence + self._num_abandoned + 1

    def _start_copy_threads(self) -> None:
        """Raises WireError. Called before a record announces what they copy."""
        try:
            self.copy_threads.start()
        except OSError as error:
            raise WireError(f"no thread can be started to copy a payload: {error.strerror}") from error

    def _count(self, payload_bytes: int) -> None:
        self._sequence += 1
        window, counters = self._window, self._counters
        window.sent_messages += 1
        window.sent_bytes += payload_bytes
        counters.messages_sent += 1
        counters.bytes_sent += payload_bytes

    def _put_record(self, kind: int, start: int, payload_bytes: int, envelope: bytes) -> bool:
        try:
            return self._put(kind, start, payload_bytes, envelope, _NO_SIZES, _NOTHING)
        except RuntimeError as error:
            raise WireError(str(error)) from error

    def _fill(self, message: Message, sizes: list[int], base: int, offsets: list[int]) -> None:
        try:
            for tensor, size, offset in zip(message.tensors, sizes, offsets, strict=True):
                if memoryview(tensor.data).nbytes != size:  # type: ignore[arg-type]
                    raise ValueError("a buffer of another size")
                self._memory.fill(base + offset, tensor.data)
        except (ValueError, TypeError, BufferError) as error:
            self._refuse(message, error)

    def _take_lent(self, message: Message, lent: Lent, sizes: list[int], base: int, offsets: list[int]) -> bytes:
        """Copies lent tensors, and returns the envelope with the header that this gives."""
        area = memoryview(self._memory)[base:]
        header = lent.copy_into([area[offset : offset + size] for offset, size in zip(offsets, sizes, strict=True)])
        complete = Message(message.kind, message.tag, message.edge, header, message.tensors)
        return encode_envelope(complete, self._sequence, self._limits)[0]

    def _refuse(self, message: Message, error: Exception) -> NoReturn:
        """Raises for buffers that do not match their specs; nothing was sent."""
        encode(message, 0)  # raises with an explanation
        raise InvalidMessageError(str(error)) from error

    def _copy_stripes(self, parts: list[memoryview], base: int, offsets: list[int]) -> None:
        """Queues the tensors at the copy threads, each cut into stripes; the last stripe of a thread announces the event."""
        event, num_copy_threads = self._event(), self.copy_threads.num_copy_threads
        for thread in range(num_copy_threads):
            for index, (part, offset) in enumerate(zip(parts, offsets, strict=True)):
                stripe = -(-len(part) // num_copy_threads // 64) * 64
                begin = min(thread * stripe, len(part))
                end = len(part) if thread == num_copy_threads - 1 else min(begin + stripe, len(part))
                last = index == len(parts) - 1
                announced = event if last else self._last_event
                self.copy_threads.copy(
                    thread, base + offset + begin, part, begin, end - begin, announced, thread, self._slot_heads[thread], last
                )
        self._last_event = event
        self.copying = True

    def _place(self, nbytes: int) -> int:
        """The position for `nbytes` in the area, in bytes ever used; -1 when there is no room now."""
        size = self._area_bytes
        if 2 * nbytes > size or 2 * self._memory.load(self._words + ring.HELD) > size:
            return -1
        while True:
            start = self._start_of(nbytes)
            if start >= 0 or self._used_bytes >= size:
                return start
            if not self._refresh() and not self._grow(nbytes):  # the reader may have released memory since its words were last read
                return start

    def _start_of(self, nbytes: int) -> int:
        """Works as `_place` within the part of the area that is used."""
        size, used, start = self._area_bytes, self._used_bytes, self._placed
        at = start % size
        if nbytes > used:
            return -1
        all_free = self._released == start
        if at and (all_free or at + nbytes > used):
            start += size - at  # the area is free, or its end is full: continue at its start, whose pages and cache lines are warm
        return start if all_free or start + nbytes - max(self._released, self._begun) <= size else -1

    def _grow(self, nbytes: int) -> bool:
        """Uses more of the area. False when the machine has no memory for it: payloads are sent in chunks then."""
        used = min(self._area_bytes, max(FIRST_AREA_BYTES, 2 * self._used_bytes, 2 * nbytes))
        try:
            self._memory.populate(self._area + self._used_bytes, used - self._used_bytes)
        except OSError:
            return False
        self._used_bytes = used
        return True

    def _begin(self, message: Message, envelope: bytes, sizes: list[int], total: int, whole: bool) -> bool:
        """Begins to send `message` in chunks if it must, and there is room for the first chunk, or, with `whole`, for all."""
        window, layout, held = self._window, self._layout, self._memory.load(self._words + ring.HELD)
        if (
            total <= ring.INLINE_BYTES
            or self._chunks is not None
            or not window.fits(total)
            or window.taken_messages < self._abandoned_after
        ):
            return False
        may_be_placed = 2 * placement(sizes)[1] <= self._area_bytes and 2 * held <= self._area_bytes
        if may_be_placed and window.taken_messages < window.sent_messages:
            return False  # the area may have room after the reader has read the records in flight
        if whole:
            max_used = max(map(int.__sub__, self._slot_heads, self._slot_tails))
            if total > layout.copy_threads * (layout.slots_bytes - max_used):
                return False
        parts = list(map(tensor_bytes, message.tensors))
        if not self._has_slots:
            try:
                self._memory.populate(layout.slots(self._direction), layout.copy_threads * layout.slots_bytes)
            except OSError as error:
                raise WireError(f"no memory for a channel's slots: {error.strerror}") from error
            self._has_slots = True
        self._start_copy_threads()
        if not self._put_record(ring.CHUNKED, self._event(), 0, envelope):
            return False
        self._chunks = _Chunks(parts, sizes, total)
        self._window.add(total)
        return True

    def _send_chunks(self) -> bool:
        chunks = self._chunks
        if chunks is None:
            return False
        layout, num_copy_threads = self._layout, self._layout.copy_threads
        slot, slots, event = layout.slot_bytes, layout.slots_bytes, self._event()
        while chunks.sent < chunks.total:
            thread = chunks.number % num_copy_threads
            head = self._slot_heads[thread]
            if head + slot - self._slot_tails[thread] > slots:
                return False
            end = min(chunks.sent + slot, chunks.total)
            at = layout.slots(self._direction, thread) + head % slots
            found = pieces(chunks.sizes, chunks.sent, end)
            for place, (index, begin, nbytes) in enumerate(found):
                last = place == len(found) - 1
                tail = head + slot if last else head
                announce = (
                    last and -(-(chunks.total - end) // slot) < num_copy_threads
                )  # the last chunk of its thread: threads end in any order
                self.copy_threads.copy(thread, at, chunks.parts[index], begin, nbytes, event, chunks.number, tail, announce)
                at += nbytes
            self._slot_heads[thread] = head + slot
            chunks.sent, chunks.number = end, chunks.number + 1
        self._chunks = None
        self._last_event = event  # or earlier, in threads without a chunk
        self.copying = True
        self._sequence += 1
        self._counters.messages_sent += 1
        self._counters.bytes_sent += chunks.total
        return True

    def _wake(self) -> None:
        if self._wake_fd >= 0:
            os.eventfd_write(self._wake_fd, 1)


@dataclass(slots=True)
class _Chunks:
    """The rest of a message that is sent in chunks."""

    parts: list[memoryview]
    sizes: list[int]
    total: int
    sent: int = 0
    number: int = 0  # of the next chunk
