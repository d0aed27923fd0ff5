"""Checks the contract for any two connected ends.

Each check takes `make_pair`, an async function from Limits to two connected channels in this event loop, which the check closes. A
violation is a ContractViolationError that names what failed.

A `check_*_cancelled_at_every_turn` starts a call together with the operation that completes it, and cancels the call after 0, 1, 2 ...
turns of the event loop, so that every await of the call is reached. TURNS takes larger steps after the first few turns, because only slow
media need that many.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import product

import msgspec

from flowrt.transports.conformance.kit import (
    SMALL,
    Header,
    MakePair,
    cancelled_after,
    carry,
    carry_one,
    check_numbered,
    checks_of,
    expect,
    expect_error,
    fill,
    lent,
    numbered,
    opened,
    pattern,
    receive_all,
    received_bytes,
    send_all,
    skip_turns,
    until_waiting,
    within,
)
from flowrt.transports.contract import Channel, Limits
from flowrt.transports.errors import (
    BrokenChannelError,
    BusyChannelError,
    ClosedChannelError,
    EndOfChannel,
    InvalidMessageError,
    LimitError,
    TransportError,
)
from flowrt.transports.wire.message import DTYPE_BYTES, Message, Tag, Tensor, TensorSpec

TURNS = (0, 1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 15, 20, 30, 50, 100, 200)
_LAST = 10_000  # number of the message that ends a round
_SIZES = (0, 1, 63, 64, 65, 4096, 8191, 8192, 8193, 20001, 65536, 262144, 300001)


async def check_order(make_pair: MakePair) -> None:
    """Messages of many sizes arrive in order in both directions at once, far more than the channel holds."""
    sizes = [_SIZES[number * 5 % len(_SIZES)] for number in range(20 * len(_SIZES))]
    async with opened(make_pair) as (one, two), asyncio.TaskGroup() as group:
        for sender, receiver in ((one, two), (two, one)):
            group.create_task(send_sizes(sender, sizes))
            group.create_task(receive_sizes(receiver, sizes))


async def send_sizes(channel: Channel, sizes: Sequence[int]) -> None:
    for number, nbytes in enumerate(sizes):
        await channel.send(numbered(number, nbytes))


async def receive_sizes(channel: Channel, sizes: Sequence[int]) -> None:
    for number, nbytes in enumerate(sizes):
        check_numbered(await within(channel.recv(), f"message {number}"), number, nbytes)


async def check_tensors(make_pair: MakePair) -> None:
    """Every dtype, odd counts, no bytes, no dimensions, eight dimensions, a slice of something larger, many in one message."""
    limits = Limits(max_tensors=64, capacity_bytes=1 << 20)
    shapes: list[tuple[int, ...]] = [(), (0,), (3, 0, 2), (1,), (7, 3), (1, 2, 1, 2, 1, 2, 1, 3), (1021, 17)]
    async with opened(make_pair, limits) as (one, two):
        for shape in shapes:
            tensors = []
            for dtype in DTYPE_BYTES:
                spec = TensorSpec(dtype, shape)
                larger = memoryview(pattern(spec.nbytes + 13))
                tensors.append(Tensor(spec, larger[5 : 5 + spec.nbytes]))
            _, message = await within(asyncio.gather(one.send(Message("data", tensors=tuple(tensors))), two.recv()), "send and recv")
            expect(tuple(tensor.spec for tensor in message.tensors) == tuple(tensor.spec for tensor in tensors), "specs arrive as sent")
            for sent, received in zip(tensors, message.tensors, strict=True):
                expect(received_bytes(received) == received_bytes(sent), f"a {sent.spec.dtype} tensor of shape {shape} arrives as sent")


async def check_plain_messages(make_pair: MakePair) -> None:
    """Nothing but a kind; a header that is forwarded undecoded; the largest and smallest numbers a tag may hold."""
    tag = Tag("é" * 20, epoch=2**40, micro_batch=0, step=2**62, layer=-1)
    raw = msgspec.msgpack.encode(Header(7, []))
    async with opened(make_pair) as (one, two):
        for message in (Message("bare"), Message("forwarded", tag, -1, raw)):
            await one.send(message)
            received = await within(two.recv(), "recv")
            expect((received.kind, received.tag, received.edge) == (message.kind, message.tag, message.edge), "arrives as sent")
            expect(received.tensors == () and received.header == message.header, "nothing is added")
        expect(received.decode_header(Header) == Header(7, []), "a forwarded header is still the header")


async def check_bounds(make_pair: MakePair) -> None:
    """A full channel refuses send_nowait and makes send wait, by messages and by bytes. A waiting send continues when there is room."""
    by_bytes = Limits(capacity_messages=1000, capacity_bytes=1 << 20)
    for limits, nbytes, most in ((SMALL, 16, 8), (by_bytes, 1 << 17, 8), (by_bytes, 5000, 209)):
        async with opened(make_pair, limits) as (one, two):
            sent = 0
            while one.send_nowait(numbered(sent, nbytes)):
                sent += 1
                expect(sent <= most, f"at most {most} messages of {nbytes} bytes fit into {limits}")
            expect(sent, "an empty channel takes a message")
            waiting = asyncio.ensure_future(one.send(numbered(sent, nbytes)))
            await until_waiting(one, 1)
            await carry_one(two, one)
            expect(not waiting.done(), "send waits while the channel is full")
            expect(not one.send_nowait(numbered(sent + 1)), "send_nowait does not overtake a waiting send")
            expect(one.statistics().sends_waited == 1, "a send that waits is counted")
            await receive_all(two, 0, 1, nbytes)
            await within(waiting, "a waiting send completes when there is room")
            await receive_all(two, 1, sent + 1, nbytes)
            expect(two.recv_nowait() is None, "recv_nowait returns None when no message has arrived")


async def check_copies_at_once(make_pair: MakePair) -> None:
    """A channel that copies at once sends the bytes that the tensors had during `send_nowait`, on each path."""
    sizes = [size for size in _SIZES if size]
    async with opened(make_pair, Limits(capacity_bytes=1 << 23)) as (one, two):
        for number, nbytes in enumerate(sizes) if one.copies_at_once else ():
            message, buffer = lent(number, nbytes)
            is_sent = one.send_nowait(message)
            expect(is_sent or nbytes > 1 << 17, f"{nbytes} bytes are sent at once")  # another thread may copy larger ones
            if not is_sent:
                await within(one.send(message), f"{nbytes} bytes that are not sent at once are sent by send")
            buffer[:] = bytes(nbytes)
            await receive_all(two, number, number + 1, nbytes)


async def check_larger_than_capacity(make_pair: MakePair) -> None:
    """A message larger than the channel's capacity travels alone, and the messages around it keep their order."""
    limits = Limits(max_message_bytes=1 << 23, capacity_messages=4, capacity_bytes=1 << 18)
    sizes = [10, 1 << 21, 0, 3_000_001, 1 << 23, 5]
    async with opened(make_pair, limits) as (one, two), asyncio.TaskGroup() as group:
        group.create_task(send_sizes(one, sizes))
        await receive_sizes(two, sizes)


