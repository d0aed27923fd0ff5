"""UCX beyond the common contract: what is done before a peer is trusted, frames that are none, the two lanes, peers that die or stop."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from flowrt.transports.conformance.connection_checks import HERE, KEY, THERE, other_process, pair_maker, pause
from flowrt.transports.conformance.kit import check_numbered, numbered, opened, receive_all, send_all, within
from flowrt.transports.contract import Channel, Limits
from flowrt.transports.errors import BrokenChannelError, HandshakeError
from flowrt.transports.registry import get_transport, unavailable_reason
from flowrt.transports.ucx import endpoint as ucx_link
from flowrt.transports.ucx import transport as ucx
from flowrt.transports.ucx.endpoint import Link
from flowrt.transports.ucx.regions import ALIGNMENT, PIECE_BYTES, PIECES_AHEAD, cuts, region_layout
from flowrt.transports.ucx.transport import UCXChannel, UCXTransport
from flowrt.transports.wire.codec import encode_envelope
from flowrt.transports.wire.message import Message, Tensor, TensorSpec


def test_without_the_package_the_scheme_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ucxx._lib.libucxx", None)
    monkeypatch.setitem(sys.modules, "ucxx._lib", None)
    ucx_link._library.cache_clear()
    ucx_link.unavailable_reason.cache_clear()
    try:
        reason = unavailable_reason("ucx")
        assert reason is not None
        assert "ucxx" in reason
        assert "pip install 'flowrt[ucx]'" in reason
        assert unavailable_reason("inproc") is None
    finally:
        ucx_link._library.cache_clear()
        ucx_link.unavailable_reason.cache_clear()


def test_the_library_is_loaded_by_those_who_ask_for_the_scheme_only() -> None:
    code = "import sys; from flowrt.transports.registry import unavailable_reason as r; r('zmq'); r('shm'); sys.exit('ucxx' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})


def test_an_environment_that_ucx_cannot_stand_is_a_reason_and_no_crash() -> None:
    code = "from flowrt.transports.registry import unavailable_reason as r; print(r('ucx'))"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "UCX_MEM_EVENTS": "n"}
    done = subprocess.run([sys.executable, "-c", code], check=True, env=environment, capture_output=True, text=True)
    assert done.stdout.startswith("ucx "), done


needs_ucx = pytest.mark.skipif(unavailable_reason("ucx") is not None, reason=str(unavailable_reason("ucx")))
WIDE = Limits(max_message_bytes=1 << 24, capacity_messages=1000, capacity_bytes=1 << 26)


def both(pair: tuple[Channel, Channel]) -> tuple[UCXChannel, UCXChannel]:
    one, two = pair
    assert isinstance(one, UCXChannel)
    assert isinstance(two, UCXChannel)
    return one, two


@asynccontextmanager
async def a_pair(limits: Limits = WIDE) -> AsyncIterator[tuple[UCXChannel, UCXChannel]]:
    async with opened(pair_maker("ucx"), limits) as pair:
        one, two = both(pair)
        for sender, receiver in ((one, two), (two, one)):  # UCX is through with its own greetings after this
            await sender.send(numbered(0, 10_000))
            check_numbered(await within(receiver.recv(), "recv"), 0, 10_000)
        yield one, two


class Asleep:
    """An end whose process is stopped: it sees nothing, until `wake`."""

    def __init__(self, channel: UCXChannel) -> None:
        self.channel = channel
        self._loop = asyncio.get_running_loop()
        self._loop.remove_reader(channel._link.descriptor)
        self._loop.remove_reader(channel._regions_in._line.fileno())
        self.turn = channel._turn
        channel._turn = lambda: None  # type: ignore[method-assign]

    def wake(self) -> None:
        del self.channel._turn  # type: ignore[method-assign]
        self._loop.add_reader(self.channel._link.descriptor, self.channel._turn)
        self._loop.add_reader(self.channel._regions_in._line.fileno(), self.channel._lifeline._on_readable)
        self._loop.call_soon(self.channel._turn)


@needs_ucx
async def test_ucx_works_between_two_questions_whether_anything_is_left(loop_kind: str) -> None:
    """A No may mean that a signal was taken: what the signal told of is seen by work alone, and a Yes after it would be the last word."""
    async with a_pair() as (_, two):
        link = two._link
        calls: list[str] = []
        answers = [False, False, True]
        work, ask = link.progress, link.arm
        link.progress = lambda: calls.append("work") or work()
        link.arm = lambda: calls.append("ask") or (answers.pop(0) if answers else ask())
        two._turn()
        assert calls == ["work", "ask"] * 3
        link.progress, link.arm = work, ask
        two._turn()  # the last answer was not the library's


@needs_ucx
async def test_nothing_of_ucx_before_the_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither side opens a worker, tells or uses an address for a peer that has another key."""
    opened_links: list[object] = []
    monkeypatch.setattr(ucx, "Link", lambda: opened_links.append(1))
    async with await get_transport("ucx").listen("ucx://", WIDE, KEY, HERE) as listener:
        with pytest.raises(HandshakeError):
            await get_transport("ucx").connect(listener.address, WIDE, bytes(32), THERE)
        await asyncio.sleep(0.02)
        assert listener.rejected == 1
    assert not opened_links


