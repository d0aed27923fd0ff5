"""Whatever bytes come, nothing but a closed and counted connection results, and memory stays within what was declared.

Before a peer has proved the key, what it costs is a constant; after it, the channel's limits and a constant. Every run takes a few dozen
examples, always the same; `make fuzz` takes EXAMPLES of each, new ones every time. The decoder's and the ring's own properties are in
test_codec.py and test_shared_memory.py.
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flowrt.transports.channel.rendezvous import socket_address
from flowrt.transports.conformance.connection_checks import HERE, KEY, SMALL, THERE, pair_maker
from flowrt.transports.conformance.kit import numbered, receive_all
from flowrt.transports.contract import Channel, Identity, Limits
from flowrt.transports.errors import BrokenChannelError, EndOfChannel, HandshakeError
from flowrt.transports.registry import get_transport, unavailable_reason
from flowrt.transports.stream import StreamChannel
from flowrt.transports.wire import handshake
from flowrt.transports.wire.codec import WireError, decode, encode
from flowrt.transports.wire.handshake import MAX_FRAME_BYTES, Handshake
from flowrt.transports.wire.message import DTYPE_BYTES, Message

EXAMPLES = int(os.environ.get("FLOWRT_FUZZ_EXAMPLES", "0"))
BEFORE_PROOF_BYTES = 64 << 10  # of Python's memory for one caller, however much it sends
DECODED_BYTES = 32 << 10  # what decoding may take besides a multiple of what came
LIMITS = Limits(max_header_bytes=512, max_tensors=3, max_message_bytes=4096, capacity_messages=4, capacity_bytes=8192)


def fuzzed(examples: int) -> settings:
    """`examples` in every run; as many as `make fuzz` requests, other ones each time, and none kept."""
    return settings(
        max_examples=EXAMPLES or examples, derandomize=not EXAMPLES, database=None, deadline=None, suppress_health_check=list(HealthCheck)
    )


@contextmanager
def at_most(nbytes: int, what: str) -> Iterator[None]:
    """That Python allocates no more than `nbytes` at once inside."""
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        yield
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak - before <= nbytes, f"{what}: {peak - before} bytes at once, at most {nbytes} are allowed"


# Bytes that are nearly right find more than random ones.

numbers = st.integers(0, 2**64 - 1) | st.integers(-(2**63), 300) | st.sampled_from([2**31, 2**32, 2**62, 2**63])
shapes = st.lists(numbers, max_size=10)
values = st.recursive(
    st.none() | numbers | st.text(max_size=8) | st.binary(max_size=40) | st.floats(), lambda inner: st.lists(inner, max_size=4)
)
specs = st.tuples(st.sampled_from([*DTYPE_BYTES, "float7", ""]), shapes)
tags = st.none() | st.lists(values, max_size=6) | st.tuples(st.text(max_size=8), numbers, numbers, numbers, numbers)
envelopes = st.tuples(
    numbers | st.just(0), st.text(max_size=8), numbers, tags, st.none() | st.binary(max_size=600), st.lists(specs | values, max_size=5)
)


@st.composite
def damaged(draw: st.DrawFn, good: bytes) -> bytes:
    """`good` with bytes changed, cut out, doubled or put in."""
    data = bytearray(good)
    for _ in range(draw(st.integers(1, 4))):
        place = draw(st.integers(0, max(0, len(data) - 1)))
        length = draw(st.integers(0, 12))
        kind = draw(st.integers(0, 3))
        if kind == 0 and data:
            data[place] = draw(st.integers(0, 255))
        elif kind == 1:
            del data[place : place + length]
        elif kind == 2:
            data[place:place] = data[place : place + length]
        else:
            data[place:place] = draw(st.binary(max_size=12))
    return bytes(data)


def packed_envelopes() -> st.SearchStrategy[bytes]:
    def pack(value: object) -> bytes:
        try:
            return msgspec.msgpack.encode(value)
        except (OverflowError, TypeError, ValueError):
            return b""

    good = bytes(encode(numbered(3, 40), 0)[0])
    return envelopes.map(pack) | values.map(pack) | damaged(good) | st.binary(max_size=600)


@given(packed_envelopes(), st.lists(st.binary(max_size=64), max_size=4))
@fuzzed(150)
def test_the_decoder_refuses_or_returns_a_message_within_limits(envelope: bytes, tensors: list[bytes]) -> None:
    message: Message | None = None
    with at_most(DECODED_BYTES + 64 * len(envelope), "decoding"), suppress(WireError):
        message, _ = decode([envelope, *tensors], LIMITS)
    if message is not None:
        assert message.payload_bytes == sum(map(len, tensors)) <= LIMITS.max_message_bytes
        assert len(message.tensors) <= LIMITS.max_tensors


def transcript() -> list[bytes]:
    """The messages of the connector and the listener in a valid handshake, in turn."""
    connector = Handshake("connector", KEY, THERE, LIMITS, scheme="shm", payload=lambda limits: b"endpoint", nonce=b"1" * 32)
    listener = Handshake("listener", KEY, HERE, LIMITS, scheme="shm", nonce=b"2" * 32)
    hello = connector.start()
    response = listener.receive(hello)
    return [hello, response, connector.receive(response)]


HELLO, RESPONSE, PROOF = transcript()


@given(
    st.sampled_from(["connector", "listener"]),
    st.lists(damaged(HELLO) | damaged(RESPONSE) | st.just(HELLO) | st.binary(max_size=100), max_size=4),
    st.integers(1, 5000),
)
@fuzzed(100)
def test_handshake_refuses_bad_bytes_with_bounded_memory(role: handshake.Role, sent_bytes: list[bytes], piece: int) -> None:
    side = Handshake(role, KEY, HERE, LIMITS, scheme="shm", nonce=b"2" * 32)
    side.start()
    data = b"".join(sent_bytes) + b"\xff" * 20_000
    with at_most(BEFORE_PROOF_BYTES, "a handshake"), suppress(HandshakeError):
        for start in range(0, len(data), piece):
            side.receive(data[start : start + piece])
    assert not side.done
    assert len(side._buffer) <= MAX_FRAME_BYTES + 5 + piece


SCHEMES = [scheme for scheme in ("shm", "zmq") if unavailable_reason(scheme) is None]


@pytest.mark.parametrize("scheme", SCHEMES)
@given(st.lists(damaged(HELLO) | damaged(HELLO + PROOF) | st.binary(max_size=3000), min_size=1, max_size=3))
@fuzzed(25)
async def test_listener_counts_invalid_callers_and_keeps_serving(scheme: str, sent_bytes: list[bytes]) -> None:
    async with await get_transport(scheme).listen(f"{scheme}://", SMALL, KEY, HERE) as listener:
        _, path = socket_address(scheme, listener.address.partition("://")[2])
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect(path)
            with at_most(BEFORE_PROOF_BYTES + sum(map(len, sent_bytes)), "a caller"):
                for piece in sent_bytes:
                    with suppress(BrokenPipeError, ConnectionResetError):
                        sock.send(piece)
                    await asyncio.sleep(0)
        async with asyncio.timeout(60):
            while listener.rejected == 0:  # noqa: ASYNC110  (a counter wakes no task)
                await asyncio.sleep(0.001)
        assert listener.rejected == 1
        one = await get_transport(scheme).connect(listener.address, SMALL, KEY, THERE)
        async with one, await listener.accept() as two:
            await one.send(numbered(1))
            await receive_all(two, 1, 2)


async def drain(channel: Channel) -> None:
    """Receive until the end. What broke the channel, if anything did, is counted."""
    end: Exception | None = None
    try:
        async with asyncio.timeout(60):
            while True:
                assert (await channel.recv()).payload_bytes <= LIMITS.max_message_bytes
    except (EndOfChannel, BrokenChannelError) as error:
        end = error
    broken_by_bytes = isinstance(end, BrokenChannelError) and "died" not in str(end)
    assert channel.statistics().nonsense == broken_by_bytes


def stream_of(count: int) -> bytes:
    """What the pipe carries for `count` good messages and the end."""
    sent_bytes = b""
    for number in range(count):
        envelope, *payload = encode(numbered(number, 700 * number), number)
        sent_bytes += struct.pack("<B3xI", 1, len(envelope)) + bytes(envelope) + b"".join(map(bytes, payload))
    return sent_bytes + struct.pack("<B3xI", 4, 0)


@given(damaged(stream_of(3)) | st.binary(max_size=2000))
@fuzzed(60)
async def test_a_pipe_gives_messages_within_limits_or_breaks(sent_bytes: bytes) -> None:
    one, two = socket.socketpair()
    with two:
        async with await StreamChannel.from_socket(one, LIMITS, Identity("peer")) as channel:
            two.sendall(sent_bytes)
            two.shutdown(socket.SHUT_WR)
            with at_most(BEFORE_PROOF_BYTES + 4 * LIMITS.capacity_bytes, "a channel"):
                await drain(channel)


ZMQ_HEAD = struct.Struct("<B3xI")
GOOD_ZMQ = ZMQ_HEAD.pack(1, len(encode(numbered(0, 90), 0)[0])) + b"".join(bytes(part) for part in encode(numbered(0, 90), 0))


@pytest.mark.skipif("zmq" not in SCHEMES, reason="needs pyzmq")
@given(st.lists(st.lists(damaged(GOOD_ZMQ) | st.binary(max_size=300), min_size=1, max_size=6), min_size=1, max_size=4))
@fuzzed(25)
async def test_an_authenticated_zmq_peer_can_only_break_its_own_channel(messages: list[list[bytes]]) -> None:
    one, two = await pair_maker("zmq")(LIMITS)
    async with one, two:
        with at_most(BEFORE_PROOF_BYTES + 4 * LIMITS.capacity_bytes, "a channel"):
            for frames in messages:
                one._pair.send_multipart(frames)  # type: ignore[attr-defined]
            with suppress(BrokenChannelError):
                await one.send(numbered(99))
            await one.aclose()
            await drain(two)


def test_the_bounds_would_notice() -> None:
    """The measure itself: one allocation above the bound is found."""
    kept: list[bytes] = []
    check: Callable[[], None] = lambda: kept.append(bytes(BEFORE_PROOF_BYTES + 1000))  # noqa: E731
    with pytest.raises(AssertionError, match="at once"), at_most(BEFORE_PROOF_BYTES, "planted"):
        check()
