"""Runs one MoE layer in three processes and compares it with the same layer in one function."""

from __future__ import annotations

import asyncio
from pathlib import Path

import torch
from layer_ops import HIDDEN, reference

import flowrt


async def main() -> None:
    batches = [torch.randn(rows, HIDDEN) for rows in (1, 7, 64, 256)]
    async with flowrt.open(Path(__file__).parent / "graph.yaml") as graph:
        async for y in graph.stream(batches):
            x = batches.pop(0)
            print(f"{len(x):>4} rows, largest difference {(y - reference(x)).abs().max():.1e}")


if __name__ == "__main__":
    asyncio.run(main())
