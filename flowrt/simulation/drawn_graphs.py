"""Draws graphs: how many processes of each role serve a model, and how they exchange, in the keys of a graph file.

Some draws are impossible combinations, which loading refuses with the reason.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

from flowrt.errors import GraphError
from flowrt.graph.facts import ModelFacts
from flowrt.graph.file import load_graph
from flowrt.graph.model import Graph
from flowrt.launcher.model_facts import facts_of

MAX_GROUPS, MAX_SERVERS = 4, 6
LIBRARY_SHARE = 0.15  # of graphs whose model is computed by the module of transformers
EMULATED_LINK = "ub"
_TRANSPORTS = ("auto", "auto", "zmq")  # of simulated links: the latter have nothing to fall back on
_COLOCATED = ("colocated", "colocated")
_PAGES = ((24, 1), (16, 2), (12, 4), (24, 4))


def draw_graph(seed: int, graph: Graph) -> Graph:
    """A drawn deployment of the model of `graph`, with its reliability settings and emulated hardware; the first of the seed that is
    possible."""
    assert graph.model is not None
    facts = facts_of(Path(graph.model.path))
    for attempt in count():
        chance = random.Random(f"graph {seed} {attempt}")
        keys: dict[str, Any] = {
            "flowrt": 1,
            "model": {"path": graph.model.path, "dtype": graph.model.dtype},
            "deploy": draw_deploy(chance, facts),
        }
        if graph.emulation is not None:
            keys["deploy"]["links"]["attention-experts"]["link"] = EMULATED_LINK
        pages, page_size = chance.choice(_PAGES)
        keys["limits"] = {
            "max_num_seqs": chance.randint(2, 6),
            "kv_pages": pages,
            "page_size": page_size,
            "max_tokens": chance.choice((8, 16)),
            "max_num_batched_tokens": chance.choice((8, 16, 24)),
            "chunk_tokens": 4,
            "dynamic_micro_batches": chance.random() < 0.3,
        }
        keys["numerics"] = chance.choice(("fast", "fast", "strict"))
        _draw_settings(random.Random(f"settings {seed} {attempt}"), keys)
        of_nodes = facts
        if random.Random(f"library {seed} {attempt}").random() < LIBRARY_SHARE:
            of_nodes = replace(facts, in_library=True, shared_experts=False)
        try:
            drawn = load_graph(keys, facts_of=lambda *_, of_nodes=of_nodes: of_nodes)
        except GraphError:
            continue
        assert drawn.model is not None
        model = replace(drawn.model, implementation="native")  # whose config the exact model has, also with the nodes of transformers
        return drawn.replace(reliability=graph.reliability, emulation=graph.emulation, model=model)
    raise AssertionError


def _draw_settings(chance: random.Random, keys: dict[str, Any]) -> None:
    """Steps of a target time, workers for long prompts alone, and prefill workers with pages of another size or numerics of their own."""
    if chance.random() < 0.3:
        keys["limits"]["target_step_seconds"] = chance.choice((1e-3, 5e-3))
    if chance.random() < 0.3:
        keys["long_prompts"] = {"min_tokens": chance.choice((4, 8, 16))}
    if keys["deploy"]["prefill"]["workers"] and keys["numerics"] == "fast" and chance.random() < 0.5:
        page_size, limits = chance.choice((1, 2, 3, 4)), keys["limits"]
        limits["roles"] = {"prefill": {"page_size": page_size, "kv_pages": -(-limits["kv_pages"] * limits["page_size"] // page_size)}}
    if keys["deploy"]["prefill"]["workers"] and chance.random() < 0.5:
        keys["deploy"]["prefill"]["numerics"] = chance.choice(("fast", "strict"))


def draw_deploy(chance: random.Random, facts: ModelFacts, transports: Sequence[str] = _TRANSPORTS) -> dict[str, Any]:
    """The section `deploy`."""
    groups, servers = chance.randint(1, MAX_GROUPS), chance.choice((0, *_COLOCATED, *range(1, MAX_SERVERS + 1), *range(3, MAX_SERVERS + 1)))
    attention = {"groups": groups, "domains": chance.choice((1, 1, 2, groups)), "micro_batches": chance.choice((1, 2, 2, 3))}
    experts: dict[str, Any] = {"servers": servers, "replicas": chance.choice((1, 2, 2, 3))}
    experts["trampoline"] = chance.choice(("never", "auto", "always", "always"))
    if chance.random() < 0.3:
        experts["batches"] = {"min_tags": chance.randint(1, 3), "max_wait_seconds": chance.choice((0.0, 2e-3))}
    if chance.random() < 0.3:
        at, count = ("attention", groups) if servers in _COLOCATED else ("experts", servers)
        experts |= {"placement": _draw_placement(chance, facts, [f"{at}.{number}" for number in range(count)]), "replicas": 1}
    link: dict[str, Any] = {"transport": chance.choice(transports), "open": chance.choice(("lazy", "lazy", "start"))}
    if chance.random() < 0.2:
        link["credits"] = chance.randint(1, 5)
    prefill = {"workers": chance.choice((0, 0, 1, 2))}
    links = {"attention-experts": link} | ({"prefill-attention": {"transport": chance.choice(transports)}} if prefill["workers"] else {})
    return {"prefill": prefill, "attention": attention, "experts": experts, "links": links}


def _draw_placement(chance: random.Random, facts: ModelFacts, servers: Sequence[str]) -> dict[str, Any]:
    """Draws the experts of each server: the same in every layer, or others in the first."""

    def draw() -> dict[str, set[int]]:
        holders = {expert: chance.sample(servers, chance.randint(1, min(len(servers), 3))) for expert in range(facts.num_experts)}
        return {server: {expert for expert, found in holders.items() if server in found} for server in servers}

    if not servers:
        return {"experts.0": "0"}
    first, others = draw(), draw()
    layers = [str(layer) for layer in facts.moe_layers]
    if chance.random() < 0.5 or len(layers) < 2:
        return {server: _ids(held) for server, held in first.items()}
    return {server: {layers[0]: _ids(held), ",".join(layers[1:]): _ids(others[server])} for server, held in first.items()}


def _ids(experts: set[int]) -> str:
    return ",".join(map(str, sorted(experts)))
