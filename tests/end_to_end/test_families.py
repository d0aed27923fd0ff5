"""Every model family gives transformers' greedy float32 tokens, in shapes with and without servers, over processes too.

test_exactness.py has all shapes for one family; here each family runs through the graph, so that what only some of them have (latent
pages, shared experts, dense layers first, windows) is seen from end to end.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from served_models import Served, answers, make_served

import flowrt

YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "mscale": 1.0,
    "mscale_all_dim": 0.8,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_next": {"architecture": "qwen3_next", "seed": 3, "layers": 4},
    "mixtral": {"architecture": "mixtral", "seed": 4, "config": {"sliding_window": 24}},
    "deepseek_v3": {"architecture": "deepseek_v3", "seed": 4, "config": {"rope_parameters": YARN}},
    "deepseek_v2": {"architecture": "deepseek_v2", "seed": 4, "config": {"topk_method": "group_limited_greedy"}},
    "dbrx": {"architecture": "dbrx", "seed": 3},
}
APART: dict[str, Any] = {"attention": {"groups": 2, "micro_batches": 2}, "experts": {"servers": 3, "replicas": 2}}
PREFILL: dict[str, Any] = {"prefill": {"workers": 1}, "attention": {"groups": 2}, "experts": {"servers": 2, "replicas": 2}}
INSIDE: dict[str, Any] = {"attention": {"groups": 2}, "experts": {"servers": 0}}


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Served]:
    return functools.cache(lambda name: make_served(tmp_path_factory.mktemp(name), **FAMILIES[name]))


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest, families: Callable[[str], Served]) -> Served:
    return families(request.param)


async def answers_of(graph: Path, prompts: list[list[int]]) -> list[list[int]]:
    async with flowrt.open(graph) as running:
        return await answers(running, prompts)


@pytest.mark.parametrize("shape", ["apart over shm, small steps", "inside"])
async def test_in_one_process(family: Served, tmp_path: Path, shape: str) -> None:
    assert min(len(set(tokens)) for tokens in family.expected) >= 5, "the checkpoint repeats itself; equal tokens would prove little"
    deploy, limits = (INSIDE if shape == "inside" else APART) | {"processes": "one"}, {}
    if "shm" in shape:
        deploy |= {"links": {"attention-experts": {"transport": "shm"}}}
        limits = {"kv_pages": 20, "page_size": 16, "max_num_batched_tokens": 24, "max_num_seqs": 4}
    graph = family.write(tmp_path, deploy, limits=limits)
    assert await answers_of(graph, family.prompts) == family.expected


@pytest.mark.parametrize("name", ["deepseek_v3", "qwen3_next"])
async def test_between_processes(families: Callable[[str], Served], tmp_path: Path, name: str) -> None:
    """Latent pages, recurrent states and shared experts in attention processes, routed experts in others."""
    served = families(name)
    assert await answers_of(served.write(tmp_path, APART | {"processes": "many"}), served.prompts) == served.expected


@pytest.mark.parametrize("numerics", ["fast", "strict"])
async def test_prompts_of_recurrent_layers_computed_elsewhere(families: Callable[[str], Served], tmp_path: Path, numerics: str) -> None:
    """A transfer moves the state behind a prompt beside the keys and values of the other layers."""
    served = families("qwen3_next")
    limits = {"page_size": 16, "max_num_batched_tokens": 64, "max_message_bytes": 40_000, "max_num_seqs": 4}
    graph = served.write(tmp_path, PREFILL | {"processes": "one"}, limits=limits, numerics=numerics)
    twice = [*served.prompts, *served.prompts]  # of which the second ones find states in the prefix cache
    assert await answers_of(graph, twice) == [*served.expected, *served.expected]