async def check_queue_of_senders(make_pair: MakePair) -> None:
    """Waiting senders are served in order of arrival; a cancelled one sends nothing and does not delay the others."""
    async with opened(make_pair) as (one, two):
        number = fill(one)
        tasks = [asyncio.ensure_future(one.send(numbered(number + index))) for index in range(4)]
        cancelled = asyncio.ensure_future(one.send(numbered(999)))
        tasks += [asyncio.ensure_future(one.send(numbered(number + 4 + index))) for index in range(4)]
        await until_waiting(one, 9)
        await cancelled_after(cancelled)
        expect(cancelled.cancelled(), "a waiting send can be cancelled")
        await receive_all(two, 0, number + 8)
        await within(asyncio.gather(*tasks), "all other sends end")
        expect(two.recv_nowait() is None, "a cancelled send sends nothing")


async def check_busy(make_pair: MakePair) -> None:
    """A second task in recv gets BusyChannelError; the first task keeps waiting."""
    async with opened(make_pair) as (one, two):
        receiving = asyncio.ensure_future(two.recv())
        await asyncio.sleep(0)
        await expect_error(BusyChannelError, two.recv(), "one task may be in recv")
        await one.send(numbered(1))
        check_numbered(await within(receiving, "recv"), 1)


async def check_read(make_pair: MakePair) -> None:
    """`read` gives all messages in order, with a pause after the last one. What was not given is received after it was cancelled, or raised
    what `on_message` raised. It gives what was sent before the end, then raises."""
    async with opened(make_pair) as (one, two):
        numbers, more = list[int](), asyncio.Event()

        def on_message(message: Message) -> None:
            numbers.append(message.decode_header(Header).number)
            if message.kind == "refused":
                raise InvalidMessageError("refused")

        async def read_until(number: int) -> None:
            while numbers[-1:] != [number]:
                await within(more.wait(), f"a pause after message {number}")
                more.clear()

        reading = asyncio.ensure_future(two.read(on_message, more.set))
        await asyncio.sleep(0)
        await expect_error(BusyChannelError, two.recv(), "a channel that is read is busy")
        await send_all(one, 0, 200, 3000)
        await read_until(199)
        expect(numbers == list(range(200)), "read gives every message once, in order")
        await cancelled_after(reading)
        await send_all(one, 200, 202)
        await receive_all(two, 200, 201)
        await one.send(Message("refused", header=Header(202, [])))
        await send_all(one, 203, 206)
        more.clear()
        await expect_error(InvalidMessageError, two.read(on_message, more.set), "read raises what on_message raises")
        expect(numbers[200:] == [201, 202] and more.is_set(), "a pause comes after the error, too")
        await one.aclose()
        await expect_error(EndOfChannel, two.read(on_message, more.set), "after everything sent comes the end")
        expect(numbers[202:] == [203, 204, 205], "read gives what was sent before the end")


