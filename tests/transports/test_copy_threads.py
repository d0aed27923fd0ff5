"""Copy threads: fields of 32 bytes, copies beside the event loop, chunks that one side fills while the other drains, bounded memory."""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from message_sizes import receive_sizes, send_sizes

from flowrt.transports.conformance.connection_checks import pair_maker
from flowrt.transports.conformance.kit import check_numbered, numbered, opened, pattern, receive_all, received_bytes, send_all
from flowrt.transports.conformance.process_checks import other_process
from flowrt.transports.contract import Limits
from flowrt.transports.registry import unavailable_reason
from flowrt.transports.shared_memory.ring import (
    ABANDONED,
    ACKNOWLEDGED,
    CHUNK,
    CHUNK_TAIL,
    EVENT,
    FIELD_BYTES,
    FIELDS,
    INLINE_BYTES,
    PAGE_BYTES,
    SLOTS,
    WORDS_BYTES,
    Layout,
    pieces,
)
from flowrt.transports.shared_memory.transport import SharedMemoryChannel
from flowrt.transports.wire.codec import WireError
from flowrt.transports.wire.message import DTYPE_BYTES, Message, Tag, Tensor, TensorSpec

if unavailable_reason("shm") is not None:
    pytest.skip(str(unavailable_reason("shm")), allow_module_level=True)

from rings import check_next, copy_from, new_memory, ring

from flowrt.transports.channel import bulk_copy as bulk
from flowrt.transports.native._words import CopyThread, Memory, Records


def limits_of(copy_threads: int, capacity_bytes: int = 1 << 20) -> Limits:
    return Limits(max_header_bytes=512, max_tensors=4, max_message_bytes=1 << 24, capacity_bytes=capacity_bytes, copy_threads=copy_threads)


def field(memory: Memory, thread: int, word: int, side: int = FIELDS) -> int:
    return memory.load(side + thread * FIELD_BYTES + word)


@pytest.mark.parametrize("copy_threads", [1, 2, 3, 16])
@pytest.mark.parametrize("capacity_bytes", [1 << 14, 1 << 18, 1 << 20, 8 << 20])
def test_layout(copy_threads: int, capacity_bytes: int) -> None:
    layout = Layout.of(limits_of(copy_threads, capacity_bytes))
    assert 2 * WORDS_BYTES <= PAGE_BYTES
    assert FIELD_BYTES == 32
    places = [
        layout.records(0),
        layout.slots(0),
        *(layout.slots(0, thread) for thread in range(1, copy_threads)),
        layout.area(0),
        layout.records(1),
    ]
    assert places == sorted(places)
    assert all(place % PAGE_BYTES == 0 for place in places)
    assert layout.area(1) + layout.area_bytes == layout.total_bytes
    if capacity_bytes >= 1 << 20:
        assert layout.direction_bytes <= capacity_bytes, "a channel takes no more than it declares"


@given(st.lists(st.integers(0, 50), max_size=6), st.integers(1, 40))
def test_pieces_cover_everything_once(sizes: list[int], step: int) -> None:
    parts = [pattern(size, index) for index, size in enumerate(sizes)]
    whole = b"".join(parts)
    found = b""
    for begin in range(0, len(whole), step):
        of_chunk = [parts[index][start : start + nbytes] for index, start, nbytes in pieces(sizes, begin, min(begin + step, len(whole)))]
        assert all(of_chunk)
        found += b"".join(of_chunk)
    assert found == whole


