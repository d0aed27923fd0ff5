"""Messages of changing size over one channel."""

from __future__ import annotations

from collections.abc import Sequence

from flowrt.transports.conformance.kit import check_numbered, numbered, within
from flowrt.transports.contract import Channel


async def send_sizes(channel: Channel, sizes: Sequence[int], count: int) -> None:
    for number in range(count):
        await channel.send(numbered(number, sizes[number % len(sizes)]))


async def receive_sizes(channel: Channel, sizes: Sequence[int], count: int) -> None:
    for number in range(count):
        check_numbered(await within(channel.recv(), f"message {number}"), number, sizes[number % len(sizes)])
