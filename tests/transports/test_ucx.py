"""UCX beyond the common contract: actions before a peer is authenticated, invalid frames, and peers that die or stop."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import socket
import struct
import subprocess
import sys
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from message_sizes import receive_sizes, send_sizes

from flowrt.transports.channel import greeted
from flowrt.transports.channel.blocks import ALIGNMENT, Block
from flowrt.transports.channel.peer_watch import PeerWatch
from flowrt.transports.conformance.connection_checks import HERE, KEY, THERE, pair_maker
from flowrt.transports.conformance.kit import check_numbered, fill, numbered, opened, receive_all, send_all, until, until_waiting, within
from flowrt.transports.conformance.process_checks import other_process, pause
from flowrt.transports.contract import Channel, Limits
from flowrt.transports.errors import BrokenChannelError, HandshakeError
from flowrt.transports.registry import get_transport, unavailable_reason
from flowrt.transports.ucx import endpoint as ucx_link
from flowrt.transports.ucx import transport as ucx
from flowrt.transports.ucx.endpoint import Settings, UCXLink
from flowrt.transports.ucx.regions import PIECE_BYTES, PIECES_AHEAD, cuts
from flowrt.transports.ucx.transport import UCXChannel, UCXTransport
from flowrt.transports.wire.codec import encode_envelope
from flowrt.transports.wire.message import Message, Tensor, TensorSpec


def test_without_the_package_the_error_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ucxx._lib.libucxx", None)
    monkeypatch.setitem(sys.modules, "ucxx._lib", None)
    ucx_link._library.cache_clear()
    ucx_link.unavailable_reason.cache_clear()
    try:
        reason = unavailable_reason("ucx")
        assert reason is not None
        assert "ucxx" in reason
        assert "pip install 'ucxx-cu13" in reason
        assert unavailable_reason("inproc") is None
    finally:
        ucx_link._library.cache_clear()
        ucx_link.unavailable_reason.cache_clear()


def test_an_environment_that_ucx_cannot_stand_is_a_reason_and_no_crash() -> None:
    code = "from flowrt.transports.registry import unavailable_reason as r; print(r('ucx'))"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "UCX_MEM_EVENTS": "n"}
    done = subprocess.run([sys.executable, "-c", code], check=True, env=environment, capture_output=True, text=True)
    assert done.stdout.startswith("ucx "), done


needs_ucx = pytest.mark.skipif(unavailable_reason("ucx") is not None, reason=str(unavailable_reason("ucx")))
WIDE = Limits(max_message_bytes=1 << 24, capacity_messages=1000, capacity_bytes=1 << 26)


class TappedLink(UCXLink):
    """A link that counts its turns and what it sends, and that can stand still, as the library does in a stopped process.

    The first of its `tags` is that of frames, the second that of regions.
    """

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.stands, self.finds_regions, self.num_turns = False, True, 0
        self.tags: list[Any] = []
        self.sent: list[Any] = []  # tags
        work, arm = self.progress, self.arm

        def progress() -> None:
            self.num_turns += 1
            if not self.stands:
                work()

        self.progress = progress
        self.arm = lambda: self.stands or arm()

    def connect(self, address: bytes) -> None:
        super().connect(address)
        send = self.send

        def send_and_count(array: Any, tag: Any) -> Any:
            self.sent.append(tag)
            return send(array, tag)

        self.send = send_and_count

    def probe(self, tag: Any) -> Any:
        return super().probe(tag) if self.finds_regions else SimpleNamespace(matched=False)

    def tag(self, number: int) -> Any:
        self.tags.append(super().tag(number))
        return self.tags[-1]

    @property
    def num_frames(self) -> int:
        """That it has sent."""
        return self.sent.count(self.tags[0])

    def send_raw(self, data: bytes, stream: int = 0) -> object:
        """A frame or a piece of a region, as a hostile peer sends it. Keep what is returned."""
        return self.send(self.array(data), self.tags[stream])


class HeldWatch(PeerWatch):
    """Reports the end of its socket late while `holds`."""

    def __init__(self, sock: socket.socket, on_end: Callable[[str | None], None]) -> None:
        self.holds, self.unreported = False, list[str | None]()
        self._report = on_end
        super().__init__(sock, lambda reason: self.unreported.append(reason) if self.holds else on_end(reason))

    def let_go(self) -> None:
        self.holds = False
        while self.unreported:
            self._report(self.unreported.pop())


class End:
    """What is under one end of a pair."""

    def __init__(self, link: TappedLink, watch: HeldWatch) -> None:
        self.link, self.watch = link, watch

    def stand(self) -> None:
        """As if its process were stopped."""
        self.link.stands = self.watch.holds = True

    def go_on(self) -> None:
        self.link.stands = False
        self.watch.let_go()


class Pairs:
    """Opens pairs of channels whose links are tapped."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.links: list[TappedLink] = []
        self.watches: dict[str, HeldWatch] = {}
        monkeypatch.setattr(ucx, "UCXLink", self._link)
        monkeypatch.setattr(greeted, "PeerWatch", self._watch)

    def _link(self, settings: Settings) -> TappedLink:
        self.links.append(TappedLink(settings))
        return self.links[-1]

    def _watch(self, sock: socket.socket, on_end: Callable[[str | None], None]) -> HeldWatch:
        made = HeldWatch(sock, on_end)
        self.watches[on_end.__self__.peer.name] = made  # type: ignore[attr-defined]
        return made

    @asynccontextmanager
    async def open(self, limits: Limits = WIDE, *, fresh: bool = False) -> AsyncIterator[tuple[Channel, Channel, End, End]]:
        """The connecting end, the accepted one, and what is under each. Unless `fresh`, UCX is through with its own greetings."""
        async with opened(pair_maker("ucx"), limits) as (one, two):
            ends = [End(link, self.watches[name]) for link, name in zip(self.links, (HERE.name, THERE.name), strict=True)]
            if not fresh:
                for sender, receiver in ((one, two), (two, one)):
                    await sender.send(numbered(0, 10_000))
                    check_numbered(await within(receiver.recv(), "recv"), 0, 10_000)
            yield one, two, ends[0], ends[1]


