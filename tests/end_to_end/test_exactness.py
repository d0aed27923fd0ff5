"""Greedy float32 tokens equal transformers', for prompts served at the same time, in every shape, over every transport."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from served_models import Served

import flowrt
from flowrt.transports.registry import unavailable_reason

NUM_TOKENS = 10  # of each prompt, which has 1 to 200: they cross the pages' bounds
GREEDY = flowrt.SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)

SHAPES: dict[str, dict[str, Any]] = {
    "1 group, 1 server": {},
    "1 group, 3 servers": {"experts": {"servers": 3, "replicas": 2}},
    "2 groups, 3 servers, 2 micro-batches": {"attention": {"groups": 2, "micro_batches": 2}, "experts": {"servers": 3, "replicas": 2}},
    "4 groups, 1 server": {"attention": {"groups": 4}},
    "3 groups, 2 servers, 3 micro-batches": {"attention": {"groups": 3, "micro_batches": 3}, "experts": {"servers": 2}},
    "uneven placement": {"experts": {"servers": 3, "placement": {"experts.0": "0-5", "experts.1": "6", "experts.2": "5-7"}}},
    "2 groups, 5 servers, trampolines": {
        "attention": {"groups": 2, "micro_batches": 2},
        "experts": {"servers": 5, "replicas": 2, "trampoline": "always"},
    },
    "3 domains of 2 micro-batches": {"attention": {"groups": 3, "domains": 3, "micro_batches": 2}, "experts": {"servers": 2}},
    "2 unequal domains, 4 micro-batches, batches of several layers": {
        "attention": {"groups": 3, "domains": 2, "micro_batches": 4},
        "experts": {"servers": 2, "batches": {"same_layer": False, "min_tags": 3, "max_wait_seconds": 1e-3, "turn_calls": 1}},
    },
    "3 groups, colocated": {"attention": {"groups": 3, "micro_batches": 2}, "experts": {"servers": "colocated"}},
    "2 prefill workers, 2 groups": {"prefill": {"workers": 2}, "attention": {"groups": 2, "micro_batches": 2}, "experts": {"servers": 2}},
    "KV of complete prompts": {
        "prefill": {"workers": 2, "stream": False, "threads": 1},
        "attention": {"groups": 2, "threads": 2, "micro_batches": 2},
        "experts": {"servers": 2},
    },
    "experts inside": {"attention": {"groups": 2, "micro_batches": 2}, "experts": {"servers": 0}},
}
OF_PREFILL = {"max_num_seqs": 2, "kv_pages": 64, "page_size": 5, "max_num_batched_tokens": 96, "max_micro_batches": 1}
OF_ROLES = {"prefill": OF_PREFILL, "attention": {"max_num_seqs": 6}}
LIMITS: dict[str, dict[str, Any]] = {"KV of complete prompts": {"limits": {"kv_pages": 64, "roles": OF_ROLES}}}


def deploy_of(shape: str, processes: Any, transport: str = "auto") -> dict[str, Any]:
    deploy = {"experts": {"servers": 1}, **SHAPES[shape], "processes": processes}
    if transport != "auto":
        deploy["links"] = {"attention-experts": {"transport": transport}}
        if "prefill" in deploy:
            deploy["links"]["prefill-attention"] = {"transport": transport}
    return deploy


async def answers(graph: Any, prompts: list[list[int]]) -> list[list[int]]:
    async with flowrt.open(graph) as running:
        completions = await asyncio.gather(*(running.complete(prompt, GREEDY) for prompt in prompts))
        statistics = await running.statistics()
    assert [each.finish_reason for each in completions] == ["length"] * len(prompts)
    assert sum(each.late_wakeups for each in statistics.values()) == 0
    return [list(each.token_ids) for each in completions]


BETWEEN_PROCESSES: list[tuple[str, Any, str]] = [
    ("2 groups, 3 servers, 2 micro-batches", "many", "shm"),
    ("2 groups, 3 servers, 2 micro-batches", "many", "zmq"),
    ("2 groups, 3 servers, 2 micro-batches", 2, "auto"),
    ("4 groups, 1 server", "many", "auto"),
    ("2 prefill workers, 2 groups", "many", "shm"),
    ("KV of complete prompts", "many", "ucx" if unavailable_reason("ucx") is None else "zmq"),
    ("uneven placement", "many", "auto"),
    ("2 groups, 5 servers, trampolines", "many", "shm"),
    ("2 groups, 5 servers, trampolines", "many", "zmq"),
    ("experts inside", "many", "auto"),
    ("3 domains of 2 micro-batches", "many", "shm"),
    ("3 groups, colocated", "many", "shm"),
]
# Each shape over each transport, where it has an edge between workers; over shm and zmq in one process only where no case above has both.
IN_ONE_PROCESS = [
    (shape, transport)
    for shape in SHAPES
    if shape != "KV of complete prompts"
    for transport in (("inproc",) if shape == "experts inside" else ("inproc", "shm", "zmq"))
    if (shape, "many", transport) not in BETWEEN_PROCESSES
]


@pytest.mark.parametrize(("shape", "transport"), IN_ONE_PROCESS)
async def test_in_one_process(served: Served, tmp_path: Path, shape: str, transport: str) -> None:
    graph = served.write(tmp_path, deploy_of(shape, "one", transport if shape != "experts inside" else "auto"))
    graph = expand(graph) if transport == "inproc" else graph  # the expanded file gives the same tokens
    assert await answers(graph, served.prompts) == [tokens[:NUM_TOKENS] for tokens in served.expected]


@pytest.mark.parametrize(("shape", "processes", "transport"), BETWEEN_PROCESSES)
async def test_between_real_processes(served: Served, tmp_path: Path, shape: str, processes: Any, transport: str) -> None:
    graph = served.write(tmp_path, deploy_of(shape, processes, transport), **LIMITS.get(shape, {}))
    assert await answers(graph, served.prompts) == [tokens[:NUM_TOKENS] for tokens in served.expected]


@pytest.mark.parametrize("shape", ["2 groups, 3 servers, 2 micro-batches", "experts inside"])
async def test_dense_layers_among_the_others(mixed: Served, tmp_path: Path, shape: str) -> None:
    assert await answers(mixed.write(tmp_path, deploy_of(shape, "one")), mixed.prompts) == [
        tokens[:NUM_TOKENS] for tokens in mixed.expected
    ]


def expand(graph: Path) -> Path:
    from flowrt.api import read_graph
    from flowrt.graph.written import to_yaml

    expanded = graph.with_name("expanded.yaml")
    expanded.write_text(to_yaml(read_graph(graph)))
    return expanded


async def test_few_pages_and_small_steps_change_no_token(served: Served, tmp_path: Path) -> None:
    limits = {"kv_pages": 20, "page_size": 16, "max_num_batched_tokens": 24, "max_num_seqs": 4}
    graph = served.write(tmp_path, deploy_of("2 groups, 3 servers, 2 micro-batches", "one"), limits=limits)
    assert await answers(graph, served.prompts) == [tokens[:NUM_TOKENS] for tokens in served.expected]
