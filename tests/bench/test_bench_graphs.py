"""The graphs of the benchmarks: they pass on what they get, as often as the benchmark counts; one call of `m2n` and `transports` is one
round, in which every byte is checked. No time is asserted."""

from __future__ import annotations

import pytest
import torch

import flowrt
from flowrt.bench.cases.graphs import HopGraph, RoundGraph, chain, many_to_many, ring, rows_and_back, stream
from flowrt.bench.cases.m2n import measure, round_seconds
from flowrt.bench.cases.nodes import bytes_of, check_stamped, send, send_rows
from flowrt.bench.cases.transports import NUM_STREAMED, SIZES, STREAM_BYTES
from flowrt.bench.peers.checksum import check
from flowrt.errors import UserError
from flowrt.graph.checks import check as problems_of
from flowrt.graph.fuse import fuse

GRAPHS = {
    "ring": ring("one", num_layers=5),
    "chain": chain(num_nodes=4, num_layers=5),
    "3:2": many_to_many(3, 2, 1 << 10),
    "1:8": many_to_many(1, 8, 1 << 18),
    "8:1": many_to_many(8, 1, 8),
    "rows 2:2": rows_and_back(2, 2, 16, 64),
    "rows 1:3": rows_and_back(1, 3, 4, 8),
}


@pytest.mark.parametrize("made", GRAPHS.values(), ids=GRAPHS)
def test_graphs_pass_the_checks_of_graph_files(made: HopGraph | RoundGraph) -> None:
    assert list(problems_of(made.graph)) == []


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


@pytest.mark.parametrize("made", [many_to_many(3, 2, 1 << 10, "inproc"), rows_and_back(2, 3, 16, 64, "inproc")], ids=["m2n", "rows"])
async def test_each_call_is_a_round_that_ends_after_it_began(made: RoundGraph) -> None:
    async with flowrt.open(made.graph.replace(processes="one")) as graph:
        rounds = await round_seconds(graph, made.go, 3)
    num_ends = sum(edge.target == "output" for edge in made.graph.edges.values())
    assert [len(ends) for ends in rounds] == [num_ends] * 3
    assert all(0 < end < 60 for ends in rounds for end in ends)


async def test_one_receiver_gets_more_in_an_uneven_round() -> None:
    made = many_to_many(2, 2, 1 << 10, "inproc", max_factor=10)
    async with flowrt.open(made.graph.replace(processes="one")) as graph:
        await round_seconds(graph, (2, 1 << 10, 0, 10), 1)
        statistics = await graph.statistics()
    sent = sum(each.payload_bytes for name, worker in statistics.items() if name.startswith("sender") for each in worker.edges)
    assert sent == 2 * (10 + 1) * (1 << 10)


async def test_stream_sends_the_payloads_that_it_counts() -> None:
    made = stream("inproc", NUM_STREAMED)
    async with flowrt.open(made.graph.replace(processes="one")) as graph:
        await graph(go=torch.tensor([1 << 10]))
        statistics = await graph.statistics()
    assert max(each.num_messages for each in statistics["left"].edges) == made.num_hops
    assert STREAM_BYTES in SIZES


def test_checksum_finds_a_changed_byte() -> None:
    payload = send(torch.tensor([1, 4096, -1, 1]))["to0"].clone()
    assert check_stamped(bytes_of(payload)) > 0
    payload[4000] = 2
    with pytest.raises(ValueError, match="checksum"):
        check_stamped(bytes_of(payload))
    with pytest.raises(ValueError, match="checksum"):
        check(bytes_of(torch.zeros(64, dtype=torch.uint8)))


def test_time_is_read_back_from_rows() -> None:
    rows = send_rows(torch.tensor([1, 4, 8]))["to0"]
    assert (rows.dtype, rows.shape) == (torch.bfloat16, (4, 8))
    assert check_stamped(bytes_of(rows)) > 0


async def test_numbers_that_make_no_round_are_refused() -> None:
    with pytest.raises(UserError, match="at least 1 sender"):
        await anext(measure(0, 4, 1 << 10, "auto"))
