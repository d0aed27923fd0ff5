"""KV that is kept as INT8 (`model.kv_cache`): equal tokens in every shape with strict numerics, and while processes are killed."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from served_models import Served, make_served

import flowrt
from flowrt.errors import UserError

NEW_TOKENS = 16
SHAPES: dict[str, dict[str, Any]] = {
    "2x3": {"attention": {"groups": 2, "micro_batches": 2}, "experts": {"servers": 3, "replicas": 2}},
    "prefill apart": {"prefill": {"workers": 1}, "attention": {"groups": 2}},
}
INSIDE: dict[str, Any] = {"experts": {"servers": 0}, "processes": "one"}


@pytest.fixture
def model(request: pytest.FixtureRequest, served: Served, tmp_path: Path) -> Served:
    """Keys and values by head; latents; states beside keys and values."""
    return served if request.param == "qwen3_moe" else make_served(tmp_path / "model", seed=3, architecture=request.param)


async def answers(graph: Path, model: Served, kept: str, *victims: str, **limits: Any) -> list[flowrt.Completion]:
    overrides = [f"model.kv_cache={kept}", *(f"limits.{key}={value}" for key, value in limits.items())]
    parameters = flowrt.SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=0)
    async with flowrt.open(graph, overrides=overrides) as running:
        found: list[flowrt.Completion] = []
        for victim in victims or ("",):
            task = asyncio.gather(*(running.complete(prompt, parameters) for prompt in model.prompts))
            if victim:
                await asyncio.sleep(0.05)
                os.kill(running.pids[victim], signal.SIGKILL)
            found += await task
        return found


def tokens(completions: list[flowrt.Completion]) -> list[list[int]]:
    return [list(each.token_ids) for each in completions]


@pytest.mark.parametrize(
    ("model", "shape"),
    [("qwen3_moe", "2x3"), ("qwen3_moe", "prefill apart"), ("deepseek_v3", "prefill apart"), ("qwen3_next", "prefill apart")],
    indirect=["model"],
)
async def test_tokens_depend_neither_on_the_shape_nor_on_deaths(model: Served, tmp_path: Path, shape: str) -> None:
    graph = model.write(tmp_path, INSIDE, numerics="strict")
    expected = tokens(await answers(graph, model, "int8", enable_prefix_caching="false"))
    graph = model.write(tmp_path, SHAPES[shape], numerics="strict")
    victims = ("prefill.0", "attention.1") if shape == "prefill apart" else ("experts.1", "attention.0")
    assert tokens(await answers(graph, model, "int8", *victims)) == 2 * expected


@pytest.mark.parametrize("model", ["qwen3_moe", "deepseek_v3"], indirect=True)
async def test_fast_numerics_stay_close(model: Served, tmp_path: Path) -> None:
    """The first token's logprob, whose context is the prompt, with pages in either form."""
    graph = model.write(tmp_path, INSIDE)
    wide, narrow = [await answers(graph, model, kept) for kept in ("dtype", "int8")]
    changes = [abs(a.logprobs[0] - b.logprobs[0]) for a, b in zip(wide, narrow, strict=True) if a.token_ids[0] == b.token_ids[0]]
    assert len(changes) > len(wide) / 2
    assert 0 < max(changes) < 0.1


async def test_an_edge_that_would_quantize_again_is_refused(served: Served, tmp_path: Path) -> None:
    graph = served.write(tmp_path, {"prefill": {"workers": 1, "int8": True}})
    with pytest.raises(UserError, match=r"deploy\.prefill\.int8.*KV is kept as INT8 \(model\.kv_cache\) and travels so; remove the key"):
        await answers(graph, served, "int8")
