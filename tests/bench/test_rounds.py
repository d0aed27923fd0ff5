"""The graphs of `flowrt bench transports` and `m2n`: one call is one round, every byte is checked, and gloo's rounds answer. No time
is asserted but that it went forward."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import flowrt
from flowrt.bench.gloo import GlooGroup
from flowrt.bench.m2n import measure
from flowrt.bench.operators import bytes_of, check, check_stamped, send, stamped
from flowrt.bench.rounds import Rounds, block_of, many_to_many, nearest_rank, rows_and_back
from flowrt.bench.transports import SIZES, STREAM_BYTES, stream_ring
from flowrt.errors import UserError
from flowrt.graph.checks import check as problems_of


@pytest.mark.parametrize(
    "made",
    [
        many_to_many(3, 2, 1 << 10),
        many_to_many(1, 8, 1 << 18),
        many_to_many(8, 1, 8),
        rows_and_back(2, 2, 16, 64),
        rows_and_back(1, 3, 4, 8),
    ],
    ids=["3:2", "1:8", "8:1", "rows 2:2", "rows 1:3"],
)
def test_the_graphs_are_ones_a_user_could_write(made: Rounds) -> None:
    assert list(problems_of(made.graph)) == []


@pytest.mark.parametrize("made", [many_to_many(3, 2, 1 << 10, "inproc"), rows_and_back(2, 3, 16, 64, "inproc")], ids=["m2n", "rows"])
async def test_a_call_is_a_round_that_ends_after_it_began(made: Rounds) -> None:
    async with flowrt.open(replace(made.graph, processes="one")) as graph:
        rounds = await block_of(graph, made.go, 3)
    num_ends = sum(edge.target == "output" for edge in made.graph.edges.values())
    assert [len(ends) for ends in rounds] == [num_ends] * 3
    assert all(0 < end < 60 for ends in rounds for end in ends)


async def test_one_receiver_may_be_given_more() -> None:
    made = many_to_many(2, 2, 1 << 10, "inproc", largest_factor=10)
    async with flowrt.open(replace(made.graph, processes="one")) as graph:
        await block_of(graph, (2, 1 << 10, 0, 10), 1)
        statistics = await graph.statistics()
    sent = sum(each.payload_bytes for name, worker in statistics.items() if name.startswith("sender") for each in worker.edges)
    assert sent == 2 * (10 + 1) * (1 << 10)


async def test_a_stream_gives_as_many_payloads_as_it_says() -> None:
    made = stream_ring("inproc")
    async with flowrt.open(replace(made.graph, processes="one")) as graph:
        await graph(go=torch.tensor([1 << 10]))
        statistics = await graph.statistics()
    assert max(each.num_messages for each in statistics["left"].edges) == made.num_hops
    assert STREAM_BYTES in SIZES


def test_a_byte_that_changed_on_the_way_is_found() -> None:
    payload = send(torch.tensor([1, 4096, -1, 1]))["to0"].clone()
    assert check_stamped(bytes_of(payload)) > 0
    payload[4000] = 2
    with pytest.raises(ValueError, match="checksum"):
        check_stamped(bytes_of(payload))
    with pytest.raises(ValueError, match="checksum"):
        check(bytes_of(torch.zeros(64, dtype=torch.uint8)))


def test_a_stamp_is_read_back_from_rows_too() -> None:
    rows = stamped([torch.ones(2 * 4 * 8, dtype=torch.uint8)])[0].view(torch.bfloat16).reshape(4, 8)
    assert check_stamped(bytes_of(rows)) > 0


def test_the_nearest_rank_is_one_of_the_values() -> None:
    values = [float(number) for number in range(100, 0, -1)]
    assert (nearest_rank(values, 0.99), nearest_rank(values, 0.5), nearest_rank([3.0], 0.99)) == (99.0, 50.0, 3.0)


async def test_gloo_makes_rounds_of_each_kind_and_ends() -> None:
    async with GlooGroup(1, 1) as gloo:
        for method in ("all_to_all", "isend", "rows", "echo"):
            times = await gloo.round_seconds(method, 3, 1 << 10)
            assert len(times) == 3
            assert min(times) > 0


async def test_numbers_that_make_no_round_are_the_users_to_mend() -> None:
    with pytest.raises(UserError, match="at least 1 sender"):
        await anext(measure(0, 4, 1 << 10, 20, "auto"))
