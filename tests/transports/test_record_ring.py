"""The record ring against a deque: every legal record fits once all before it are read, and nonsense in it costs bounded work."""

from __future__ import annotations

import struct
from collections import deque

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from flowrt.transports.conformance.kit import check_numbered, numbered
from flowrt.transports.contract import ChannelStatistics, Limits
from flowrt.transports.registry import unavailable_reason
from flowrt.transports.shared_memory.ring import (
    HEAD,
    INLINE,
    PLACED,
    RECORD_ALIGNMENT,
    RECORD_BYTES,
    SKIP,
    TAIL,
    WORDS_BYTES,
    Layout,
)
from flowrt.transports.wire.codec import WireError
from flowrt.transports.wire.message import Message

if unavailable_reason("shm") is not None:
    pytest.skip(str(unavailable_reason("shm")), allow_module_level=True)

from rings import mappings, ring_in

from flowrt.transports.native._words import Memory, Records
from flowrt.transports.shared_memory.ring_reader import MAX_REPEATS

RECORDS_AT = 4096
WARM_BYTES = 1 << 16  # from here on a writer that sees all read begins again at the start
RING_SIZES = [64, 96, 256, 1024, WARM_BYTES, WARM_BYTES + 64, 1 << 17, 1 << 18]


def record_ring(size: int) -> tuple[Memory, Records, Records]:
    """The memory, the end that writes and the end that reads."""
    assert WORDS_BYTES <= RECORDS_AT
    one, other = mappings(RECORDS_AT + size)
    return one, Records(one, 0, RECORDS_AT, size, -1), Records(other, 0, RECORDS_AT, size, -1)


def largest_body(size: int) -> int:
    """Of a record, which takes half a ring of `size` bytes at most."""
    return size // 2 // RECORD_ALIGNMENT * RECORD_ALIGNMENT - RECORD_BYTES


def put(records: Records, envelope: bytes, payload: bytes) -> bool:
    return records.put(INLINE, 7, len(payload), envelope, [len(payload)], [payload])


class RecordRingMachine(RuleBasedStateMachine):
    @initialize(size=st.sampled_from(RING_SIZES))
    def make(self, size: int) -> None:
        self.size = size
        self.memory, self.writer, self.reader = record_ring(size)
        self.unread: deque[tuple[bytes, bytes]] = deque()
        self.number = 0

    @rule(share=st.floats(0, 1), envelope_share=st.floats(0, 1))
    def put(self, share: float, envelope_share: float) -> None:
        """A record of any legal size; it must fit if nothing is unread."""
        body = int(share * largest_body(self.size))
        envelope_bytes = int(envelope_share * body)
        fill = bytes([self.number % 256])
        record = fill * envelope_bytes, fill * (body - envelope_bytes)
        if put(self.writer, *record):
            self.unread.append(record)
            self.number += 1
        else:
            assert self.unread, f"a record of {body} bytes was refused by an empty ring of {self.size}"

    @rule(share=st.floats(0, 1))
    def put_a_buffer_of_another_size(self, share: float) -> None:
        """It is refused, and what is written after it is read as if it had never been tried."""
        body = max(1, int(share * largest_body(self.size)))
        try:
            refused = not self.writer.put(INLINE, 7, body, b"", [], [])
        except ValueError:
            return
        assert refused, "nothing was written"
        assert self.unread, "there is room"

    @rule()
    def put_too_large(self) -> None:
        with pytest.raises(ValueError, match="at most"):
            put(self.writer, b"", bytes(largest_body(self.size) + 1))

    @rule()
    def next(self) -> None:
        record = self.reader.next()
        if not self.unread:
            assert record is None
            return
        envelope, payload = self.unread.popleft()
        assert record == (INLINE, 7, len(payload), envelope, bytearray(payload) if payload else None)

    @rule()
    def read_all(self) -> None:
        while self.unread:
            self.next()

    @invariant()
    def cursors_are_possible(self) -> None:
        if hasattr(self, "memory"):
            assert 0 <= self.memory.load(HEAD) - self.memory.load(TAIL) <= self.size
            assert self.reader.unread() == bool(self.unread)


TestRecordRing = RecordRingMachine.TestCase
TestRecordRing.settings = settings(max_examples=200, stateful_step_count=60, deadline=None)

LIMITS = Limits(
    max_header_bytes=512, max_tensors=4, max_message_bytes=1 << 19, capacity_messages=16, capacity_bytes=1 << 18, copy_threads=2
)
SIZES = st.integers(0, 300) | st.integers(0, 20_000) | st.sampled_from([8192, 8193, 65_536]) | st.integers(0, LIMITS.max_message_bytes)