async def check_close(make_pair: MakePair) -> None:
    """Closing wakes this side's calls and is idempotent; the peer receives everything sent before, then the end."""
    async with opened(make_pair) as (one, two):
        await send_all(one, 0, 5, 20_000)
        receiving = asyncio.ensure_future(one.recv())
        await asyncio.sleep(0)
        await within(asyncio.gather(one.aclose(), one.aclose()), "aclose")
        await one.aclose()
        expect(one.closed, "closed is true after aclose")
        await expect_error(ClosedChannelError, receiving, "aclose wakes recv")
        for call in (one.recv(), one.send(numbered(1))):
            await expect_error(ClosedChannelError, call, "a closed channel is closed")
        await receive_all(two, 0, 5, 20_000)
        for _ in range(2):
            await expect_error(EndOfChannel, two.recv(), "after everything sent comes the end")
        await expect_error(EndOfChannel, _nowait(two), "after everything sent comes the end")
        await expect_error(BrokenChannelError, two.send(numbered(1)), "a closed peer reads no message")


async def _nowait(channel: Channel) -> Message | None:
    return channel.recv_nowait()


async def check_close_under_pending_calls(make_pair: MakePair) -> None:
    """Closing one end wakes the pending recv and sends of both ends."""
    for closer in (0, 1):
        async with opened(make_pair) as pair:
            one, two = pair
            receiving = asyncio.ensure_future(one.recv())
            number = fill(one)
            sending = [asyncio.ensure_future(one.send(numbered(number + index))) for index in range(3)]
            await until_waiting(one, 3)
            await within(pair[closer].aclose(), "aclose")
            own = closer == 0
            await expect_error(ClosedChannelError if own else EndOfChannel, receiving, "closing wakes recv")
            for task in sending:
                await expect_error(ClosedChannelError if own else BrokenChannelError, task, "closing wakes every send")
            if own:
                await receive_all(two, 0, number)
                await expect_error(EndOfChannel, two.recv(), "what had not been sent is not received")


async def check_close_both(make_pair: MakePair) -> None:
    """Both ends close at once while messages are in flight."""
    async with opened(make_pair) as (one, two):
        await send_all(one, 0, 3)
        await send_all(two, 0, 3)
        await within(asyncio.gather(one.aclose(), two.aclose()), "aclose from both ends")


