"""The graphs of the hop benchmark: they pass on their input, as often as the benchmark counts. No time is asserted."""

from __future__ import annotations

import pytest
import torch

import flowrt
from flowrt.bench.cases.graphs import HopGraph, chain, ring
from flowrt.graph.checks import check
from flowrt.graph.fuse import fuse


@pytest.mark.parametrize("made", [ring("one", num_layers=5), chain(num_nodes=4, num_layers=5)], ids=["ring", "chain"])
def test_graphs_pass_the_checks_of_graph_files(made: HopGraph) -> None:
    assert list(check(made.graph)) == []


async def test_ring_makes_the_hops_that_it_counts() -> None:
    made = ring("one", num_layers=5)
    async with flowrt.open(made.graph) as graph:
        x = torch.arange(64, dtype=torch.uint8)
        assert torch.equal(await graph(x=x), x)
        statistics = await graph.statistics()
    assert sum(sent.num_messages for worker in statistics.values() for sent in worker.edges) == made.num_hops == 11


async def test_chain_is_fused_and_fires_once_per_layer() -> None:
    made = chain(num_nodes=4, num_layers=5)
    assert fuse(made.graph, "worker").fused == ("echo1", "echo2", "echo3")
    async with flowrt.open(made.graph) as graph:
        x = torch.arange(64, dtype=torch.uint8)
        assert torch.equal(await graph(x=x), x)
        statistics = await graph.statistics()
    assert statistics["worker"].num_firings == 5