class TestChunks:
    @pytest.mark.parametrize("num_chunks", [2, 3, 4, 7])
    def test_the_last_copy_of_every_thread_is_announced(self, num_chunks: int) -> None:
        """CopyThreads end in any order: a waiter for all of them must be notified of each end."""
        with ring(limits_of(3, 1 << 16)) as (_, layout, writer, reader):
            notified: dict[int, bool] = {}
            copy = writer.copy_threads.copy

            def noted(thread: int, *rest: object) -> None:
                notified[thread] = bool(rest[-1])
                copy(thread, *rest)  # type: ignore[arg-type]

            writer.copy_threads.copy = noted  # type: ignore[method-assign]
            size = layout.slot_bytes * num_chunks - 100
            message = Message("data", tensors=(Tensor(TensorSpec("uint8", (size,)), pattern(size)),))
            while not writer.advance(message):
                reader.take()
            assert notified == dict.fromkeys(range(min(3, num_chunks)), True)

    @pytest.mark.parametrize("copy_threads", [1, 2, 5])
    def test_one_side_drains_while_the_other_fills(self, copy_threads: int) -> None:
        with ring(limits_of(copy_threads)) as (memory, layout, writer, reader):
            size = max(3 * copy_threads * layout.slots_bytes, layout.area_bytes // 2) + 12_345
            message = numbered(0, size)
            turns, received = 0, None
            while not writer.advance(message):
                writer.copy_threads.wait()
                turns += 1
                assert reader.take() is None
                assert turns < 100
            writer.copy_threads.wait()
            while received is None:
                received = reader.take()
            assert turns >= 2, "it cannot have gone at once"
            check_numbered(received, 0, size)
            num_chunks = -(-size // layout.slot_bytes)
            last = {chunk % copy_threads: chunk for chunk in range(num_chunks)}
            for thread, chunk in last.items():
                assert (field(memory, thread, EVENT), field(memory, thread, CHUNK)) == (1, chunk)
                assert field(memory, thread, CHUNK_TAIL) == field(memory, thread, CHUNK_TAIL, ACKNOWLEDGED), "all is acknowledged"
                assert field(memory, thread, EVENT, ACKNOWLEDGED) == 1
            assert reader.take() is None

    def test_several_tensors_of_odd_sizes(self) -> None:
        with ring(limits_of(2)) as (_, layout, writer, reader):
            sizes = [layout.slot_bytes * 2 + 1, 0, 7, layout.slot_bytes * 3 - 5]
            tensors = tuple(Tensor(TensorSpec("uint8", (size,)), pattern(size, index)) for index, size in enumerate(sizes))
            received = None
            done = False
            for _ in range(100):
                done = done or writer.advance(Message("data", tensors=tensors))
                writer.copy_threads.wait()
                received = received or reader.take()
            assert received is not None
            assert list(map(received_bytes, received.tensors)) == [pattern(size, index) for index, size in enumerate(sizes)]

    def test_given_up_and_gone_on(self) -> None:
        with ring(limits_of(2)) as (memory, layout, writer, reader):
            for turn in range(5):
                assert not writer.advance(numbered(turn, layout.area_bytes // 2 + 100))
                if turn % 2:
                    assert reader.take() is None
                writer.abandon()
                assert field(memory, 0, ABANDONED) == turn + 1
                assert writer.send(numbered(turn, 100)), "small ones do not wait for it to be dropped"
                for _ in range(3):
                    if (message := reader.take()) is not None:
                        break
                assert message is not None
                check_numbered(message, turn, 100)
                assert reader.take() is None

    @given(st.integers(0, SLOTS), st.integers(0, 2**64 - 1), st.sampled_from([EVENT, CHUNK_TAIL]))
    @settings(max_examples=60, deadline=None)
    def test_false_fields_only_break_the_channel(self, num_reads: int, value: int, word: int) -> None:
        with ring(limits_of(2)) as (memory, layout, writer, reader):
            writer.advance(numbered(0, 6 * layout.slots_bytes))
            writer.copy_threads.wait()
            memory.store(FIELDS + word, value)
            try:
                for _ in range(num_reads):
                    if (message := reader.take()) is not None:
                        assert message.payload_bytes <= 1 << 24
            except WireError:
                pass

    def test_false_acknowledgements_break_the_writer(self) -> None:
        with ring(limits_of(1)) as (memory, layout, writer, _):
            writer.advance(numbered(0, 6 * layout.slots_bytes))
            memory.store(ACKNOWLEDGED + CHUNK_TAIL, 1 << 40)
            with pytest.raises(WireError, match="acknowledges"):
                writer.advance(numbered(0, 6 * layout.slots_bytes))


class TestBulk:
    @pytest.fixture(autouse=True)
    def everything_is_bulk(self, monkeypatch: pytest.MonkeyPatch) -> None:
        copy_from(monkeypatch, INLINE_BYTES + 1)

    @pytest.mark.parametrize("copy_threads", [1, 2, 16])
    def test_stripes(self, copy_threads: int) -> None:
        with ring(limits_of(copy_threads)) as (memory, _, writer, reader):
            for number in range(60):
                assert writer.send(numbered(number, 20_001 + number), later=True)
                assert writer.copying
                ticket = writer.copy_threads.ticket()
                writer.copy_threads.wait()
                assert writer.copy_threads.settled(ticket)
                check_next(reader, number, 20_001 + number)
                assert all(field(memory, thread, EVENT) == number + 1 for thread in range(copy_threads))

    def test_a_record_waits_for_its_copy_threads(self) -> None:
        """The record is there at once; the message is not until every thread has announced its stripe."""
        with ring(limits_of(2)) as (memory, _, writer, reader):
            assert writer.send(numbered(0, 50_000), later=True)
            writer.copy_threads.wait()
            memory.store(FIELDS + FIELD_BYTES + EVENT, 0)
            assert reader.take() is None
            assert not reader.has_message()
            memory.store(FIELDS + FIELD_BYTES + EVENT, 1)
            assert reader.has_message()
            check_next(reader, 0, 50_000)

    @pytest.mark.parametrize("copy_threads", [1, 3])
    async def test_channel(self, copy_threads: int, loop_kind: str) -> None:
        """Bulk, small and large mixed, several senders: in order, and no thread is left."""
        before = threading.active_count(), _num_threads()
        sizes = [50_000, 10, 200_000, 9000, 3_000_000, 0]
        async with opened(pair_maker("shm"), limits_of(copy_threads)) as (one, two), asyncio.TaskGroup() as group:
            for sender, receiver in ((one, two), (two, one)):
                group.create_task(send_sizes(sender, sizes, 120))
                group.create_task(receive_sizes(receiver, sizes, 120))
        assert (threading.active_count(), _num_threads()) == before

    async def test_cancelled_while_copying(self, loop_kind: str) -> None:
        """The message is sent whole, and its tensors are the caller's again when the cancelled call has ended."""
        async with opened(pair_maker("shm"), limits_of(2)) as (one, two):
            for number in range(20):
                data = bytearray(pattern(100_000, number))
                sending = asyncio.ensure_future(one.send(Message("data", tensors=(Tensor(TensorSpec("uint8", (len(data),)), data),))))
                for _ in range(number % 3):
                    await asyncio.sleep(0)
                sending.cancel()
                await asyncio.wait([sending])
                data[:] = bytes(len(data))
                if sending.cancelled() and not number % 3:
                    continue  # it never began
                message = await two.recv()
                assert received_bytes(message.tensors[0]) == pattern(100_000, number)

    async def test_the_loop_goes_on(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The event loop runs while a copier copies."""
        async with opened(pair_maker("shm"), Limits(max_message_bytes=1 << 24, capacity_bytes=1 << 26)) as (one, two):
            turns = 0

            async def count() -> None:
                nonlocal turns
                while True:
                    turns += 1
                    await asyncio.sleep(0)

            counting = asyncio.ensure_future(count())
            await asyncio.gather(*(one.send(numbered(number, 1 << 22)) for number in range(3)))
            counting.cancel()
            await asyncio.wait([counting])
            assert turns > 1
            await receive_all(two, 0, 3, 1 << 22)


def _num_threads() -> int:
    return len(os.listdir("/proc/self/task"))


class TestCopiers:
    def test_copies_are_in_order_and_announced(self) -> None:
        memory = new_memory(1 << 16)
        wake = os.eventfd(0, os.EFD_NONBLOCK)
        thread = CopyThread(0, memory, 0, 64, -1, wake)
        for turn in range(1, 200):
            thread.copy(4096, pattern(20_000, turn), 5, 10_000, turn, 2 * turn, 3 * turn, True)
        thread.wait()
        assert bytes(memoryview(memory)[4096:14_096]) == pattern(20_000, 199)[5:10_005]
        assert [memory.load(word) for word in (0, 8, 16)] == [199, 398, 597]
        assert (os.eventfd_read(wake), thread.collect()) == (199, 0)
        thread.close()
        thread.close()
        os.close(wake)
        with pytest.raises(ValueError, match="closed"):
            thread.copy(4096, b"x", 0, 1, 0, 0, 0, False)

    def test_the_source_is_kept_until_it_was_copied(self) -> None:
        memory = new_memory(1 << 16)
        thread = CopyThread(0, memory, 0, 64, -1, -1)
        source = bytearray(30_000)
        thread.copy(4096, source, 0, 30_000, 1, 0, 0, False)
        with pytest.raises(BufferError):
            source.clear()
        thread.wait()
        source.clear()
        thread.close()

    @pytest.mark.parametrize(
        ("offset", "begin", "nbytes"), [(-1, 0, 1), (65_536, 0, 1), (0, -1, 1), (0, 0, 101), (0, 100, 1), (65_500, 0, 50)]
    )
    def test_bounds(self, offset: int, begin: int, nbytes: int) -> None:
        memory = new_memory(1 << 16)
        thread = CopyThread(0, memory, 0, 64, -1, -1)
        with pytest.raises(ValueError):
            thread.copy(offset, bytes(100), begin, nbytes, 0, 0, 0, False)
        thread.close()

    def test_the_threshold_is_measured(self) -> None:
        assert bulk.MIN_BYTES <= bulk.threshold_bytes() <= bulk.MAX_BYTES


def test_records_take_no_buffer_of_another_size() -> None:
    with ring(limits_of(1)) as (memory, layout, writer, reader):
        records = Records(memory, 0, layout.records(0), layout.records_bytes, -1)
        for sizes, buffers, total in (([3], [b"four"], 3), ([4], [b"four"], 5), ([5, 2], [b"fives", b"xx"], 6), ([4], [object()], 4)):
            with pytest.raises((ValueError, TypeError)):
                records.put(1, 0, total, b"envelope", sizes, buffers)
        assert reader.take() is None
        assert writer.send(numbered(0, 10))


async def test_every_dtype_that_torch_has() -> None:
    torch = pytest.importorskip("torch")
    shells = {f"{prefix}int{bits}" for prefix in ("", "u") for bits in range(1, 8)}  # names without memory behind them
    holding = {
        str(value).removeprefix("torch.")
        for value in vars(torch).values()
        if isinstance(value, torch.dtype) and not str(value).removeprefix("torch.").startswith(("q", "bits", "quint"))
    } - shells
    assert holding <= DTYPE_BYTES.keys()
    for name in holding:
        assert DTYPE_BYTES[name] == getattr(torch, name).itemsize


async def test_strides(loop_kind: str) -> None:
    numpy = pytest.importorskip("numpy")
    async with opened(pair_maker("shm"), limits_of(2)) as (one, two):
        for shape in ((6, 10), (600, 500), (3000, 900)):
            whole = numpy.arange(shape[0] * shape[1], dtype="float32").reshape(shape)
            for view in (whole.T, whole[::2, ::3], whole[::-1], whole[:, 1:2]):
                sent = Message("data", tensors=(Tensor(TensorSpec("float32", view.shape), view),))
                _, message = await asyncio.gather(one.send(sent), two.recv())
                assert received_bytes(message.tensors[0]) == view.tobytes()
                del message


async def test_more_than_half_held_goes_in_chunks() -> None:
    async with opened(pair_maker("shm"), Limits(capacity_bytes=1 << 20)) as (one, two):
        kept = []
        for number in range(40):
            _, message = await asyncio.gather(one.send(numbered(number, 50_000)), two.recv())
            kept.append(message)
        held = two.statistics().held_buffers
        assert isinstance(two, SharedMemoryChannel)
        area = Layout.of(two.limits).area_bytes
        assert area / 2 < held * 50_048 <= area / 2 + 2 * 50_048
        for number, message in enumerate(kept):
            check_numbered(message, number, 50_000)
        while kept:
            del message
            kept.pop()
            message = None
        assert one.send_nowait(numbered(40, 50_000))
        check_numbered(await two.recv(), 40, 50_000)


def _resident_bytes() -> int:
    """Of all channels' memory mapped here. A page that both ends of a test map counts twice."""
    resident, counts = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split(" ", 1)[0]:
            counts = "memfd:flowrt" in line
        elif counts and line.startswith("Rss:"):
            resident += int(line.split()[1]) * 1024
    return resident


async def test_memory_is_allocated_as_it_is_used() -> None:
    """A channel that declares 64 MiB uses no more of it than messages in flight need, however many messages it has carried."""
    limits = Limits(capacity_bytes=1 << 26)
    async with opened(pair_maker("shm"), limits) as (one, two):
        await send_all(one, 0, 30, 1000)
        await receive_all(two, 0, 30, 1000)
        resident = []
        for first in (30, 60):  # one message in flight at a time
            for number in range(first, first + 30):
                await asyncio.gather(one.send(numbered(number, 100_000)), receive_all(two, number, number + 1, 100_000))
            resident.append(_resident_bytes())
        assert resident[0] < Layout.of(limits).total_bytes / 8
        # 30 messages more carry 3 MB. When a buffer returns decides which of a few places the next one takes, so a page or two may be new.
        assert resident[1] - resident[0] < 5 * 100_000


async def test_a_channels_bytes_are_bounded_over_many_messages() -> None:
    """10^5 messages of all the ways a payload can take, some kept for a while: never more memory than declared."""
    capacity = 1 << 20
    layout = Layout.of(Limits(capacity_bytes=capacity))
    assert layout.direction_bytes <= capacity
    async with opened(pair_maker("shm"), Limits(capacity_bytes=capacity)) as (one, two), asyncio.TaskGroup() as group:
        sizes = [0] * 50 + [100] * 45 + [9000, 20_000, 300_000, 8192, 64]
        message = Message("data")
        messages = [Message("data", tensors=(Tensor(TensorSpec("uint8", (size,)), bytes(size)),)) if size else message for size in sizes]

        async def send() -> None:
            for _ in range(1000):
                for each in messages:
                    await one.send(each)

        group.create_task(send())
        kept: list[Message] = []
        for number in range(100_000):
            received = await two.recv()
            assert received.payload_bytes == sizes[number % 100]
            if not number % 37:
                kept = [*kept[-3:], received]
        assert _resident_bytes() <= 2 * layout.total_bytes
        statistics = one.statistics()
        assert statistics.messages_sent == 100_000 == two.statistics().messages_received


@pytest.mark.parametrize(
    ("sizes", "count"),
    [([0, 100, 9000, 30_000, 8192], 3000), ([30_000, 0, 60_000, 8193, 200_000, 64], 600)],
    ids=["small and large", "bulk both ways"],
)
async def test_echoes_between_processes_lose_no_wake_up(sizes: list[int], count: int, loop_kind: str) -> None:
    """Several are in flight. Credits and acknowledgements have words of their own, so no small message waits behind them."""
    async with other_process("shm", "echo") as (channel, _), asyncio.TaskGroup() as group:
        group.create_task(send_sizes(channel, sizes, count))
        await receive_sizes(channel, sizes, count)
        assert channel.statistics().late_wakeups == 0


def test_an_abandoned_message_is_dropped_while_the_next_one_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow reader reads its chunks when the first tensor of the next message has been copied, and the last has not."""
    copy_from(monkeypatch, 20_000)
    with ring(limits_of(1)) as (_, _, writer, reader):
        assert not writer.advance(numbered(0, 800_000))
        writer.copy_threads.wait()
        writer.abandon()
        tensors = tuple(Tensor(TensorSpec("uint8", (nbytes,)), bytearray([1]) * nbytes) for nbytes in (25_000, 26_000))
        queued: list[tuple[Any, ...]] = []
        with monkeypatch.context() as held:
            held.setattr(writer.copy_threads, "copy", lambda *arguments: queued.append(arguments))
            assert writer.advance(Message("data", Tag("s@1", step=1), 1, None, tensors))
        first, second = queued
        for copy in (first, second):
            writer.copy_threads.copy(*copy)
            writer.copy_threads.wait()
            message = next(filter(None, (reader.take() for _ in range(8))), None)  # it drains a few chunks at a time
            assert (message is None) == (copy is first)
        assert message is not None
        assert [bytes(tensor.data) for tensor in message.tensors] == [bytes(tensor.data) for tensor in tensors]
