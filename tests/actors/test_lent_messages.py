"""Messages whose tensors are lent: their sender may change them as soon as `post` has returned."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from flowrt.actors.link import Link
from flowrt.transports.conformance.connection_checks import HERE, THERE, pair_maker
from flowrt.transports.conformance.kit import check_numbered, fill, lent, opened, receive_all, within
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