@needs_ucx
async def test_a_stranger_with_the_address_is_not_heard(loop_kind: str) -> None:
    """The tags are secrets of the handshake."""
    async with a_pair() as (one, two):
        stranger = Link()
        try:
            stranger.connect(two._link.address())
            requests = [stranger.send(stranger.array(bytes(100)), stranger.tag(number)) for number in (0, 1, 2**64 - 1)]
            await one.send(numbered(0, 100))
            check_numbered(await within(two.recv(), "recv"), 0, 100)
            for _ in range(20):
                stranger.progress()
                await asyncio.sleep(0.001)
            await one.send(numbered(1, 1 << 20))
            check_numbered(await within(two.recv(), "recv"), 1, 1 << 20)
            assert two.statistics().messages_received == 3
            del requests
        finally:
            stranger.close()


@needs_ucx
async def test_a_greeting_without_the_proof_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = UCXChannel.__init__

    def lying(self: UCXChannel, side: str, meeting: Any, link: Link) -> None:
        if side == "listener":
            shake = meeting.handshake
            real = shake.session_key
            shake.session_key = lambda label: bytes(32) if label == "ucx greeting" else real(label)
        honest(self, side, meeting, link)

    monkeypatch.setattr(UCXChannel, "__init__", lying)
    async with await get_transport("ucx").listen("ucx://", WIDE, KEY, HERE) as listener, asyncio.timeout(10):
        with pytest.raises(HandshakeError, match="somebody else"):
            await get_transport("ucx").connect(listener.address, WIDE, KEY, THERE)


def frame(kind: int, envelope_bytes: int = 0, a: int = 0, b: int = 0, read: int = 2, body: bytes = b"") -> bytes:
    return ucx._HEAD.pack(kind, envelope_bytes, a, b, read) + body


TOO_LARGE = encode_envelope(Message("data", tensors=(Tensor(TensorSpec("uint8", (1 << 25,)), b""),)), 0)[0]


