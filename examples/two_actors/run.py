"""Runs two actors in two processes: one call, then a stream of sixteen inputs with several in flight at once."""

from __future__ import annotations

import asyncio
from pathlib import Path

import torch

import flowrt


async def main() -> None:
    async with flowrt.open(Path(__file__).parent / "graph.yaml") as graph:
        x = torch.arange(128, dtype=torch.float32).reshape(2, 64)
        out = await graph(x=x)
        print("one call is right:", torch.equal(out, 3 * x))

        inputs = [torch.full((1, 64), float(number)) for number in range(16)]
        outputs = [out async for out in graph.stream(inputs)]
        print("the stream is in order:", all(torch.equal(out, 3 * x) for out, x in zip(outputs, inputs, strict=True)))


if __name__ == "__main__":
    asyncio.run(main())
