"""Drawn graphs between real processes, over drawn transports: their tokens are transformers' own."""

from __future__ import annotations

import asyncio
import random
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from served_models import NEW_TOKENS, Served

import flowrt
from flowrt.api import read_graph
from flowrt.graph.model import Graph
from flowrt.launcher.model_facts import facts_of
from flowrt.simulation.drawn_graphs import draw_deploy

SEEDS = range(8)
GREEDY = flowrt.SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True)


def draw(seed: int, directory: Path) -> Graph:
    facts = facts_of(directory)
    for attempt in count():
        chance = random.Random(f"real {seed} {attempt}")
        processes: Any = chance.choice(("many", "many", 2, "one"))
        transports = ("auto", "shm", "zmq") if processes != "one" else ("auto", "shm", "zmq", "inproc")
        deploy = draw_deploy(chance, facts, transports)
        deploy["attention"]["micro_batches"] = chance.randint(1, 4)
        deploy["experts"].setdefault("batches", {}).update(same_layer=chance.random() < 0.5, turn_calls=chance.choice((1, 4)))
        keys = {
            "flowrt": 1,
            "model": {"path": str(directory), "dtype": "float32"},
            "deploy": {**deploy, "processes": processes},
            "numerics": chance.choice(("fast", "strict")),
            "limits": {"kv_pages": chance.choice((64, 512)), "max_num_batched_tokens": chance.choice((64, 512))},
        }
        deploy["prefill"]["numerics"] = chance.choice(("fast", "strict"))
        try:
            return read_graph(keys)
        except flowrt.GraphError:
            continue
    raise AssertionError


@pytest.mark.parametrize("seed", SEEDS)
async def test_drawn_graphs_give_the_reference_tokens(served: Served, seed: int) -> None:
    async with flowrt.open(draw(seed, served.directory)) as running, asyncio.timeout(120):
        found = await asyncio.gather(*(running.complete(prompt, GREEDY) for prompt in served.prompts))
    assert [list(each.token_ids) for each in found] == served.expected
