"""Measures what INT8 changes: `PYTHONPATH=. python tests/end_to_end/int8_answers.py --set deploy.prefill.int8=true`.

The small model answers held-out questions with the settings of `--set` and without them: how many answers are the same, how much the
logprobs of their tokens differ, and how many bytes left the ports of the name `--port` for other processes. Of the questions with their
right answers as texts: the perplexity of both, and at how many tokens the most likely one is the same.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import os
from collections.abc import Sequence
from pathlib import Path

import flowrt
from examples.training.questions import KINDS, held_out

GRAPH = Path(__file__).resolve().parents[2] / "examples" / "quickstart.yaml"
NEW_TOKENS = 24
AT_ONCE = 16


async def answers(
    settings: Sequence[str], prompts: Sequence[str], texts: Sequence[str], port: str
) -> tuple[list[flowrt.Completion], list[flowrt.Completion], int]:
    """The answers, what is read of the texts, and the payload bytes of the messages that left a port of this name for the answers."""
    params, places = flowrt.SamplingParams(max_tokens=NEW_TOKENS, logprobs=0), asyncio.Semaphore(AT_ONCE)
    reads = flowrt.SamplingParams(max_tokens=1, prompt_logprobs=1)

    async def answer(prompt: str, params: flowrt.SamplingParams) -> flowrt.Completion:
        async with places:
            return await running.complete(prompt, params)

    async with flowrt.open(GRAPH, overrides=settings) as running:
        found = await asyncio.gather(*(answer(prompt, params) for prompt in prompts))
        edges = [edge for each in (await running.statistics()).values() for edge in each.edges]
        num_bytes = sum(edge.payload_bytes for edge in edges if f".{port}" in edge.edge.partition(" -> ")[0])
        read = await asyncio.gather(*(answer(text, reads) for text in texts))
    assert not any(each.error for each in (*found, *read))
    return list(found), list(read), num_bytes


def perplexity(read: Sequence[flowrt.Completion]) -> float:
    logprobs = [each.token for completion in read for each in completion.prompt_logprobs]
    return math.exp(-sum(logprobs) / len(logprobs))


def most_likely(read: Sequence[flowrt.Completion]) -> list[int]:
    return [each.top[0][0] for completion in read for each in completion.prompt_logprobs]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--set", dest="settings", action="append", default=[])
    parser.add_argument("--questions", type=int, default=100, help="of each of the five kinds")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--port", default="chunk", help="chunk: KV; server: rows to the servers; results: rows back")
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    questions = [question for kind in KINDS for question in held_out(kind, options.questions)]
    prompts, texts = [each.prompt for each in questions], [each.prompt + each.answer for each in questions]
    common = [f"model.dtype={options.dtype}", "deploy.prefill.workers=1"]
    plain, plain_read, plain_bytes = asyncio.run(answers(common, prompts, texts, options.port))
    other, other_read, other_bytes = asyncio.run(answers([*common, *options.settings], prompts, texts, options.port))
    same = [(a, b) for a, b in zip(plain, other, strict=True) if a.token_ids == b.token_ids]
    changes = sorted(abs(x - y) for a, b in same for x, y in zip(a.logprobs, b.logprobs, strict=True))
    print(f"{len(same)} of {len(prompts)} answers are the same; bytes {other_bytes / plain_bytes:.2f} of {plain_bytes / 1e6:.1f} MB")
    most = changes[int(0.99 * len(changes))]
    print(f"change of a token's logprob, of {len(changes)}: 99th percentile {most:.5f}, largest {changes[-1]:.5f}")
    pairs = list(zip(most_likely(plain_read), most_likely(other_read), strict=True))
    agreement = sum(a == b for a, b in pairs) / len(pairs)
    print(
        f"perplexity {perplexity(other_read):.4f} against {perplexity(plain_read):.4f}; most likely of {len(pairs)} tokens: {agreement:.2%}"
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
