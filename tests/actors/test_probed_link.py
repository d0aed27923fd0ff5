"""A link on which no response arrives: a probe shows whether the peer is busy or the link carries nothing any more."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial

import pytest

from flowrt.actors.link import LinkLostError
from flowrt.actors.probed_link import LOST_AFTER, ProbedLink
from flowrt.transports.conformance.connection_checks import HERE, KEY, SMALL, THERE
from flowrt.transports.conformance.kit import numbered, until
from flowrt.transports.contract import Channel
from flowrt.transports.registry import get_transport
from flowrt.transports.wire.message import Message


class End:
    def __init__(self, channel: Channel) -> None:
        self.received: list[Message] = []
        self.channel = channel
        self.link = ProbedLink(channel, 64, self.received.append)
        self.task = asyncio.get_running_loop().create_task(self.link.run())

    @property
    def num_received(self) -> int:
        return self.link.statistics().messages_received

    def has_received(self, number: int) -> bool:
        return self.num_received == number

    async def aclose(self) -> None:
        self.task.cancel()
        with suppress(asyncio.CancelledError, LinkLostError):
            await self.task
        await self.link.aclose()


@asynccontextmanager
async def linked(scheme: str) -> AsyncIterator[tuple[End, End]]:
    transport = get_transport(scheme)
    async with await transport.listen(f"{scheme}://", SMALL, KEY, HERE) as listener:
        one = await transport.connect(listener.address, SMALL, KEY, THERE)
        two = await listener.accept()
    ends = End(one), End(two)
    try:
        yield ends
    finally:
        for end in ends:
            await end.aclose()


async def test_a_peer_that_responds_to_probes_is_waited_for() -> None:
    async with linked("inproc") as (one, two):
        for number in range(1, 2 * LOST_AFTER):
            one.link.check(is_waiting=True)
            await until(partial(one.has_received, number), "the peer responds to the probe")
            one.link.check(is_waiting=True)  # it has: the next turn without a message begins
        assert not one.task.done()
        assert (one.received, two.received) == ([], []), "no node gets a probe"


async def test_no_probe_is_sent_while_nothing_is_awaited() -> None:
    async with linked("inproc") as (one, two):
        for _ in range(2 * LOST_AFTER):
            one.link.check(is_waiting=False)
        two.link.post(numbered(0))
        await until(lambda: one.received, "the message arrives")
        assert (one.num_received, two.num_received) == (1, 0)


async def test_a_link_that_carries_nothing_is_lost() -> None:
    async with linked("faulty+inproc?cut@0") as (one, two):
        for _ in range(LOST_AFTER - 1):
            one.link.check(is_waiting=True)
            await asyncio.sleep(0)
        assert not one.task.done()
        one.link.check(is_waiting=True)
        with pytest.raises(LinkLostError, match="has not responded to a probe for 7 s"):
            await one.task
        with pytest.raises(LinkLostError):
            await two.task