class MessageRingMachine(RuleBasedStateMachine):
    """Messages of any size, in one piece or in chunks, given up or held, against a deque of (number, bytes)."""

    def __init__(self) -> None:
        super().__init__()
        self.layout = Layout.of(LIMITS)
        one, other = mappings(self.layout.total_bytes)
        self.writer, self.reader = ring_in(self.layout, LIMITS, one, other)
        self.unread: deque[tuple[int, int]] = deque()
        self.begun: tuple[int, int] | None = None  # a message that `advance` has not finished
        self.held: list[tuple[int, int, Message]] = []
        self.number = 0

    def teardown(self) -> None:
        self.held.clear()
        self.writer.close()
        self.reader.close()

    @precondition(lambda self: self.begun is None)
    @rule(nbytes=SIZES, later=st.booleans())
    def send(self, nbytes: int, later: bool) -> None:
        if self.writer.send(numbered(self.number, nbytes), later):
            self.note_sent(self.number, nbytes)
            self.writer.copy_threads.wait()

    @precondition(lambda self: self.begun is None)
    @rule(nbytes=SIZES)
    def begin(self, nbytes: int) -> None:
        self.begun = self.number, nbytes
        self.advance()

    @precondition(lambda self: self.begun is not None)
    @rule()
    def advance(self) -> None:
        assert self.begun is not None
        if self.writer.advance(numbered(*self.begun)):
            self.note_sent(*self.begun)
            self.begun = None
        self.writer.copy_threads.wait()

    @precondition(lambda self: self.begun is not None)
    @rule()
    def abandon(self) -> None:
        self.writer.abandon()
        self.begun = None
        self.number += 1  # the reader drops what has come of it

    def note_sent(self, number: int, nbytes: int) -> None:
        self.unread.append((number, nbytes))
        self.number = number + 1

    @rule(holds=st.booleans())
    def take(self, holds: bool) -> None:
        message = self.take_one()
        if message is not None and holds:
            self.held.append(message)

    def take_one(self) -> tuple[int, int, Message] | None:
        """The next message; it may take one look for each round of chunks and for each message that was given up."""
        for _ in range(4):
            message = self.reader.take()
            if message is not None:
                number, nbytes = self.unread.popleft()
                check_numbered(message, number, nbytes)
                return number, nbytes, message
        assert not self.unread, "what was sent arrives"
        return None

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def let_go(self, data: st.DataObject) -> None:
        del self.held[data.draw(st.integers(0, len(self.held) - 1))]

    @rule()
    def finish(self) -> None:
        """With the reader at work, whatever was begun ends, even while tensors are held."""
        for _ in range(200):
            if self.begun is None:
                break
            self.take_one()
            self.advance()
        assert self.begun is None, "the writer is stuck although everything was read"
        while self.unread:
            self.take_one()

    @invariant()
    def held_messages_are_whole(self) -> None:
        for number, nbytes, message in self.held:
            check_numbered(message, number, nbytes)


TestMessageRing = MessageRingMachine.TestCase
TestMessageRing.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_record_fits_when_the_head_is_past_the_warm_part() -> None:
    """The head stands at 65,536 of a ring of 262,144 bytes and everything is read: 73,024 bytes fit behind it."""
    _, writer, reader = record_ring(1 << 18)
    for _ in range(2):
        assert put(writer, b"e" * (WARM_BYTES // 2 - RECORD_BYTES), b"")
        assert reader.next() is not None
    assert put(writer, b"h" * 65_000, bytes(8000))
    assert reader.next() == (INLINE, 7, 8000, b"h" * 65_000, bytearray(8000))


class HostileWriter:
    """Writes record heads as no writer of ours does."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.memory, _, self.reader = record_ring(size)
        self.head = 0

    def write(self, *records: tuple[int, int]) -> None:
        """Kind and bytes of each."""
        for kind, nbytes in records:
            at = RECORDS_AT + self.head % self.size
            memoryview(self.memory)[at : at + RECORD_BYTES] = struct.pack("=IIIIQ", nbytes, kind, 0, 0, 0)
            self.head += nbytes
        self.memory.store(HEAD, self.head)


@pytest.mark.parametrize(
    ("reads_one", "records", "error"),
    [
        (False, [(SKIP, 32), (PLACED, 32)], "end of the ring"),
        (False, [(SKIP, 64), (PLACED, 32)], "end of the ring"),
        (True, [(SKIP, 224)], "cut off"),
        (True, [(SKIP, 224), (SKIP, 32)], "two skips"),
    ],
)
def test_skip_ends_at_the_end_of_the_ring_and_is_followed_by_a_record(reads_one: bool, records: list[tuple[int, int]], error: str) -> None:
    """Else a peer that only ever skips keeps the reader busy for as long as it likes."""
    peer = HostileWriter(256)
    if reads_one:
        peer.write((PLACED, 32))
        assert peer.reader.next() is not None
    peer.write(*records)
    with pytest.raises(ValueError, match=error):
        peer.reader.next()


def test_flood_of_repeats_breaks_the_channel() -> None:
    """Each repeat is dropped inside one call of `take`, so their number is bounded."""
    layout = Layout.of(LIMITS)
    one, other = mappings(layout.total_bytes)
    counters = ChannelStatistics()
    writer, reader = ring_in(layout, LIMITS, one, other, counters)
    assert writer.send(numbered(0))
    records = Records(one, layout.words(0), layout.records(0), layout.records_bytes, -1)
    first = next_envelope(other, layout)
    assert reader.take() is not None
    for _ in range(MAX_REPEATS + 10):
        assert records.put(INLINE, 0, 0, first, [], [])
    with pytest.raises(WireError, match="repeated"):
        reader.take()
    assert counters.messages_dropped == MAX_REPEATS + 1


def next_envelope(memory: Memory, layout: Layout) -> bytes:
    """The envelope of the record at the start of the ring."""
    at = layout.records(0)
    head = bytes(memoryview(memory)[at : at + RECORD_BYTES])
    (_, _, envelope_bytes, _, _) = struct.unpack("=IIIIQ", head)
    return bytes(memoryview(memory)[at + RECORD_BYTES : at + RECORD_BYTES + envelope_bytes])
