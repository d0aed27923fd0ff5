"""The pipe between a parent and its worker: invalid frames and ends without a close frame."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowrt.transports import stream
from flowrt.transports.conformance.kit import check_numbered, numbered, receive_all, send_all
from flowrt.transports.contract import Identity, Limits
from flowrt.transports.errors import BrokenChannelError, EndOfChannel, TransportError
from flowrt.transports.stream import StreamChannel
from flowrt.transports.wire.codec import encode
from flowrt.transports.wire.message import Message, Tensor, TensorSpec

LIMITS = Limits(max_header_bytes=256, max_tensors=2, max_message_bytes=1000, capacity_messages=4, capacity_bytes=1000)


def frame(kind: int, body: bytes = b"", length: int | None = None) -> bytes:
    return struct.pack("<B3xI", kind, len(body) if length is None else length) + body


@asynccontextmanager
async def opened(limits: Limits = LIMITS) -> AsyncIterator[tuple[StreamChannel, socket.socket]]:
    """A channel and the bare socket of its peer."""
    one, two = socket.socketpair()
    with two:
        async with await StreamChannel.from_socket(one, limits, Identity("peer")) as channel:
            yield channel, two


def message_bytes(sequence: int, nbytes: int = 10) -> bytes:
    envelope, payload = encode(numbered(1, nbytes), sequence)
    return frame(1, bytes(envelope)) + bytes(payload)


async def _receive_at_most(channel: StreamChannel, count: int) -> None:
    for _ in range(count):
        await channel.recv()


@pytest.mark.parametrize(
    "sent_bytes",
    [
        frame(0),
        frame(5),
        frame(1, b"\xc1" * 20),
        frame(1, length=257),
        frame(1, length=2**32 - 1),
        frame(2, bytes(15)),
        frame(2, struct.pack("<QQ", 1, 0)),
        frame(3, b"x"),
        frame(4, b"x"),
        message_bytes(0, 1001),
        message_bytes(1),
        b"".join(message_bytes(number) for number in range(5)),
        message_bytes(0, 600) + message_bytes(1, 600),
        b"\xff" * 4000,
    ],
)
async def test_invalid_frames_break_the_channel(sent_bytes: bytes, loop_kind: str) -> None:
    async with opened() as (channel, peer):
        peer.send(sent_bytes)
        with pytest.raises(BrokenChannelError):
            await _receive_at_most(channel, 5)
        assert channel.closed


async def test_a_repeated_message_is_dropped_once_and_counted() -> None:
    async with opened() as (channel, peer):
        peer.send(message_bytes(0) + message_bytes(0) + message_bytes(1))
        check_numbered(await channel.recv(), 1, 10)
        check_numbered(await channel.recv(), 1, 10)
        assert channel.recv_nowait() is None
        assert channel.statistics().messages_dropped == 1


@pytest.mark.parametrize(
    ("sent_bytes", "end"),
    [*((message_bytes(1)[:cut], BrokenChannelError) for cut in (1, 7, 8, 20, -1)), (frame(4), EndOfChannel)],
)
async def test_end_of_file_is_an_end_only_after_the_close_frame(sent_bytes: bytes, end: type[TransportError], loop_kind: str) -> None:
    async with opened() as (channel, peer):
        peer.send(message_bytes(0) + sent_bytes)
        peer.close()
        check_numbered(await channel.recv(), 1, 10)
        with pytest.raises(end, match="peer" if end is BrokenChannelError else None):
            await channel.recv()


async def test_bytes_may_come_one_at_a_time(loop_kind: str) -> None:
    async with opened() as (channel, peer):
        for byte in message_bytes(0, 100):
            peer.send(bytes([byte]))
            await asyncio.sleep(0)
        check_numbered(await channel.recv(), 1, 100)


@given(st.lists(st.binary(max_size=400) | st.sampled_from([message_bytes(0), frame(3), frame(4)]), max_size=6))
@settings(max_examples=80, deadline=None)
async def test_fuzzed_bytes_only_ever_break(pieces: list[bytes]) -> None:
    async with opened() as (channel, peer):
        for piece in pieces:
            peer.send(piece)
        peer.shutdown(socket.SHUT_WR)
        try:
            while True:
                assert (await channel.recv()).payload_bytes <= LIMITS.max_message_bytes
        except TransportError:
            return


async def test_closing_waits_for_a_slow_reader_only_so_long(monkeypatch: pytest.MonkeyPatch, loop_kind: str) -> None:
    monkeypatch.setattr("flowrt.transports.stream.LINGER_SECONDS", 0.05)
    async with opened(Limits()) as (channel, _):
        await channel.send(Message("data", tensors=(Tensor(TensorSpec("uint8", (1 << 23,)), bytes(1 << 23)),)))


async def test_what_the_kernel_does_not_take_is_delivered_by_aclose(loop_kind: str) -> None:
    one, two = socket.socketpair()
    async with await StreamChannel.from_socket(two, Limits(), Identity("one")) as receiver:
        async with await StreamChannel.from_socket(one, Limits(), Identity("two")) as sender:
            await send_all(sender, 0, 5, 1 << 20)
        await receive_all(receiver, 0, 5, 1 << 20)
        with pytest.raises(EndOfChannel):
            await receiver.recv()


async def test_a_broken_channel_hangs_up_at_once() -> None:
    async with opened() as (channel, peer):
        peer.send(frame(0))
        with pytest.raises(BrokenChannelError):
            await channel.recv()
        assert peer.recv(1) == b""


async def test_everything_that_a_dead_peer_has_sent_is_received(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its end-of-file may come much later. More may lie in the buffer of the socket than one turn of the loop reads."""
    monkeypatch.setattr(stream, "_READ_BYTES_AT_ONCE", 1)
    monkeypatch.setattr(stream, "_SCRATCH_BYTES", 16)
    async with opened() as (channel, peer):
        peer.sendall(b"".join(message_bytes(number, 200) for number in range(4)))
        channel.receive_rest()
        for _ in range(4):
            await channel.recv()
        with pytest.raises(BrokenChannelError):
            await channel.recv()
