"""Conformance checks at sizes that take minutes or gibibytes; the tests run smaller forms of the same checks."""

from __future__ import annotations

import asyncio

from flowrt.transports.conformance.channel_checks import receive_sizes, send_sizes
from flowrt.transports.conformance.connection_checks import check_many_connections
from flowrt.transports.conformance.kit import MakePair, checks_of, expect, opened, pattern
from flowrt.transports.contract import Limits
from flowrt.transports.wire.message import Message, Tag, Tensor, TensorSpec

ONE_GIBIBYTE = 1 << 30
_SLICE_BYTES = 1 << 24
NEEDED_BYTES = {"check_one_gibibyte": 6 << 30}  # the sender's copy, the receiver's copy, and buffers of the medium and the libraries


async def check_one_gibibyte(make_pair: MakePair, size: int = ONE_GIBIBYTE) -> None:
    """A payload of 1 GiB passes through a channel of 4 MiB, and every byte arrives as sent."""
    limits = Limits(max_message_bytes=size, capacity_bytes=1 << 22)
    payload = memoryview(pattern(size, 1))
    async with opened(make_pair, limits) as (one, two), asyncio.TaskGroup() as group:
        sent = Message("data", Tag("source@1"), 0, None, (Tensor(TensorSpec("uint8", (size,)), payload),))
        group.create_task(one.send(sent))
        async with asyncio.timeout(600):
            message = await two.recv()
        received = memoryview(message.tensors[0].data)  # type: ignore[arg-type]
        expect(received.nbytes == size, "as many bytes arrive as were sent")
        flat = received.cast("B") if received.format != "B" else received
        for start in range(0, size, _SLICE_BYTES):
            expect(flat[start : start + _SLICE_BYTES] == payload[start : start + _SLICE_BYTES], f"the bytes from {start} arrive as sent")


async def check_hundred_thousand_messages(make_pair: MakePair, count: int = 100_000) -> None:
    """100 000 messages pass through one channel in order, and the channel holds no buffer at the end."""
    sizes = [9000 if number % 10 == 0 else 16 for number in range(count)]
    async with opened(make_pair) as (one, two):
        async with asyncio.TaskGroup() as group:
            group.create_task(send_sizes(one, sizes))
            await receive_sizes(two, sizes)
        expect(two.statistics().held_buffers == 0, "a buffer without references is not held")


async def check_ten_thousand_connections(scheme: str) -> None:
    """10 000 channels are opened, used and closed one after another, and no descriptor is left open."""
    await check_many_connections(scheme, 10_000)


LONG_CHECKS = checks_of(__name__)
