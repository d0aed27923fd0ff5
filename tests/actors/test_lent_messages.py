"""Messages whose tensors are lent: their sender may change them as soon as `post` has returned."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from actors.test_fallback import linked

from flowrt.actors.link import Link
from flowrt.transports.conformance.connection_checks import HERE, THERE, pair_maker
from flowrt.transports.conformance.kit import check_numbered, fill, lent, numbered, opened, receive_all, within
from flowrt.transports.contract import Channel, Limits
from flowrt.transports.inproc import InprocChannel
from flowrt.transports.registry import unavailable_reason

needs_shm = pytest.mark.skipif(unavailable_reason("shm") is not None, reason="needs shm")
NUM_BYTES = 20000


async def inproc_pair(limits: Limits) -> tuple[Channel, Channel]:
    return InprocChannel.pair(limits, HERE, THERE)


@pytest.mark.parametrize("is_full", [False, True])
@pytest.mark.parametrize("make_pair", [inproc_pair, pytest.param(pair_maker("shm"), marks=needs_shm)], ids=["inproc", "shm"])
async def test_a_message_that_is_not_copied_at_once_gets_copies(
    make_pair: Callable[[Limits], Awaitable[tuple[Channel, Channel]]], is_full: bool
) -> None:
    async with opened(make_pair) as (one, two):
        number = fill(one) if is_full else 0
        link = Link(one, 16, lambda message: None)
        message, buffer = lent(number, NUM_BYTES)
        link.post(message)
        buffer[:] = bytes(NUM_BYTES)
        running = asyncio.ensure_future(link.run())
        await receive_all(two, 0, number)
        check_numbered(await within(two.recv(), "the lent message"), number, NUM_BYTES)
        running.cancel()
        await asyncio.wait([running])


@needs_shm
@pytest.mark.skipif(unavailable_reason("zmq") is not None, reason="needs zmq")
async def test_another_message_is_sent_in_its_place_after_a_break() -> None:
    async with linked("faulty+shm?out.drop@1", "zmq") as (one, two):
        receiving = asyncio.ensure_future(receive_all(one, 0, 1))  # as a link does: it notices the break
        message, buffer = lent(1, NUM_BYTES)
        assert one.send_nowait(numbered(0))
        one.send_nowait(message)
        buffer[:] = bytes(NUM_BYTES)
        check_numbered(await within(two.recv(), "what was sent before the break"), 0)
        replaced = await within(two.recv(), "what is sent in place of the lent message")
        assert (replaced.kind, replaced.edge, replaced.tensors) == ("replacement", 1, ())
        await two.send(numbered(0))
        await within(receiving, "the link goes on")


@needs_shm
async def test_a_link_copies_at_once_as_its_channel_does() -> None:
    async with linked("shm", "inproc") as (one, _):
        assert one.copies_at_once
    async with linked("inproc", "shm") as (one, _):
        assert not one.copies_at_once