async def check_refused_messages(make_pair: MakePair) -> None:
    """A message that is too large or invalid is refused before any byte is sent, and the channel keeps working."""
    limits = Limits(max_header_bytes=2048, max_tensors=2, max_message_bytes=4096, capacity_bytes=1 << 16)
    tiny = Tensor(TensorSpec("uint8", (1,)), b"x")
    refused: list[tuple[type[TransportError], Message]] = [
        (LimitError, numbered(0, 4097)),
        (LimitError, Message("many", tensors=(tiny, tiny, tiny))),
        (LimitError, Message("header", header=bytes(5000))),
        (InvalidMessageError, Message("dtype", tensors=(Tensor(TensorSpec("float7", (1,)), b"x"),))),
    ]
    async with opened(make_pair, limits) as (one, two):
        for number, (kind, message) in enumerate(refused):
            await expect_error(kind, one.send(message), f"{message.kind} is refused")
            expect(not one.closed, "a refused message does not close the channel")
            await carry(one, two, number, 4096)


async def check_lifetime(make_pair: MakePair) -> None:
    """A received tensor keeps its bytes while the channel is used and after both ends are closed; once freed, no buffer is held."""
    async with opened(make_pair) as (one, two):
        kept = []
        for number in range(3):
            await one.send(numbered(number, 50_000))
            kept.append(await within(two.recv(), "recv"))
        for number in range(3, 120):
            await carry(one, two, number, 100_000)
        held = two.statistics().held_buffers
        expect(held <= 4, f"only the three kept messages and the last may be held, not {held}")
        await within(one.aclose(), "aclose")
        await within(two.aclose(), "aclose")
        for number, message in enumerate(kept):
            check_numbered(message, number, 50_000)
        del message
        kept.clear()
        expect(two.statistics().held_buffers == 0, "a buffer without references is not held")


async def check_holding_everything(make_pair: MakePair) -> None:
    """A receiver that frees nothing does not block the channel, and its tensors keep their bytes."""
    async with opened(make_pair) as (one, two), asyncio.TaskGroup() as group:
        group.create_task(send_all(one, 0, 60, 90_000))
        kept = [await within(two.recv(), f"message {number} while all others are held") for number in range(60)]
        for number, message in enumerate(kept):
            check_numbered(message, number, 90_000)


async def check_out_of_order_release(make_pair: MakePair) -> None:
    """Received tensors may be freed in any order, without limit."""
    async with opened(make_pair) as (one, two), asyncio.TaskGroup() as group:
        group.create_task(send_all(one, 0, 200, 30_000))
        kept: dict[int, Message] = {}
        for number in range(200):
            kept[number] = await within(two.recv(), f"message {number}")
            for old in [old for old in kept if (old * 7 + number) % 5 == 0]:
                check_numbered(kept.pop(old), old, 30_000)


async def check_statistics(make_pair: MakePair) -> None:
    """Both ends count the same messages and payload bytes."""
    async with opened(make_pair) as (one, two):
        for number in range(10):
            await one.send(numbered(number, 1000 * number))
            await within(two.recv(), "recv")
        sent, received = one.statistics(), two.statistics()
        expect((sent.messages_sent, sent.bytes_sent) == (10, 45_000), "what is sent is counted")
        expect((received.messages_received, received.bytes_received) == (10, 45_000), "what is received is counted")


async def check_sixty_four_mebibytes(make_pair: MakePair) -> None:
    """A payload of 64 MiB passes through a channel of 4 MiB."""
    size = 1 << 26
    limits = Limits(max_message_bytes=size, capacity_bytes=1 << 22)
    async with opened(make_pair, limits) as (one, two), asyncio.TaskGroup() as group:
        group.create_task(one.send(numbered(0, size)))
        check_numbered(await within(two.recv(), "64 MiB"), 0, size)


