"""The graphs that the hop benchmark times: they pass on what they are given, as often as the benchmark says. No time is asserted."""

from __future__ import annotations

import pytest
import torch

import flowrt
from flowrt.bench.hop import Ring, chain, ring
from flowrt.bench.peers import ZeroMQEcho, queue_echo_seconds
from flowrt.graph.checks import check
from flowrt.graph.fuse import fuse


@pytest.mark.parametrize("made", [ring("one", num_layers=5), chain(num_nodes=4, num_layers=5)], ids=["ring", "chain"])
def test_the_graphs_are_ones_a_user_could_write(made: Ring) -> None:
    assert list(check(made.graph)) == []


async def test_a_ring_makes_the_hops_it_says() -> None:
    made = ring("one", num_layers=5)
    async with flowrt.open(made.graph) as graph:
        x = torch.arange(64, dtype=torch.uint8)
        assert torch.equal(await graph(x=x), x)
        statistics = await graph.statistics()
    assert sum(sent.num_messages for worker in statistics.values() for sent in worker.edges) == made.num_hops == 11


async def test_a_chain_is_fused_and_fires_once_per_layer() -> None:
    made = chain(num_nodes=4, num_layers=5)
    assert fuse(made.graph, "worker").fused == ("echo1", "echo2", "echo3")
    async with flowrt.open(made.graph) as graph:
        x = torch.arange(64, dtype=torch.uint8)
        assert torch.equal(await graph(x=x), x)
        statistics = await graph.statistics()
    assert statistics["worker"].num_firings == 5


async def test_the_peers_give_back_what_they_are_sent() -> None:
    assert await queue_echo_seconds(10, object()) > 0
    async with ZeroMQEcho() as peer:
        assert await peer.round_trip_seconds(3, b"x" * 100) > 0
