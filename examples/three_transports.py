"""Runs one graph over three transports: only the name of the transport changes, the answers stay the same."""

from __future__ import annotations

import asyncio
from pathlib import Path

import torch

import flowrt

GRAPH = Path(__file__).parent / "two_actors" / "graph.yaml"
EDGES = ("input.x -> scale.x", "scale.y -> add.a", "input.x -> add.b", "add.sum -> output.sum")
SETTINGS = {"inproc": ["processes=one"], "shm": [], "zmq": []}


async def main() -> None:
    x = torch.randn(100, 64)
    for transport, settings in SETTINGS.items():
        overrides = [*settings, *(f"edges.{edge}.transport={transport}" for edge in EDGES)]
        async with flowrt.open(GRAPH, overrides=overrides) as graph:
            outputs = [out async for out in graph.stream([x] * 50)]
            right = all(torch.equal(out, 3 * x) for out in outputs)
            print(f"{transport:>6}: {len(outputs)} answers, right: {right}")


if __name__ == "__main__":
    asyncio.run(main())
