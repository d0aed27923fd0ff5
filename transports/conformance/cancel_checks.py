"""Checks cancellation at every await of the contract's calls.

Each check starts a call together with the operation that completes it, and cancels the call after 0, 1, 2 ... turns of the event loop, so
that every await of the call is reached. TURNS takes larger steps after the first few turns, because only slow media need that many.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeAlias

from flowrt.transports.conformance.connection_checks import HERE, KEY, SMALL, THERE
from flowrt.transports.conformance.kit import (
    MakePair,
    check_numbered,
    expect,
    expect_error,
    num_descriptors,
    numbered,
    opened,
    receive_all,
    until,
    within,
)
from flowrt.transports.contract import Channel, Identity, Limits, Listener
from flowrt.transports.errors import BrokenChannelError, ClosedChannelError, EndOfChannel, TransportError
from flowrt.transports.registry import get_transport
from flowrt.transports.wire.message import Message

ChannelCheck: TypeAlias = Callable[[MakePair], Coroutine[Any, Any, None]]
TransportCheck: TypeAlias = Callable[[str], Coroutine[Any, Any, None]]

TURNS = (0, 1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 15, 20, 30, 50, 100, 200)
_LAST = 10_000  # number of the message that ends a round


async def cancelled_after(call: Coroutine[Any, Any, Any] | asyncio.Task[Any], turns: int) -> asyncio.Task[Any]:
    """Runs `call` as a task, cancels it after `turns` turns of the loop, and returns the task once it has ended."""
    task = asyncio.ensure_future(call)
    for _ in range(turns):
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    return task


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
    for _ in range(turns):
        await asyncio.sleep(0)
    await channel.send(message)


async def check_send_cancelled_at_every_turn(make_pair: MakePair) -> None:
    """A send that is cancelled after any number of turns, while the peer makes room for it, has sent the whole message or nothing."""
    limits = Limits(max_message_bytes=1 << 20, capacity_messages=4, capacity_bytes=1 << 16)
    for nbytes in (100, 30_000, 200_000):
        async with opened(make_pair, limits) as (one, two):
            for turns in TURNS:
                count = 0
                while one.send_nowait(numbered(count)):
                    count += 1
                receiving = asyncio.ensure_future(_until(two, _LAST))
                sending = await cancelled_after(one.send(numbered(count, nbytes)), turns)
                await within(one.send(numbered(_LAST)), "the send after a cancelled one")
                messages = await within(receiving, "what was sent")
                for number in range(count):
                    check_numbered(messages[number], number)
                rest = messages[count:-1]
                expect(len(rest) <= 1, "a cancelled send does not send twice")
                if rest:
                    check_numbered(rest[0], count, nbytes)
                else:
                    expect(sending.cancelled(), "a send that returned has sent")


async def check_waiting_send_cancelled_at_every_turn(make_pair: MakePair) -> None:
    """A waiting send that is cancelled after any number of turns is cancelled or has sent, and the sends before and behind it complete."""
    limits = Limits(max_message_bytes=1 << 20, capacity_messages=4, capacity_bytes=1 << 16)
    async with opened(make_pair, limits) as (one, two):
        for turns in TURNS:
            count = 0
            while one.send_nowait(numbered(count)):
                count += 1
            head = asyncio.ensure_future(one.send(numbered(count)))
            waiting = asyncio.ensure_future(one.send(numbered(count + 1)))
            last = asyncio.ensure_future(one.send(numbered(_LAST)))
            await asyncio.sleep(0)
            receiving = asyncio.ensure_future(_until(two, _LAST))
            await cancelled_after(waiting, turns)
            await within(asyncio.gather(head, last), "the sends before and behind a cancelled one")
            messages = await within(receiving, "what was sent")
            expect(waiting.cancelled() or waiting.exception() is None, "a cancelled send raises CancelledError")
            expect(len(messages) == count + (2 if waiting.cancelled() else 3), "a send has sent once unless it was cancelled")
            for number, message in enumerate(messages[:-1]):
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


async def check_connect_cancelled_at_every_turn(scheme: str) -> None:
    """A connect that is cancelled after any number of turns leaves no resource, and the listener still serves other connectors."""
    async with await get_transport(scheme).listen(f"{scheme}://", SMALL, KEY, HERE) as listener:
        await _meet(scheme, listener, 0)
        before = num_descriptors()
        for number, turns in enumerate(TURNS, 1):
            abandoned = Identity("abandoned", str(number))
            connecting = await cancelled_after(get_transport(scheme).connect(listener.address, SMALL, KEY, abandoned), turns)
            if not connecting.cancelled():
                await connecting.result().aclose()
            await _meet(scheme, listener, number)
        await until(lambda: num_descriptors() <= before + 2, "a cancelled connect leaves no descriptor behind")


async def check_accept_cancelled_at_every_turn(scheme: str) -> None:
    """An accept that is cancelled after any number of turns loses no connection."""
    async with await get_transport(scheme).listen(f"{scheme}://", SMALL, KEY, HERE) as listener:
        for number, turns in enumerate(TURNS):
            connecting = asyncio.ensure_future(get_transport(scheme).connect(listener.address, SMALL, KEY, Identity("caller", str(number))))
            accepting = await cancelled_after(listener.accept(), turns)
            two = await within(listener.accept(), "accept after a cancelled one") if accepting.cancelled() else accepting.result()
            one = await within(connecting, "connect")
            async with one, two:
                expect(two.peer == Identity("caller", str(number)), "a connection is accepted once, by whoever asks next")
                await one.send(numbered(number))
                await receive_all(two, number, number + 1)


async def _meet(scheme: str, listener: Listener, number: int) -> None:
    """Checks that a channel through `listener` works. Channels of cancelled connectors may be accepted before it, and end."""
    caller = Identity(THERE.name, f"caller {number}")
    one = await within(get_transport(scheme).connect(listener.address, SMALL, KEY, caller), "connect")
    async with one:
        while True:
            two = await within(listener.accept(), "accept")
            async with two:
                if two.peer == caller:
                    await one.send(numbered(number, 100))
                    await receive_all(two, number, number + 1, 100)
                    return
                try:
                    await within(two.recv(), "the end of a caller who has given up")
                except TransportError:
                    continue
                expect(False, "a caller who has given up sends nothing")


CANCELLED_CHANNEL_CHECKS: tuple[ChannelCheck, ...] = (
    check_recv_cancelled_at_every_turn,
    check_send_cancelled_at_every_turn,
    check_waiting_send_cancelled_at_every_turn,
    check_aclose_cancelled_at_every_turn,
)
CANCELLED_TRANSPORT_CHECKS: tuple[TransportCheck, ...] = (
    check_connect_cancelled_at_every_turn,
    check_accept_cancelled_at_every_turn,
)