@pytest.fixture
def pairs(monkeypatch: pytest.MonkeyPatch) -> Pairs:
    return Pairs(monkeypatch)


@pytest.fixture
def blocks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of each block of memory that is made."""
    made: list[int] = []
    real = Block
    monkeypatch.setattr("flowrt.transports.channel.blocks.Block", lambda fd, size, flags: (made.append(size), real(fd, size, flags))[1])
    return made


async def assert_rests(link: TappedLink) -> None:
    """Once it has come to rest it does nothing for a while."""
    looks = deque([-1], 20)

    def rests() -> bool:
        looks.append(link.num_turns)
        return len(looks) == 20 and len(set(looks)) == 1

    await until(rests, "a link without anything to do comes to rest")
    before = link.num_turns
    await asyncio.sleep(0.05)
    assert link.num_turns == before


@needs_ucx
async def test_echoes_between_processes_lose_no_wake_up(loop_kind: str) -> None:
    """A thousand frames and regions with several in flight: one that UCX reports during the check for remaining work would be lost."""
    sizes = [0, 100, 9000, 30_000, 8192]
    async with other_process("ucx", "echo") as (channel, _), asyncio.TaskGroup() as group:
        group.create_task(send_sizes(channel, sizes, 1000))
        await receive_sizes(channel, sizes, 1000)


@needs_ucx
async def test_nothing_of_ucx_before_the_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither side opens a worker, or sends or uses an address, for a peer that has another key."""
    opened_links: list[object] = []
    monkeypatch.setattr(ucx, "UCXLink", lambda settings: opened_links.append(1))
    async with await get_transport("ucx").listen("ucx://", WIDE, KEY, HERE) as listener:
        with pytest.raises(HandshakeError):
            await get_transport("ucx").connect(listener.address, WIDE, bytes(32), THERE)
        await until(lambda: listener.rejected == 1, "a rejected caller is counted")
    assert not opened_links


