"""Links fall back to another transport: every message arrives once and in order, and the statistics report the fallback."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowrt.actors import link_channel
from flowrt.actors.link_channel import LinkChannel, reopener
from flowrt.actors.resend_buffer import ACK_EVERY, ResendBuffer
from flowrt.transports.conformance.connection_checks import HERE, KEY, SMALL, THERE
from flowrt.transports.conformance.kit import check_numbered, numbered, receive_all, until, within
from flowrt.transports.contract import Channel, Transport
from flowrt.transports.errors import BrokenChannelError, ClosedChannelError, EndOfChannel
from flowrt.transports.fault_injection import transport as faulty
from flowrt.transports.registry import get_transport, unavailable_reason
from flowrt.transports.shared_memory.transport import SharedMemoryChannel
from flowrt.transports.wire.message import Message

pytestmark = pytest.mark.skipif(unavailable_reason("zmq") is not None or unavailable_reason("shm") is not None, reason="needs shm and zmq")


@asynccontextmanager
async def linked(first: str, *others: str) -> AsyncIterator[tuple[LinkChannel, LinkChannel]]:
    """Two ends over `first`, of which `faulty+...` afflicts the connecting one, with `others` to fall back to."""
    faulty.injected.clear()
    transports: dict[str, Transport] = {}

    def transport(scheme: str) -> Transport:
        return transports.setdefault(scheme, get_transport(scheme))

    async with await transport(first).listen(f"{first}://", SMALL, KEY, HERE) as listener:
        one = await transport(first).connect(listener.address, SMALL, KEY, THERE)
        two = await listener.accept()
    ends = (
        LinkChannel(HERE, first, SMALL, others, reopener(True, transport, SMALL, KEY, THERE, HERE)),
        LinkChannel(THERE, first, SMALL, others, reopener(False, transport, SMALL, KEY, HERE, THERE)),
    )
    for end, channel in zip(ends, (one, two), strict=True):
        end.open_over(channel)
    try:
        yield ends
    finally:
        for end in ends:
            await end.aclose()


MAX_KEPT = 2 * ACK_EVERY + SMALL.capacity_messages  # fewer are kept once the other end has acknowledged


async def exchange(one: LinkChannel, two: LinkChannel, count: int, nbytes: int = 300) -> None:
    """`count` messages both ways at once, checked at both ends; returns when each end knows what the other has received."""

    async def send(channel: Channel) -> None:
        for number in range(count):
            if not (number % 3 and channel.send_nowait(numbered(number, nbytes))):
                await channel.send(numbered(number, nbytes))

    async def receive(channel: Channel) -> None:
        for number in range(count):
            check_numbered(await channel.recv(), number, nbytes)

    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        for channel in (one, two):
            group.create_task(send(channel))
            group.create_task(receive(channel))
    for channel in (one, two):
        await until(lambda channel=channel: knows_what_is_taken(channel), "the other end acknowledges what it has taken")  # type: ignore[misc]


def knows_what_is_taken(channel: LinkChannel) -> bool:
    assert channel.recv_nowait() is None  # a link is always in recv
    return len(channel.buffer.kept) < MAX_KEPT


@pytest.mark.parametrize("plan", ["drop@0", "drop@37", "out.drop@37", "truncate@20", "out.truncate@99"])
@pytest.mark.parametrize("first", ["shm", "zmq"])
async def test_a_break_in_mid_stream_loses_and_doubles_nothing(first: str, plan: str, loop_kind: str) -> None:
    other = "zmq" if first == "shm" else "shm"
    async with linked(f"faulty+{first}?{plan}", other) as (one, two):
        await exchange(one, two, 200)
        assert faulty.injected
        assert (len(one.broken_schemes), len(two.broken_schemes)) == (1, 1)
        assert one.scheme == two.scheme == other
        for end, far in ((one, two), (two, one)):
            assert len(end.buffer.kept) < MAX_KEPT
            assert far.buffer.num_duplicates <= end.buffer.num_resent
            assert far.statistics().messages_dropped == far.buffer.num_duplicates
            assert far.buffer.received == 200


async def test_a_cut_connection_is_not_reported_as_a_death(caplog: pytest.LogCaptureFixture) -> None:
    """The socket of the handshake ends, and with it the channel; both processes live."""
    async with linked("shm", "zmq") as (one, two):
        assert isinstance(one._channel, SharedMemoryChannel)
        one._channel._peer_watch._socket.shutdown(socket.SHUT_RDWR)
        await exchange(one, two, 10)
        assert [record.message for record in caplog.records if "or the connection was cut" not in record.message] == []
        assert len(caplog.records) == 2


async def test_what_had_arrived_already_is_dropped_once_and_counted() -> None:
    async with linked("faulty+inproc?drop@5", "shm") as (one, two):
        for number in range(3):
            await one.send(numbered(number))
        await receive_all(two, 0, 3)
        assert len(one.buffer.kept) == 3  # nothing is acknowledged yet
        for number in range(6):
            await two.send(numbered(number))
        receiving = asyncio.ensure_future(receive_all(one, 0, 6))
        await one.send(numbered(3))
        await receive_all(two, 3, 4)
        await asyncio.gather(one.send(numbered(4)), receive_all(two, 4, 5))  # none of those before comes a second time
        await receiving
        assert one.buffer.num_resent >= 3
        assert two.buffer.num_duplicates >= 3
        assert two.statistics().messages_dropped == two.buffer.num_duplicates


async def test_a_large_message_may_be_taken_and_acknowledged_before_its_send_returns() -> None:
    """One that is larger than the channel holds goes in parts, while the other end reads; the sixteenth makes it acknowledge."""
    large = 5 * SMALL.capacity_bytes
    async with linked("shm", "zmq") as (one, two):
        for number in range(ACK_EVERY - 1):
            await one.send(numbered(number))
            await receive_all(two, number, number + 1)
        receiving = asyncio.ensure_future(receive_all(one, 0, 1))  # as a link does: it receives acknowledgements
        channel = one._channel
        assert channel is not None
        send = channel.send

        async def send_and_stay(message: Message) -> None:
            await send(message)
            await until(lambda: not one.buffer.kept, "what was taken is acknowledged")  # the loop has others to serve first

        channel.send = send_and_stay  # type: ignore[method-assign]
        async with asyncio.timeout(60), asyncio.TaskGroup() as group:
            group.create_task(one.send(numbered(ACK_EVERY - 1, min(large, SMALL.max_message_bytes))))
            check_numbered(await two.recv(), ACK_EVERY - 1, min(large, SMALL.max_message_bytes))
        assert not one.buffer.kept
        await two.send(numbered(0))
        await receiving


async def test_it_falls_back_as_often_as_there_are_transports() -> None:
    async with linked("faulty+shm?drop@10", "faulty+zmq?drop@15", "faulty+shm?drop@12", "zmq") as (one, two):
        await exchange(one, two, 100)
        assert len(one.broken_schemes) == len(two.broken_schemes) == 3
        assert one.scheme == "zmq"


async def test_without_a_transport_left_the_reasons_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_channel, "MEET_SECONDS", 0.1)
    async with linked("faulty+inproc?drop@3", "nosuch") as (one, two):
        await two.send(numbered(0))
        for number in range(1, 4):
            await two.send(numbered(number))
        await receive_all(one, 0, 3)
        for end in (one, two):
            with pytest.raises(BrokenChannelError, match=r"inproc.*nosuch: unknown transport"):
                await within(end.recv(), "recv")
            with pytest.raises(BrokenChannelError):
                await end.send(numbered(9))
            assert end.closed


async def test_a_peer_that_is_gone_is_a_broken_channel_in_bounded_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_channel, "MEET_SECONDS", 0.2)
    async with linked("faulty+inproc?drop@0", "shm") as (one, two):
        await two.send(numbered(0))
        reading = asyncio.ensure_future(one.recv())
        with pytest.raises(BrokenChannelError, match="shm: the peer does not connect"):  # no task is in two.recv
            await reading


async def test_orderly_ends_are_no_breaks() -> None:
    async with linked("shm", "zmq") as (one, two):
        await one.send(numbered(0))
        await one.aclose()
        await receive_all(two, 0, 1)
        with pytest.raises(EndOfChannel):
            await two.recv()
        with pytest.raises(BrokenChannelError):
            await two.send(numbered(1))
        with pytest.raises(ClosedChannelError):
            await one.recv()
        assert len(two.broken_schemes) == 0


async def test_closing_while_it_falls_back_leaves_nothing() -> None:
    async with linked("faulty+inproc?drop@0", "shm") as (one, two):
        await two.send(numbered(0))
        reading = asyncio.ensure_future(one.recv())
        await until(lambda: one._channel is None, "it falls back")
        await one.aclose()
        with pytest.raises(ClosedChannelError):
            await reading


def carry(sender: ResendBuffer, receiver: ResendBuffer, messages: Iterable[Message]) -> list[int]:
    return [message.tag.step for message in messages if receiver.is_new() and message.tag is not None]


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6), st.booleans(), st.booleans()), max_size=20))
def test_resend_buffer_delivers_each_message_once(rounds: list[tuple[int, int, bool, bool]]) -> None:
    """Rounds of: send some, of which a part arrives, perhaps acknowledge, perhaps break. What arrived is then a prefix of what was sent."""
    sender, receiver = ResendBuffer(), ResendBuffer()
    delivered: list[int] = []
    on_the_way: list[Message] = []
    num_sent = 0
    for count, arriving, reports, breaks in [*rounds, (0, 0, False, True), (0, 10**6, True, False)]:
        for _ in range(count):
            message = numbered(num_sent)
            num_sent += 1
            sender.kept.append(message)
            on_the_way.append(message)
        delivered += carry(sender, receiver, on_the_way[:arriving])
        del on_the_way[:arriving]
        if reports:
            sender.acknowledge(receiver.received)
        if breaks:
            receiver.resume(sender.first)
            on_the_way = sender.begin()
    assert delivered == list(range(num_sent))
    assert not sender.kept
    assert receiver.num_duplicates <= sender.num_resent


def test_resend_buffer_refuses_impossible_events() -> None:
    buffer = ResendBuffer()
    buffer.kept.append(numbered(0))
    for number in (-1, 2):
        with pytest.raises(ValueError, match="acknowledges"):
            buffer.acknowledge(number)
    for number in (-1, 1):
        with pytest.raises(ValueError, match="resumes"):
            buffer.resume(number)
