"""What is special to ZeroMQ: strangers on its endpoints, frames that are no message, deaths noticed at once, the context that goes."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest

from transports import zeromq
from transports.checks_basics import check_numbered, numbered, opened, receive_all
from transports.checks_meeting import HERE, KEY, SMALL, THERE, other_process, pair_maker
from transports.contract import Limits
from transports.errors import AddressError, BrokenChannelError, TransportError
from transports.registry import get_transport, unavailable_reason
from transports.zeromq import ZeroMQChannel

if unavailable_reason("zmq") is not None:
    pytest.skip(str(unavailable_reason("zmq")), allow_module_level=True)

import zmq


@pytest.mark.parametrize("address", ["zmq://0.0.0.0:5555", "zmq://10.1.2.3:5555", "zmq://*:5555", "zmq://[::]:1", "zmq://host.example:80"])
async def test_only_this_host_without_encryption(address: str) -> None:
    for call in (get_transport("zmq").listen, get_transport("zmq").connect):
        with pytest.raises(AddressError, match="not on this host"):
            await call(address, SMALL, KEY, HERE)


async def test_large_tensors_alias_the_received_frame(loop_kind: str) -> None:
    async with opened(pair_maker("zmq"), Limits()) as (one, two):
        await one.send(numbered(0, 100_000))
        message = await two.recv()
        assert two.statistics().held_buffers == 1
        part = memoryview(message.tensors[0].data)[5:10]  # type: ignore[arg-type]
        part[0] = 1  # ours to write
        del message
        assert two.statistics().held_buffers == 1
        del part
        assert two.statistics().held_buffers == 0


async def test_the_context_goes_with_the_last_channel() -> None:
    async with opened(pair_maker("zmq")):
        assert zeromq.shared_context._context is not None
    assert zeromq.shared_context._context is None


@pytest.mark.parametrize(
    "frames",
    [
        [b""],
        [b"x"],
        [b"\x09" + bytes(7)],
        [b"\x01" + bytes(7)],
        [b"\x01\0\0\0\xff\xff\xff\xff"],
        [b"\x02" + bytes(7) + b"x"],
        [b"\x02" + bytes(7) + b"\x01" * 16],
        [b"\x06" + bytes(7) + bytes(32)],
        [b"\x01" + bytes(7)] + [b"x"] * 100,
        [bytes(1 << 21)],  # more than libzmq was told to take
    ],
    ids=["empty", "short", "kind", "envelope", "too long", "taken", "taken of nothing", "greeting again", "many frames", "too large"],
)
async def test_frames_that_are_no_message_break_the_channel(frames: list[bytes], loop_kind: str) -> None:
    async with opened(pair_maker("zmq")) as (one, two):
        await one.send(numbered(0))
        assert isinstance(one, ZeroMQChannel)
        one._pair.send_multipart(frames)
        check_numbered(await two.recv(), 0)
        async with asyncio.timeout(5):
            with pytest.raises(BrokenChannelError):
                await two.recv()


async def test_a_stranger_at_the_endpoint_of_a_channel_is_not_heard(monkeypatch: pytest.MonkeyPatch, loop_kind: str) -> None:
    """Even one that guesses the endpoint and is there before the peer."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    stranger = context.socket(zmq.PAIR)
    stranger.set(zmq.LINGER, 0)
    watcher = stranger.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
    bind = zeromq.bind

    def bind_and_let_in(pair: zmq.Socket[bytes], over_tcp: bool) -> str:
        endpoint = bind(pair, over_tcp)
        stranger.connect(endpoint)
        stranger.send(b"\x06" + bytes(7) + bytes(32))
        assert watcher.poll(5000), "the stranger is neither in nor refused"
        return endpoint

    monkeypatch.setattr(zeromq, "bind", bind_and_let_in)
    try:
        async with await get_transport("zmq").listen("zmq://", SMALL, KEY, HERE) as listener, asyncio.timeout(10):
            with pytest.raises(TransportError):
                await get_transport("zmq").connect(listener.address, SMALL, KEY, THERE)
    finally:
        stranger.disable_monitor()
        watcher.close()
        stranger.close()
        context.term()


def _data_endpoints() -> list[str]:
    return re.findall(r"@flowrt/zmq-data/([0-9a-f]+)", Path("/proc/net/unix").read_text())


async def test_endpoints_are_abstract_and_long() -> None:
    async with opened(pair_maker("zmq")):
        names = _data_endpoints()
        assert names
        assert all(len(name) == 32 for name in names)


async def test_a_death_is_noticed_by_libzmq_and_not_by_waiting(monkeypatch: pytest.MonkeyPatch, loop_kind: str) -> None:
    monkeypatch.setattr(zeromq, "DEATH_SECONDS", 1000.0)
    async with other_process("zmq", "hang") as (channel, peer):
        peer.kill()
        async with asyncio.timeout(10):
            with pytest.raises(BrokenChannelError, match="died"):
                await channel.recv()


async def test_a_lost_line_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """Should libzmq not tell, the socket of the meeting does."""
    monkeypatch.setattr(zeromq, "DEATH_SECONDS", 0.05)
    monkeypatch.setattr(ZeroMQChannel, "_read_monitor", lambda channel: None)
    async with other_process("zmq", "hang") as (channel, peer):
        peer.kill()
        async with asyncio.timeout(10):
            with pytest.raises(BrokenChannelError, match="died"):
                await channel.recv()


async def test_over_tcp_on_loopback(loop_kind: str) -> None:
    async with opened(pair_maker("zmq", "zmq://127.0.0.1:0")) as (one, two):
        await one.send(numbered(1, 50_000))
        await receive_all(two, 1, 2, 50_000)