@needs_ucx
async def test_stranger_with_the_address_is_ignored(pairs: Pairs, loop_kind: str) -> None:
    """The tags are secrets of the handshake."""
    async with pairs.open() as (one, two, _, under_two):
        stranger = UCXLink()
        try:
            stranger.connect(under_two.link.address())
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

    def lying(self: UCXChannel, meeting: Any, link: UCXLink) -> None:
        shake = meeting.handshake
        if shake.role == "listener":
            real = shake.session_key
            shake.session_key = lambda label: bytes(32) if label == "ucx greeting" else real(label)
        honest(self, meeting, link)

    monkeypatch.setattr(UCXChannel, "__init__", lying)
    async with await get_transport("ucx").listen("ucx://", WIDE, KEY, HERE) as listener, asyncio.timeout(60):
        with pytest.raises(HandshakeError, match="the greeting is not"):
            await get_transport("ucx").connect(listener.address, WIDE, KEY, THERE)


HEAD = struct.Struct("<B3xIQQQ")  # kind, bytes of the envelope, a, b, frames read so far
MESSAGE, REGION, TAKEN, WAITING, CLOSE, CLOSED, READ, GREETING, ENVELOPE = range(1, 10)


READ_ALL = 2**64 - 1  # stands for the number of frames that the other end has sent


def frame(kind: int, envelope_bytes: int = 0, a: int = 0, b: int = 0, read: int = READ_ALL, body: bytes = b"") -> bytes:
    return HEAD.pack(kind, envelope_bytes, a, b, read) + body


TOO_LARGE = encode_envelope(Message("data", tensors=(Tensor(TensorSpec("uint8", (1 << 25,)), b""),)), 0)[0]


@needs_ucx
@pytest.mark.parametrize(
    "wrong",
    [
        frame(99),
        frame(0),
        frame(MESSAGE),
        frame(MESSAGE, 2**32 - 1),
        frame(MESSAGE, 5, body=b"\xc1\xc1\xc1\xc1\xc1"),
        frame(TAKEN, a=2, b=1),
        frame(WAITING, read=1000),
        frame(GREETING, body=bytes(64)),
        frame(REGION),
        frame(REGION, 2**32 - 1),
        frame(REGION, 5, body=b"\xc1\xc1\xc1\xc1\xc1"),
        frame(REGION, len(TOO_LARGE), body=TOO_LARGE),
        frame(ENVELOPE),
        b"x" * (ucx.FRAME_BYTES + 1),
        b"x" * 100_000,
    ],
    ids=lambda wrong: f"{wrong[0]}-{len(wrong)}-{wrong[4:7].hex()}",
)
async def test_invalid_frames_break_the_channel_and_take_no_memory(wrong: bytes, pairs: Pairs, blocks: list[int], loop_kind: str) -> None:
    async with pairs.open() as (one, two, under_one, under_two):
        await one.send(numbered(0))
        check_numbered(await within(two.recv(), "recv"), 0)
        before = len(blocks)
        request = under_one.link.send_raw(having_read(wrong, under_two.link))
        with pytest.raises(BrokenChannelError):
            await within(two.recv(), "recv")
        with pytest.raises(BrokenChannelError):
            await within(one.recv(), "recv")
        assert (len(blocks), two.statistics().held_buffers) == (before, 0)
        del request


def having_read(data: bytes, link: TappedLink) -> bytes:
    """`data` with the count of frames that `link` has sent where READ_ALL stands for it."""
    return data.replace(READ_ALL.to_bytes(8, "little"), link.num_frames.to_bytes(8, "little"))


@needs_ucx
async def test_a_region_without_credit_takes_no_memory(pairs: Pairs, blocks: list[int], loop_kind: str) -> None:
    async with pairs.open(Limits(capacity_messages=2, max_message_bytes=1 << 20)) as (_, two, under_one, under_two):
        requests = []
        for number in range(1, 4):
            envelope = encode_envelope(numbered(number, 100_000), number)[0]
            message = frame(REGION, len(envelope), body=envelope)
            requests.append(under_one.link.send_raw(having_read(message, under_two.link)))
        with pytest.raises(BrokenChannelError, match="more than the channel may hold"):
            await within(two.recv(), "recv")
        assert sum(size >= 100_000 for size in blocks) <= 2
        del requests


@needs_ucx
@pytest.mark.parametrize("nbytes", [19_999, 20_001], ids=["short", "long"])
async def test_pieces_that_do_not_fit_break_the_channel(nbytes: int, pairs: Pairs, loop_kind: str) -> None:
    async with pairs.open() as (_, two, under_one, under_two):
        envelope = encode_envelope(numbered(1, 20_000), 1)[0]
        message = having_read(frame(REGION, len(envelope), body=envelope), under_two.link)
        requests = [under_one.link.send_raw(message), under_one.link.send_raw(bytes(nbytes), stream=1)]
        with pytest.raises(BrokenChannelError, match=r"a piece of \d+ bytes, 20000 were expected"):
            await within(two.recv(), "recv")
        del requests


