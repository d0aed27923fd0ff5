"""Runs the second process of the conformance checks: it connects to ADDRESS and behaves as the last argument specifies.

python -m flowrt.transports.conformance.peer ADDRESS "echo" | "hang" | "send five and hang"
"""

from __future__ import annotations

import asyncio
import sys

from flowrt.transports.conformance.connection_checks import KEY, SMALL, THERE
from flowrt.transports.conformance.kit import numbered
from flowrt.transports.errors import EndOfChannel
from flowrt.transports.registry import get_transport
from flowrt.transports.wire.address import parse_address


async def behave(address: str, behaviour: str) -> None:
    async with await get_transport(parse_address(address).scheme).connect(address, SMALL, KEY, THERE) as channel:
        if behaviour == "send five and hang":
            for number in range(5):
                await channel.send(numbered(number, 30_000))
        if behaviour != "echo":
            await asyncio.Event().wait()
        try:
            while True:
                await channel.send(await channel.recv())
        except EndOfChannel:
            return


if __name__ == "__main__":
    asyncio.run(behave(*sys.argv[1:3]))