@needs_ucx
@pytest.mark.parametrize(
    "wrong",
    [
        frame(99),
        frame(0),
        frame(ucx._MESSAGE),
        frame(ucx._MESSAGE, 2**32 - 1),
        frame(ucx._MESSAGE, 5, body=b"\xc1\xc1\xc1\xc1\xc1"),
        frame(ucx._TAKEN, a=2, b=1),
        frame(ucx._WAITING, read=1000),
        frame(ucx._GREETING, body=bytes(64)),
        frame(ucx._REGION),
        frame(ucx._REGION, 2**32 - 1),
        frame(ucx._REGION, 5, body=b"\xc1\xc1\xc1\xc1\xc1"),
        frame(ucx._REGION, len(TOO_LARGE), body=TOO_LARGE),
        frame(ucx._ENVELOPE),
        b"x" * (ucx.FRAME_BYTES + 1),
        b"x" * 100_000,
    ],
    ids=lambda wrong: f"{wrong[0]}-{len(wrong)}-{wrong[4:7].hex()}",
)
async def test_frames_that_are_none_break_the_channel_and_take_no_memory(wrong: bytes, loop_kind: str) -> None:
    async with a_pair() as (one, two):
        taken: list[int] = []
        two._pool.take = taken.append  # type: ignore[method-assign, assignment]
        await one.send(numbered(0))
        check_numbered(await within(two.recv(), "recv"), 0)
        request = one._link.send(one._link.array(wrong), one._tag)
        async with asyncio.timeout(10):
            with pytest.raises(BrokenChannelError):
                await two.recv()
            with pytest.raises(BrokenChannelError):
                await one.recv()
        assert not taken
        del request


@needs_ucx
async def test_a_region_without_credit_takes_no_memory(loop_kind: str) -> None:
    async with a_pair(Limits(capacity_messages=2, max_message_bytes=1 << 20)) as (one, two):
        taken: list[int] = []
        take = two._pool.take
        two._pool.take = lambda nbytes: (taken.append(nbytes), take(nbytes))[1]  # type: ignore[method-assign]
        for number in range(1, 4):
            envelope = encode_envelope(numbered(number, 100_000), number)[0]
            one._write(ucx._REGION, len(envelope), body=envelope)
        with pytest.raises(BrokenChannelError, match="more than the channel may hold"):
            await within(two.recv(), "recv")
        assert len(taken) == 2


@needs_ucx
@pytest.mark.parametrize(
    "change",
    [lambda piece: piece[:-1], lambda piece: piece + b"x"],
    ids=["short", "long"],
)
async def test_pieces_that_do_not_fit_break_the_channel(change: Callable[[bytes], bytes], loop_kind: str) -> None:
    async with a_pair() as (one, two):
        send = one._regions_out.send
        one._regions_out.send = lambda tensors: send([change(bytes(part)) for part in tensors])  # type: ignore[method-assign]
        await one.send(numbered(0, 20_000))
        with pytest.raises(BrokenChannelError):
            await within(two.recv(), "recv")


@needs_ucx
async def test_large_tensors_lie_in_a_block_until_the_last_view_is_gone(loop_kind: str) -> None:
    async with a_pair() as (one, two):
        specs = (TensorSpec("float32", (100, 100)), TensorSpec("uint8", (3,)), TensorSpec("bfloat16", (1000, 77)), TensorSpec("int8", (0,)))
        await one.send(Message("data", tensors=tuple(Tensor(spec, os.urandom(spec.nbytes)) for spec in specs)))
        message = await within(two.recv(), "recv")
        assert two.statistics().held_buffers == 1
        views: Any = [tensor.data for tensor in message.tensors]
        import numpy as np

        assert all(np.frombuffer(view, np.uint8).ctypes.data % ALIGNMENT == 0 for view in views if len(view))
        part = views[2][7:9]
        part[0] = 1  # ours to write
        del message, views
        assert two.statistics().held_buffers == 1
        del part
        assert two.statistics().held_buffers == 0


@needs_ucx
async def test_blocks_are_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async with a_pair(Limits(capacity_bytes=1 << 22)) as (one, two):
        made: list[int] = []
        import mmap

        real = mmap.mmap
        monkeypatch.setattr("flowrt.transports.ucx.blocks.mmap.mmap", lambda fd, size, flags: (made.append(size), real(fd, size, flags))[1])
        for number in range(50):
            await one.send(numbered(number, 300_000))
            check_numbered(await within(two.recv(), "recv"), number, 300_000)
        assert len(made) <= 8