@needs_ucx
async def test_large_tensors_lie_in_a_block_until_the_last_view_is_gone(loop_kind: str) -> None:
    async with opened(pair_maker("ucx"), WIDE) as (one, two):
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
async def test_blocks_are_used_again(blocks: list[int]) -> None:
    async with opened(pair_maker("ucx"), Limits(capacity_bytes=1 << 22)) as (one, two):
        for number in range(50):
            await one.send(numbered(number, 300_000))
            check_numbered(await within(two.recv(), "recv"), number, 300_000)
        assert len(blocks) <= 8


@needs_ucx
async def test_small_tensors_are_copied_and_large_ones_read_where_they_lie(loop_kind: str) -> None:
    assert UCXTransport.capabilities.borrows_sender
    async with other_process("ucx", "echo") as (channel, peer):
        await channel.send(numbered(0, 10_000))
        check_numbered(await within(channel.recv(), "echo"), 0, 10_000)
        for nbytes in (100, 7000, 100_000, 250_000):
            pause(peer)
            data = bytearray(b"a" * nbytes)
            await channel.send(Message("data", tensors=(Tensor(TensorSpec("uint8", (nbytes,)), data),)))
            large = nbytes > ucx.FRAME_BYTES
            if large:
                with pytest.raises(BufferError):
                    data.append(0)  # the memory cannot be taken away meanwhile
            data[:] = b"b" * nbytes  # against the contract when it is large: a copy would not have it
            peer.send_signal(signal.SIGCONT)
            received: Any = (await within(channel.recv(), "echo")).tensors[0].data
            assert bytes(received) == (b"b" if large else b"a") * nbytes, nbytes
            await until(partial(is_free, data), "the memory is the sender's again")


def is_free(data: bytearray) -> bool:
    try:
        data.append(0)
    except BufferError:
        return False
    return True


@needs_ucx
async def test_an_envelope_that_fits_no_frame_goes_ahead_in_parts(loop_kind: str) -> None:
    async with opened(pair_maker("ucx"), WIDE) as (one, two):
        header = msgspec.msgpack.encode("x" * 3 * ucx.FRAME_BYTES)
        for tensors in ((), numbered(0, 100_000).tensors, (Tensor(TensorSpec("uint8", (0,)), b""),)):
            await one.send(Message("data", header=header, tensors=tensors))
            await one.send(numbered(1))
            received = await within(two.recv(), "recv")
            assert received.header == header
            assert [bytes(each.data) for each in received.tensors] == [bytes(each.data) for each in tensors]  # type: ignore[call-overload]
            check_numbered(await within(two.recv(), "recv"), 1)


@needs_ucx
async def test_credits_do_not_wait_behind_payload(pairs: Pairs, loop_kind: str) -> None:
    """No payload of the other direction arrives, and a sender that waits for a credit gets it all the same."""
    async with pairs.open() as (one, two, _, under_two):
        under_two.link.finds_regions = False
        for number in range(8):
            assert one.send_nowait(numbered(number, 1 << 21))
        waiting = asyncio.ensure_future(two.send(numbered(fill(two))))
        await until_waiting(two, 1)
        check_numbered(await within(one.recv(), "recv"), 0)
        await within(waiting, "the credit")
        assert two.recv_nowait() is None
        under_two.link.finds_regions = True
        await one.send(numbered(8))
        await receive_all(two, 0, 8, 1 << 21)
        await receive_all(two, 8, 9)


@needs_ucx
async def test_a_peer_that_does_not_read_is_not_sent_more_than_the_ring_takes(pairs: Pairs, loop_kind: str) -> None:
    async with pairs.open() as (one, two, under_one, under_two):
        under_two.stand()
        under_one.link.sent.clear()
        for number in range(500):
            assert one.send_nowait(numbered(number, 0 if number % 3 else 20_000))
        await assert_rests(under_one.link)
        frames, pieces = (under_one.link.sent.count(tag) for tag in under_one.link.tags)
        assert 0 < frames <= ucx.FRAMES_AHEAD
        assert pieces == PIECES_AHEAD
        under_two.go_on()
        for number in range(500):
            check_numbered(await within(two.recv(), "recv"), number, 0 if number % 3 else 20_000)


