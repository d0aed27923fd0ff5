"""A client that sends a part of an expert layer over shared memory and then keeps writing over every payload it has ever placed there.

Run as a process of its own by test_writing_peer.py: `python writing_peer.py ADDRESS ROWS PAIRS WIDTH`.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import torch

from flowrt.dataflow.parts import PartHeader
from flowrt.dataflow.payload import Payload, to_message
from flowrt.transports.conformance.connection_checks import KEY, THERE
from flowrt.transports.contract import Limits
from flowrt.transports.native._words import Memory
from flowrt.transports.registry import get_transport
from flowrt.transports.shared_memory import transport
from flowrt.transports.shared_memory.ring import Layout
from flowrt.transports.wire.message import Tag


async def main(address: str, num_rows: int, num_pairs: int, width: int) -> None:
    mapped: list[tuple[Any, int]] = []

    def keep(memfd: int, nbytes: int) -> Memory:
        memory = Memory(memfd, nbytes)
        mapped.append((memory, nbytes))
        return memory

    transport.Memory = keep  # type: ignore[assignment, misc]
    async with await get_transport("shm").connect(address, Limits(), KEY, THERE) as channel:
        layout = Layout.of(channel.limits)
        row_P = torch.arange(num_pairs) % num_rows
        tensors = torch.ones(num_rows, width), row_P, torch.zeros(num_pairs, dtype=torch.int64), torch.ones(num_pairs)
        await channel.send(to_message(Payload(tensors, PartHeader(0)), 0, Tag("client@1")))
        memory = next(memory for memory, nbytes in mapped if nbytes == layout.total_bytes)
        area = memoryview(memory)[layout.area(0) :][: layout.area_bytes]
        while True:
            area[:] = b"\xff" * len(area)
            await asyncio.sleep(0)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], *map(int, sys.argv[2:])))
