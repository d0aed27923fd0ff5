"""Runs the small model from Python: streams one answer, then generates eight at once with a blocking call."""

from __future__ import annotations

import asyncio
from pathlib import Path

import flowrt

GRAPH = Path(__file__).parent / "quickstart.yaml"


async def stream() -> None:
    async with flowrt.open(GRAPH) as graph:
        async for event in graph.generate("What is 347 + 285?", max_tokens=16):
            print(event.text, end="", flush=True)
            if isinstance(event, flowrt.EndEvent):
                print(f"   ({event.finish_reason})")


def all_at_once() -> None:
    prompts = [f"What is {a} + {a + 111}?" for a in range(100, 500, 50)]
    for prompt, completion in zip(prompts, flowrt.generate(GRAPH, prompts, max_tokens=16), strict=True):
        print(prompt, completion.text.strip())


if __name__ == "__main__":
    asyncio.run(stream())
    all_at_once()
