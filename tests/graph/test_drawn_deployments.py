"""Drawn deployments: the impossible ones, and no others, are refused with a reason and what to write."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from graph.model_facts import FACTS

from flowrt.errors import GraphError
from flowrt.graph.file import load_graph
from flowrt.graph.model import Graph
from flowrt.graph.written import to_yaml
from flowrt.simulation.drawn_graphs import draw_deploy


def impossible(deploy: dict[str, Any]) -> Iterator[str]:
    """The texts of the reasons for which a deployment cannot be."""
    attention, experts, link = deploy["attention"], deploy["experts"], deploy["links"]["attention-experts"]
    groups, domains, servers = attention["groups"], attention["domains"], experts["servers"]
    is_colocated = servers == "colocated"
    servers = groups if is_colocated else servers
    if domains > groups:
        yield "domains need as many groups"
    if domains > 1 and not servers:
        yield "domains take turns at expert servers"
    if experts["replicas"] > max(1, servers):
        yield "replicas need as many servers"
    if experts["trampoline"] == "always" and is_colocated:
        yield "do not forward"
    elif experts["trampoline"] == "always" and servers <= -(-groups // domains):
        yield "forwards to others"
    if servers <= is_colocated and link["transport"] != "auto":
        yield "leaves no link to the experts"
    if not servers and "placement" in experts:
        yield "leaves nothing to place"
    if servers > is_colocated and link.get("credits", 8) < attention["micro_batches"]:
        yield "is too few"
    batches = experts.get("batches", {"max_wait_seconds": 0})
    num_sources = groups + deploy["prefill"]["workers"]
    if servers and batches["max_wait_seconds"] and batches["min_tags"] > num_sources * attention["micro_batches"]:
        yield "tags"


def load(keys: Mapping[str, Any]) -> Graph | str:
    """The graph, or the error."""
    try:
        return load_graph(keys, facts_of=lambda *_: FACTS)
    except GraphError as error:
        return str(error)


@pytest.mark.parametrize("first", range(0, 200, 50))
def test_drawn_deployments_load_unless_they_are_impossible(first: int, tmp_path: Path) -> None:
    num_refused = 0
    for seed in range(first, first + 50):
        keys = {"flowrt": 1, "model": {"path": str(tmp_path)}, "deploy": draw_deploy(random.Random(seed), FACTS)}
        found, reasons = load(keys), list(impossible(keys["deploy"]))
        if isinstance(found, str):
            num_refused += 1
            assert any(reason in found for reason in reasons), f"seed {seed}: {found}"
            assert "write" in found, f"seed {seed}: {found}"
            assert "\n" not in found
        else:
            assert not reasons, f"seed {seed}: {keys['deploy']}"
            (tmp_path / "g.yaml").write_text(to_yaml(found))
            assert load_graph(tmp_path / "g.yaml", facts_of=lambda *_: FACTS) == found
    assert 10 < num_refused < 40