async def check_recv_cancelled_at_every_turn(make_pair: MakePair) -> None:
    """A recv that is cancelled after any number of turns loses no message, neither a small one nor one in many pieces."""
    limits = Limits(max_message_bytes=1 << 20, capacity_messages=8, capacity_bytes=1 << 16)
    for nbytes in (100, 50_000, 200_000):
        async with opened(make_pair, limits) as (one, two):
            for number, turns in enumerate(TURNS * 2):
                late = 2 * (number % 2)  # 2: recv already waits when the message is sent
                sending = asyncio.ensure_future(_send_after(late, one, numbered(number, nbytes)))
                receiving = await cancelled_after(two.recv(), turns)
                message = await within(two.recv(), "recv after a cancelled one") if receiving.cancelled() else receiving.result()
                check_numbered(message, number, nbytes)
                await within(sending, "send")


async def _send_after(turns: int, channel: Channel, message: Message) -> None:
    await skip_turns(turns)
    await channel.send(message)


async def check_send_cancelled_at_every_turn(make_pair: MakePair) -> None:
    """A send that is cancelled after any number of turns, while the peer makes room for it, has sent the whole message or nothing."""
    limits = Limits(max_message_bytes=1 << 20, capacity_messages=4, capacity_bytes=1 << 16)
    for nbytes in (100, 30_000, 1 << 20):
        async with opened(make_pair, limits) as (one, two):
            for turns in TURNS:
                count = fill(one)
                receiving = asyncio.ensure_future(_until(two, _LAST))
                sending = await cancelled_after(one.send(numbered(count, nbytes)), turns)
                await within(one.send(numbered(_LAST)), "the send after a cancelled one")
                messages = await within(receiving, "the sent messages")
                for number in range(count):
                    check_numbered(messages[number], number)
                rest = messages[count:-1]
                expect(len(rest) <= 1, "a cancelled send does not send twice")
                if rest:
                    check_numbered(rest[0], count, nbytes)
                else:
                    expect(sending.cancelled(), "a send that returned has sent")


async def check_waiting_send_cancelled_at_every_turn(make_pair: MakePair) -> None:
    """A waiting send, the first in line or a later one, that is cancelled after any number of turns is cancelled or has sent once. The
    sends before and behind it complete."""
    limits = Limits(max_message_bytes=1 << 20, capacity_messages=4, capacity_bytes=1 << 16)
    async with opened(make_pair, limits) as (one, two):
        for turns, index in product(TURNS, (0, 1)):
            count = fill(one)
            sends = [asyncio.ensure_future(one.send(numbered(number))) for number in (count, count + 1, _LAST)]
            await asyncio.sleep(0)
            receiving = asyncio.ensure_future(_until(two, _LAST))
            cancelled = await cancelled_after(sends[index], turns)
            await within(asyncio.gather(sends[1 - index], sends[2]), "the sends before and behind a cancelled one")
            expect(cancelled.cancelled() or cancelled.exception() is None, "a cancelled send raises CancelledError")
            messages = await within(receiving, "the sent messages")
            sent = [*range(count), *(count + each for each in (0, 1) if not sends[each].cancelled())]
            expect(len(messages) == len(sent) + 1, "a send has sent once unless it was cancelled")
            for number, message in zip(sent, messages, strict=False):
                check_numbered(message, number)


async def _until(channel: Channel, last: int) -> list[Message]:
    messages = [await channel.recv()]
    while messages[-1].tag is None or messages[-1].tag.step != last:
        messages.append(await channel.recv())
    return messages


async def check_aclose_cancelled_at_every_turn(make_pair: MakePair) -> None:
    """A cancelled aclose still closes the channel: this side is closed, the peer receives the end, and a second aclose returns."""
    for turns in TURNS[:10]:
        async with opened(make_pair) as (one, two):
            await one.send(numbered(0))
            await cancelled_after(one.aclose(), turns)
            await within(one.aclose(), "a second aclose")
            await expect_error(ClosedChannelError, one.recv(), "a cancelled aclose has closed")
            await expect_end(two)


async def expect_end(channel: Channel) -> None:
    """Receives the remaining messages and expects EndOfChannel or BrokenChannelError after them."""
    try:
        while True:
            await within(channel.recv(), "the end of the channel")
    except (EndOfChannel, BrokenChannelError):
        return


CHANNEL_CHECKS = checks_of(__name__)