@needs_ucx
async def test_small_tensors_are_copied_and_large_ones_read_where_they_lie(loop_kind: str) -> None:
    assert UCXTransport.capabilities.borrows_sender
    async with a_pair() as (one, two):
        for nbytes in (100, 7000, 100_000, 3 * PIECE_BYTES + 1):
            sleeping = Asleep(two)
            data = bytearray(b"a" * nbytes)
            await one.send(Message("data", tensors=(Tensor(TensorSpec("uint8", (nbytes,)), data),)))
            large = nbytes > ucx.FRAME_BYTES
            if large:
                with pytest.raises(BufferError):
                    data.append(0)  # nobody can take the memory away meanwhile
            data[:] = b"b" * nbytes  # against the contract when it is large: a copy would not have it
            sleeping.wake()
            received: Any = (await within(two.recv(), "recv")).tensors[0].data
            assert bytes(received) == (b"b" if large else b"a") * nbytes
            async with asyncio.timeout(10):
                while one._regions_out.sent:  # noqa: ASYNC110  # nobody is told
                    await asyncio.sleep(0.001)
            data.append(0)


@needs_ucx
async def test_an_envelope_that_fits_no_frame_goes_ahead_in_parts(loop_kind: str) -> None:
    async with a_pair() as (one, two):
        header = msgspec.msgpack.encode("x" * 3 * ucx.FRAME_BYTES)
        for tensors in ((), numbered(0, 100_000).tensors, (Tensor(TensorSpec("uint8", (0,)), b""),)):
            await one.send(Message("data", header=header, tensors=tensors))
            await one.send(numbered(1))
            received = await within(two.recv(), "recv")
            assert received.header == header
            assert [bytes(each.data) for each in received.tensors] == [bytes(each.data) for each in tensors]  # type: ignore[call-overload]
            check_numbered(await within(two.recv(), "recv"), 1)


@needs_ucx
async def test_credits_do_not_wait_behind_payload(loop_kind: str) -> None:
    """A small message that comes after a large one waits for its turn; a credit for the other direction does not."""
    async with a_pair() as (one, two):
        sleeping = Asleep(two)
        for number in range(8):
            one.send_nowait(numbered(number, 1 << 21))
        one._say_taken(1, 10_000)
        heard: list[tuple[int, int]] = []
        two._hear_taken = lambda *told: heard.append(told)  # type: ignore[method-assign, func-returns-value]
        two._link.progress()
        two._look()
        assert heard == [(1, 10_000)]
        sleeping.wake()
        await receive_all(two, 0, 8, 1 << 21)


@needs_ucx
async def test_a_peer_that_does_not_read_is_not_sent_more_than_the_ring_takes(loop_kind: str) -> None:
    async with a_pair() as (one, two):
        sleeping = Asleep(two)
        for number in range(500):
            assert one.send_nowait(numbered(number, 0 if number % 3 else 20_000))
        await asyncio.sleep(0.02)
        assert one._frames_sent - one._frames_told == ucx.FRAMES_AHEAD
        assert len(one._regions_out.sent) == PIECES_AHEAD
        turns = []
        real = one._turn
        one._turn = lambda: (turns.append(1), real())[1]  # type: ignore[method-assign, func-returns-value]
        await asyncio.sleep(0.05)
        assert not turns  # nothing spins meanwhile
        sleeping.wake()
        for number in range(500):
            check_numbered(await within(two.recv(), "recv"), number, 0 if number % 3 else 20_000)


@needs_ucx
async def test_nothing_spins_while_a_new_peer_does_not_answer(loop_kind: str) -> None:
    """UCX's first large message must wait until the peer has answered something."""
    async with opened(pair_maker("ucx"), WIDE) as pair:
        one, two = both(pair)
        sleeping = Asleep(two)
        for number in range(20):
            assert one.send_nowait(numbered(number, 20_000))
        await asyncio.sleep(0.02)
        turns: list[int] = []
        real = one._turn
        one._turn = lambda: (turns.append(1), real())[1]  # type: ignore[method-assign, func-returns-value]
        await asyncio.sleep(0.05)
        assert not turns
        sleeping.wake()
        await receive_all(two, 0, 20, 20_000)