@needs_ucx
async def test_nothing_spins_while_a_new_peer_does_not_respond(pairs: Pairs, loop_kind: str) -> None:
    """UCX's first large message must wait until the peer has answered something."""
    async with pairs.open(fresh=True) as (one, two, under_one, under_two):
        under_two.stand()
        for number in range(20):
            assert one.send_nowait(numbered(number, 20_000))
        await assert_rests(under_one.link)
        under_two.go_on()
        await receive_all(two, 0, 20, 20_000)


@needs_ucx
async def test_a_send_that_requests_room_of_a_dead_peer_ends(pairs: Pairs, loop_kind: str) -> None:
    """Nothing else would wake it: the channel breaks before it waits."""
    limits = Limits(max_message_bytes=1 << 16, capacity_messages=20, capacity_bytes=1 << 20)
    async with pairs.open(limits) as (one, _, under_one, _):
        number = fill(one, 1000)
        under_one.link.send = lambda array, tag: SimpleNamespace(status=-25)  # the endpoint is closed
        with pytest.raises(BrokenChannelError, match=r"UCX could not send \(status -25\)"):
            await within(one.send(numbered(number, 1000)), "a send to a dead peer ends")


@needs_ucx
async def test_both_ends_full_go_on(pairs: Pairs, loop_kind: str) -> None:
    """The words that make room do not wait for room themselves."""
    async with pairs.open() as (one, two, *under), asyncio.TaskGroup() as group:
        for end in under:
            end.stand()
        for number in range(400):
            for channel in (one, two):
                assert channel.send_nowait(numbered(number, 10))
        for end in under:
            end.go_on()
        for channel in (one, two):
            group.create_task(receive_all(channel, 0, 400, 10))


@needs_ucx
async def test_an_idle_channel_does_nothing(pairs: Pairs, loop_kind: str) -> None:
    async with pairs.open() as (one, two, *under):
        await one.send(numbered(0, 100_000))
        check_numbered(await within(two.recv(), "recv"), 0, 100_000)
        for end in under:
            await assert_rests(end.link)
        before = [end.link.num_turns for end in under]
        await one.send(numbered(1))
        check_numbered(await within(two.recv(), "recv"), 1)
        assert sum(end.link.num_turns for end in under) - sum(before) <= 8


@needs_ucx
async def test_a_region_whose_sender_has_gone_is_not_believed(pairs: Pairs, monkeypatch: pytest.MonkeyPatch, loop_kind: str) -> None:
    """A stopped receiver wakes up when the sender has given up, and its memory may hold anything."""
    monkeypatch.setattr(greeted, "LINGER_SECONDS", 0.05)
    async with pairs.open() as (one, two, _, under_two):
        under_two.stand()
        await one.send(numbered(0, 10))
        await one.send(numbered(1, 1 << 20))
        await within(one.aclose(), "aclose")
        under_two.go_on()
        check_numbered(await within(two.recv(), "what was in our own ring"), 0, 10)
        with pytest.raises(BrokenChannelError):
            await within(two.recv(), "recv")


@needs_ucx
async def test_nothing_is_left_of_a_channel_whose_peer_is_stopped_and_killed(loop_kind: str) -> None:
    """With everything full: frames and regions that no process will read. (What is left is counted by every test.)"""
    for then in (signal.SIGKILL, signal.SIGCONT):
        async with other_process("ucx", "hang") as (channel, peer):
            pause(peer)
            number = 0
            while channel.send_nowait(numbered(number, 30_000)):
                number += 1
            for _ in range(20):
                await asyncio.sleep(0)
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


def test_pieces_cover_a_tensor() -> None:
    assert list(cuts(0)) == []
    assert list(cuts(1)) == [(0, 1)]
    assert list(cuts(2 * PIECE_BYTES - 1)) == [(0, 2 * PIECE_BYTES - 1)]
    assert list(cuts(2 * PIECE_BYTES)) == [(0, PIECE_BYTES), (PIECE_BYTES, 2 * PIECE_BYTES)]
