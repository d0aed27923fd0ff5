"""The shared-memory transport: atomic words, leases, hostile and corrupt peers, lost wake-ups, and cleanup."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import random
import socket
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowrt.transports.channel.blocks import Block
from flowrt.transports.channel.rendezvous import socket_address
from flowrt.transports.conformance.connection_checks import HERE, KEY, SMALL, THERE, pair_maker
from flowrt.transports.conformance.kit import check_numbered, numbered, opened, receive_all, send_all, until, within
from flowrt.transports.conformance.process_checks import other_process
from flowrt.transports.contract import Limits, Listener
from flowrt.transports.errors import BrokenChannelError, HandshakeError, UnavailableError
from flowrt.transports.registry import get_transport, unavailable_reason
from flowrt.transports.shared_memory import transport as shared_memory
from flowrt.transports.shared_memory.ring import HEAD, RELEASED, TAIL, WRITER_SLEEPS, Layout
from flowrt.transports.shared_memory.ring_reader import MIN_BLOCK_BYTES
from flowrt.transports.shared_memory.ring_writer import RingWriter
from flowrt.transports.shared_memory.transport import SharedMemoryChannel, sealed_memory
from flowrt.transports.wire.codec import WireError
from flowrt.transports.wire.handshake import Handshake
from flowrt.transports.wire.message import Message, Tensor, TensorSpec

if unavailable_reason("shm") is not None:
    pytest.skip(str(unavailable_reason("shm")), allow_module_level=True)

from rings import check_next, copy_from, mappings, new_memory, ring

from flowrt.transports.native._words import Leases, Memory

LIMITS = Limits(max_header_bytes=512, max_tensors=4, max_message_bytes=1 << 19, capacity_messages=16, capacity_bytes=1 << 18)


def _fill(writer: RingWriter) -> None:
    for number in range(100):
        writer.send(numbered(number, 5000))


class TestWords:
    def test_store_load_publish(self) -> None:
        memory = new_memory(4096)
        memory.store(8, 2**64 - 1)
        assert memory.load(8) == 2**64 - 1
        assert memory.publish(16, 5, 24) is False
        memory.raise_flag(24)
        assert memory.publish(16, 6, 24) is True
        assert (memory.load(16), memory.load(24)) == (6, 0)

    @pytest.mark.parametrize("offset", [-8, 1, 4, 4089, 4096, 2**70])
    def test_only_aligned_words_inside(self, offset: int) -> None:
        memory = new_memory(4096)
        with pytest.raises((IndexError, OverflowError)):
            memory.load(offset)
        with pytest.raises((IndexError, OverflowError)):
            memory.store(offset, 1)

    def test_values_are_64_bit(self) -> None:
        memory = new_memory(4096)
        for value in (-1, 2**64):
            with pytest.raises(OverflowError):
                memory.store(0, value)
        with pytest.raises(TypeError):
            memory.store(0)  # type: ignore[call-arg]

    def test_a_mapping_of_nothing_is_refused(self) -> None:
        with pytest.raises(ValueError):
            Memory(0, 0)
        with pytest.raises(OSError):
            Memory(-1, 4096)

    def test_writes_are_seen_through_a_second_mapping(self) -> None:
        one, two = mappings(8192)
        memoryview(one)[100:104] = b"abcd"
        one.store(0, 77)
        assert two.load(0) == 77
        assert bytes(memoryview(two)[100:104]) == b"abcd"


class TestLeases:
    AREA = 4096

    def leases(self) -> tuple[Memory, Leases]:
        memory = new_memory(2 * 4096)
        return memory, Leases(memory, 4096, self.AREA, RELEASED, WRITER_SLEEPS, -1)

    def test_released_prefix_is_published(self) -> None:
        memory, leases = self.leases()
        taken = [leases.lease(start, 1000) for start in (0, 1000, 2000)]
        del taken[1]
        assert (memory.load(RELEASED), leases.held) == (0, 2)
        del taken[0]
        assert (memory.load(RELEASED), leases.held) == (2000, 1)
        taken.clear()
        assert (memory.load(RELEASED), leases.held) == (3000, 0)

    def test_a_view_keeps_its_lease(self) -> None:
        memory, leases = self.leases()
        view = memoryview(leases.lease(0, 100))[10:20]
        view[:] = b"0123456789"
        assert leases.held == 1
        assert bytes(memoryview(memory)[4096 + 10 : 4096 + 20]) == b"0123456789"
        del view
        assert leases.held == 0

    @pytest.mark.parametrize(
        ("start", "nbytes"),
        [(0, 0), (0, 4097), (4000, 200), (999, 10), (4096 + 1000, 3000), (4096 + 900, 200), (2**63, 4096), (2**64 - 4096, 4097)],
    )
    def test_impossible_ranges_are_refused(self, start: int, nbytes: int) -> None:
        _, leases = self.leases()
        held = leases.lease(0, 1000)
        with pytest.raises((ValueError, OverflowError)):
            leases.lease(start, nbytes)
        assert leases.held == 1
        del held

    def test_leases_die_on_other_threads(self) -> None:
        memory, leases = self.leases()
        taken = [leases.lease(start, 4) for start in range(0, 4096, 4)]
        random.Random(1).shuffle(taken)
        lock = threading.Lock()

        def drop() -> None:
            while True:
                with lock:
                    if not taken:
                        return
                    lease = taken.pop()
                del lease

        threads = [threading.Thread(target=drop) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert (memory.load(RELEASED), leases.held) == (4096, 0)

    @given(st.integers(0, 2**32), st.integers(1, 60))
    @settings(max_examples=50)
    def test_any_order_of_release(self, seed: int, held_at_once: int) -> None:
        """A writer that follows the rules is never refused, and nothing it may overwrite is held."""
        memory, leases = self.leases()
        choose = random.Random(seed)
        held: dict[int, object] = {}
        placed = 0
        for _ in range(300):
            nbytes = choose.randint(1, 300)
            released = memory.load(RELEASED)
            start = placed + (-placed % self.AREA if placed % self.AREA + nbytes > self.AREA else 0)
            if released == placed and choose.random() < 0.5:
                start = placed + -placed % self.AREA
            if start + nbytes - released <= self.AREA and len(held) < held_at_once:
                held[start] = leases.lease(start, nbytes)
                placed = start + nbytes
            elif held:
                del held[choose.choice(list(held))]
            assert all(start >= memory.load(RELEASED) for start in held)
            assert leases.held == len(held)
        held.clear()
        assert memory.load(RELEASED) == placed


class TestRing:
    def test_payloads_that_grow_are_placed_in_an_area_that_is_free(self) -> None:
        """Each is longer than what lies before the place where the last one ended."""
        with ring(LIMITS) as (_, layout, writer, reader):
            for number, size in enumerate([9000, 10_000, 20_000, 40_000, layout.area_bytes // 2, 9000, layout.area_bytes // 2]):
                assert writer.send(numbered(number, size), True)
                writer.copy_threads.wait()
                message = reader.take()
                assert message is not None
                assert type(message.tensors[0].data) is memoryview, "a lease, and no copy that came in chunks"
                check_numbered(message, number, size)
                del message

    @given(st.lists(st.tuples(st.integers(8193, 90_000), st.integers(0, 3)), max_size=60))
    @settings(max_examples=100, deadline=None)
    def test_no_placed_payload_is_written_over(self, steps: list[tuple[int, int]]) -> None:
        with ring(LIMITS) as (_, _, writer, reader):
            held: list[tuple[int, int, Message]] = []
            for number, (size, num_kept) in enumerate(steps):
                while not writer.advance(numbered(number, size)):
                    assert reader.take() is None
                writer.copy_threads.wait()
                while (message := reader.take()) is None:
                    pass
                held.append((number, size, message))
                del message
                for each, nbytes, kept in held:
                    check_numbered(kept, each, nbytes)
                    del kept
                del held[: max(0, len(held) - num_kept)]

    def test_what_a_copy_thread_copies_is_sent_only_when_the_caller_waits(self, monkeypatch: pytest.MonkeyPatch) -> None:
        bulk = 20_000
        copy_from(monkeypatch, bulk)
        with ring(LIMITS) as (_, _, writer, reader):
            assert writer.send(numbered(0, bulk - 1))
            assert not writer.copying
            assert not writer.send(numbered(1, bulk))
            assert writer.send(numbered(1, bulk), True)
            assert writer.copying
            writer.copy_threads.wait()
            for number, size in enumerate([bulk - 1, bulk]):
                check_next(reader, number, size)

    @given(st.data())
    @settings(max_examples=150, deadline=None)
    def test_corrupt_records_only_ever_break(self, data: st.DataObject) -> None:
        """Whatever the peer writes, the reader refuses it or returns a message within the limits."""
        with ring(LIMITS) as (memory, layout, writer, reader):
            for number in range(4):
                writer.send(numbered(number, [5, 9000, 0, 100][number]))
            view = memoryview(memory)
            for _ in range(data.draw(st.integers(1, 6))):
                place = layout.records(0) + data.draw(st.integers(0, 700))
                view[place] = data.draw(st.integers(0, 255))
            if data.draw(st.booleans()):
                memory.store(HEAD, data.draw(st.integers(0, 2**64 - 1) | st.integers(0, 4096)))
            try:
                for _ in range(10):
                    message = reader.take()
                    if message is not None:
                        assert message.payload_bytes <= LIMITS.max_message_bytes
            except WireError:
                return

    @pytest.mark.parametrize("word", [TAIL, RELEASED])
    def test_impossible_cursors_break_the_writer(self, word: int) -> None:
        with ring(LIMITS) as (memory, _, writer, _):
            memory.store(word, 1 << 40)
            with pytest.raises(WireError, match="cursor"):
                _fill(writer)

    @pytest.mark.parametrize("nbytes", [20_000, 1 << 18])
    def test_a_message_behind_an_abandoned_one_is_taken_when_it_is_copied(self, nbytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
        """Its copy threads announced the abandoned message of the same number."""
        copy_from(monkeypatch, 20_000)
        with ring(LIMITS) as (_, _, writer, reader):
            assert not writer.advance(numbered(0, 1 << 19))
            writer.copy_threads.wait()
            assert reader.take() is None
            writer.abandon()
            assert reader.take() is None
            queued: list[tuple[Any, ...]] = []
            with monkeypatch.context() as held:
                held.setattr(writer.copy_threads, "copy", lambda *arguments: queued.append(arguments))
                writer.advance(numbered(1, nbytes))
                assert queued
                assert reader.take() is None, "nothing of it was copied"
            for arguments in queued:
                writer.copy_threads.copy(*arguments)
            message = None
            while message is None:
                writer.copy_threads.wait()
                message = reader.take()
                if message is None and nbytes > 20_000:
                    writer.advance(numbered(1, nbytes))
            check_numbered(message, 1, nbytes)

    @pytest.mark.parametrize("nbytes", [20_000, 1 << 18])
    def test_nothing_is_sent_when_no_copy_thread_can_start(self, nbytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse() -> None:
            raise OSError(errno.EAGAIN, "Resource temporarily unavailable")

        copy_from(monkeypatch, 20_000)
        with ring(LIMITS) as (_, _, writer, reader):
            monkeypatch.setattr(writer.copy_threads, "start", refuse)
            with pytest.raises(WireError, match="no thread can be started to copy a payload: Resource temporarily unavailable"):
                writer.advance(numbered(0, nbytes))
            assert not reader.has_message()


def test_memory_is_sealed_and_there() -> None:
    memfd = sealed_memory(1 << 16)
    try:
        assert os.fstat(memfd).st_blocks * 512 >= 1 << 16
        for size in (0, 1 << 20):
            with pytest.raises(PermissionError):
                os.ftruncate(memfd, size)
        with pytest.raises(PermissionError):
            fcntl.fcntl(memfd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    finally:
        os.close(memfd)


async def test_no_memory_is_an_error_of_connect(monkeypatch: pytest.MonkeyPatch) -> None:
    """An impossible size and a kernel that refuses both give a readable error."""

    def refuse(descriptor: int, offset: int, nbytes: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", refuse)  # and so this test cannot take the machine's memory either
    with pytest.raises(UnavailableError, match="No space left"):
        sealed_memory(4096)
    huge = Limits(capacity_bytes=1 << 60)
    transport = get_transport("shm")
    async with await transport.listen("shm://", huge, KEY, HERE) as listener:
        with pytest.raises(UnavailableError, match="lower the limits"):
            await transport.connect(listener.address, huge, KEY, THERE)


async def test_memory_of_freed_large_messages_is_used_again(monkeypatch: pytest.MonkeyPatch, loop_kind: str) -> None:
    """The first use of a page costs more than a copy into it. Messages that the user holds keep memory of their own."""
    made: list[Block] = []

    def new_block(fd: int, nbytes: int, flags: int) -> Block:
        made.append(Block(fd, nbytes, flags))
        return made[-1]

    monkeypatch.setattr("flowrt.transports.channel.blocks.Block", new_block)
    size = 2 * MIN_BLOCK_BYTES
    async with opened(pair_maker("shm"), Limits(max_message_bytes=size, capacity_bytes=size // 2)) as (one, two):

        async def carry_large(number: int) -> Message:
            sending = asyncio.ensure_future(one.send(numbered(number, size)))
            message = await within(two.recv(), "recv")
            await sending
            check_numbered(message, number, size)
            return message

        for number in range(3):
            await carry_large(number)
        assert len(made) == 1
        held = await carry_large(3)
        await carry_large(4)
        assert len(made) == 2
        check_numbered(held, 3, size)


async def test_a_lost_wake_up_is_found_and_counted(monkeypatch: pytest.MonkeyPatch, loop_kind: str) -> None:
    monkeypatch.setattr(shared_memory, "PATIENT_CHECKS", 1)
    one, two = await pair_maker("shm")(SMALL)
    async with one, two:
        assert isinstance(one, SharedMemoryChannel)
        elsewhere = os.eventfd(0, os.EFD_NONBLOCK)
        os.dup2(elsewhere, one._peer_wake, inheritable=False)  # a promise not kept
        os.close(elsewhere)
        receiving = asyncio.ensure_future(two.recv())
        await until(lambda: two._reader.flag_is_up(), "recv sleeps")  # type: ignore[attr-defined]
        await one.send(numbered(3))
        check_numbered(await within(receiving, "recv"), 3)
        assert two.statistics().late_wakeups == 1


async def test_only_sleeping_readers_are_woken() -> None:
    one, two = await pair_maker("shm")(SMALL)
    async with one, two:
        await send_all(one, 0, 8)
        await receive_all(two, 0, 8)
        for channel in (one, two):
            assert isinstance(channel, SharedMemoryChannel)
            with pytest.raises(BlockingIOError):
                os.eventfd_read(channel._own_wake)


async def test_a_corrupt_ring_breaks_the_channel_after_what_was_whole(loop_kind: str) -> None:
    one, two = await pair_maker("shm")(SMALL)
    async with one, two:
        await send_all(one, 0, 2)
        assert isinstance(one, SharedMemoryChannel)
        one._writer._memory.store(one._writer._words + HEAD, one._writer._memory.load(one._writer._words + HEAD) + 32)
        await receive_all(two, 0, 2)
        for _ in range(2):
            with pytest.raises(BrokenChannelError):
                await two.recv()
        with pytest.raises(BrokenChannelError):
            await two.send(Message("x"))


async def _call(address: str) -> socket.socket:
    _, path = socket_address("shm", address.partition("://")[2])
    sock = socket.socket(socket.AF_UNIX)
    sock.setblocking(False)
    sock.connect(path)
    return sock


async def _rejects(listener: Listener, count: int) -> None:
    async with asyncio.timeout(60):
        while listener.rejected < count:  # noqa: ASYNC110  (a counter wakes no task)
            await asyncio.sleep(0.005)
    assert listener.rejected == count


@pytest.mark.parametrize("sent_bytes", [b"", b"x", b"GET / HTTP/1.1\r\n\r\n", bytes(5000), b"\xff" * 100])
async def test_strangers_cost_only_their_own_connection(sent_bytes: bytes, loop_kind: str) -> None:
    async with await get_transport("shm").listen("shm://", SMALL, KEY, HERE) as listener:
        for _ in range(3):
            sock = await _call(listener.address)
            sock.send(sent_bytes or b"\0", socket.MSG_NOSIGNAL)
            sock.close()
        await _rejects(listener, 3)
        one = await get_transport("shm").connect(listener.address, SMALL, KEY, THERE)
        async with one, await listener.accept() as two:
            await one.send(numbered(1))
            await receive_all(two, 1, 2)


@pytest.mark.parametrize("wrong", ["no descriptors", "unsealed", "wrong size", "not an eventfd", "too many"])
async def test_what_an_authenticated_peer_passes_is_checked_too(wrong: str) -> None:
    size = Layout.of(SMALL).total_bytes
    memfd = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.ftruncate(memfd, size)
    wakes = [os.eventfd(0, os.EFD_NONBLOCK), os.eventfd(0, os.EFD_NONBLOCK)]
    good = sealed_memory(size)
    small = sealed_memory(4096)
    null = os.open("/dev/null", os.O_RDWR | os.O_NONBLOCK)
    passed = {
        "no descriptors": [],
        "unsealed": [memfd, *wakes],
        "wrong size": [small, *wakes],
        "not an eventfd": [good, wakes[0], null],
        "too many": [good, *wakes, null, null, null],
    }[wrong]
    try:
        async with await get_transport("shm").listen("shm://", SMALL, KEY, HERE) as listener:
            sock = await _call(listener.address)
            shake = Handshake("connector", KEY, THERE, SMALL, scheme="shm")
            sock.send(shake.start())
            loop = asyncio.get_running_loop()
            async with asyncio.timeout(60):
                proof = shake.receive(await loop.sock_recv(sock, 4096))
                socket.send_fds(sock, [proof], passed) if passed else sock.send(proof)
                assert await loop.sock_recv(sock, 10) == b""
            await _rejects(listener, 1)
            sock.close()
    finally:
        for descriptor in (memfd, *wakes, good, small, null):
            os.close(descriptor)


async def test_a_listener_that_hangs_up_is_a_handshake_error() -> None:
    with socket.socket(socket.AF_UNIX) as listening:
        _, path = socket_address("shm", "impostor")
        listening.bind(path)
        listening.listen()
        listening.setblocking(False)
        connecting = asyncio.ensure_future(get_transport("shm").connect("shm://impostor", SMALL, KEY, THERE))
        async with asyncio.timeout(60):
            caller, _ = await asyncio.get_running_loop().sock_accept(listening)
            caller.close()
            with pytest.raises(HandshakeError):
                await connecting


async def test_nothing_is_left_in_the_file_system(loop_kind: str) -> None:
    before = set(os.listdir("/dev/shm")), set(os.listdir("/tmp"))
    async with other_process("shm", "echo") as (channel, peer):
        await channel.send(numbered(0, 50_000))
        check_numbered(await channel.recv(), 0, 50_000)
        assert {name for name in os.listdir("/dev/shm") if "flowrt" in name} == {name for name in before[0] if "flowrt" in name}
        assert not any("flowrt" in name for name in set(os.listdir("/tmp")) - before[1])
        peer.kill()
        await peer.wait()


async def test_the_mapping_goes_with_the_last_tensor() -> None:
    def mapped() -> int:
        return Path("/proc/self/maps").read_text().count("memfd:flowrt")

    before = mapped()
    one, two = await pair_maker("shm")(Limits())
    await one.send(Message("data", tensors=(Tensor(TensorSpec("uint8", (100_000,)), bytes(100_000)),)))
    message = await two.recv()
    await one.aclose()
    await two.aclose()
    del one, two
    assert mapped() == before + 1
    assert bytes(memoryview(message.tensors[0].data)[:10]) == bytes(10)  # type: ignore[arg-type]
    del message
    assert mapped() == before