@needs_ucx
async def test_both_ends_full_go_on(loop_kind: str) -> None:
    """The words that make room do not wait for room themselves."""
    async with a_pair() as (one, two), asyncio.TaskGroup() as group:
        sleepers = [Asleep(one), Asleep(two)]
        for number in range(400):
            for end in (one, two):
                assert end.send_nowait(numbered(number, 10))
        for sleeper in sleepers:
            sleeper.wake()
        for end in (one, two):
            group.create_task(receive_all(end, 0, 400, 10))


@needs_ucx
async def test_an_idle_channel_does_nothing(loop_kind: str) -> None:
    async with a_pair() as (one, two):
        await one.send(numbered(0, 100_000))
        check_numbered(await within(two.recv(), "recv"), 0, 100_000)
        await asyncio.sleep(0.05)
        turns: list[int] = []
        for end in (one, two):
            real = end._link.progress
            end._link.progress = lambda real=real: (turns.append(1), real())[1]
        await asyncio.sleep(0.1)
        assert not turns
        await one.send(numbered(1))
        check_numbered(await within(two.recv(), "recv"), 1)
        assert len(turns) <= 8


@needs_ucx
async def test_a_region_whose_sender_has_gone_is_not_believed(monkeypatch: pytest.MonkeyPatch, loop_kind: str) -> None:
    """A stopped receiver wakes up when the sender has given up, and its memory may hold anything."""
    monkeypatch.setattr(ucx, "LINGER_SECONDS", 0.05)
    async with a_pair() as (one, two):
        sleeping = Asleep(two)
        await one.send(numbered(0, 10))
        await one.send(numbered(1, 1 << 20))
        await within(one.aclose(), "aclose")
        sleeping.wake()
        check_numbered(await within(two.recv(), "what was in our own ring"), 0, 10)
        with pytest.raises(BrokenChannelError):
            await within(two.recv(), "recv")


@needs_ucx
async def test_nothing_is_left_of_a_channel_whose_peer_is_stopped_and_killed(loop_kind: str) -> None:
    """With everything full: frames and regions that nobody will read. (What is left is counted by every test.)"""
    for then in (signal.SIGKILL, signal.SIGCONT):
        async with other_process("ucx", "hang") as (channel, peer):
            pause(peer)
            number = 0
            while channel.send_nowait(numbered(number, 30_000)):
                number += 1
            await asyncio.sleep(0.02)
            peer.send_signal(then)
            if then == signal.SIGKILL:
                with pytest.raises(BrokenChannelError, match="died"):
                    await within(channel.recv(), "recv")
    gc.collect()


@needs_ucx
async def test_a_peer_killed_in_the_middle_of_large_messages(loop_kind: str) -> None:
    for seconds in (0.0, 0.01, 0.03):
        async with other_process("ucx", "echo") as (channel, peer):

            async def receive(channel: Channel = channel) -> None:
                for number in range(1 << 30):
                    check_numbered(await channel.recv(), number, 200_000)

            tasks = [asyncio.ensure_future(send_all(channel, 0, 1 << 30, 200_000)), asyncio.ensure_future(receive())]
            await asyncio.sleep(seconds)
            peer.kill()
            results = await within(asyncio.gather(*tasks, return_exceptions=True), "a dead peer ends all calls")
            assert [type(result) for result in results] == [BrokenChannelError] * 2


def test_layout_of_a_region() -> None:
    assert region_layout([0]) == ([0], 0)
    assert region_layout([7]) == ([0], 64)
    assert region_layout([1, 64, 65, 0, 5]) == ([0, 64, 128, 256, 256], 320)


def test_pieces_cover_a_tensor() -> None:
    assert list(cuts(0)) == []
    assert list(cuts(1)) == [(0, 1)]
    assert list(cuts(2 * PIECE_BYTES - 1)) == [(0, 2 * PIECE_BYTES - 1)]
    assert list(cuts(2 * PIECE_BYTES)) == [(0, PIECE_BYTES), (PIECE_BYTES, 2 * PIECE_BYTES)]
