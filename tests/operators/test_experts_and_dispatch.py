"""Partitioning pairs by server, computing the parts on several servers, and combining the responses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flowrt.operators import expert_products
from flowrt.operators.combine import combine
from flowrt.operators.dispatch import partition, repartition
from flowrt.operators.expert_products import one_by_one
from flowrt.operators.experts import KEPT_CALLS, Experts, PairCounts
from flowrt.operators.families.registry import read_model_config
from flowrt.operators.products import Form, form_for, lay_out
from flowrt.operators.replica_table import UNAVAILABLE, ReplicaTable
from flowrt.operators.weights import Checkpoint


@st.composite
def routings(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor, list[list[int]], int]:
    """Expert ids, weights, replicas of each expert, number of servers."""
    num_experts, num_servers = draw(st.integers(2, 9)), draw(st.integers(1, 5))
    num_rows, num_active = draw(st.integers(0, 12)), draw(st.integers(1, min(4, num_experts)))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10_000)))
    ids = torch.rand(num_rows, num_experts, generator=generator).topk(num_active, dim=1).indices
    replicas = [draw(st.lists(st.integers(0, num_servers - 1), min_size=1, max_size=3, unique=True)) for _ in range(num_experts)]
    return ids, torch.rand(num_rows, num_active, generator=generator), replicas, num_servers


@settings(max_examples=60, deadline=None)
@given(routings())
def test_parts_cover_every_pair_once(routing: tuple[torch.Tensor, torch.Tensor, list[list[int]], int]) -> None:
    ids, weights, replicas, num_servers = routing
    parts = partition(ids, weights, ReplicaTable.from_lists(replicas, num_servers))
    assert [part.server for part in parts] == sorted({part.server for part in parts})
    covered: list[int] = []
    for part in parts:
        rows = part.rows_R.tolist()
        assert rows == sorted(set(rows))
        assert part.pair_P.tolist() == sorted(part.pair_P.tolist())
        assert set(part.row_P.tolist()) == set(range(len(rows))), "a row without a pair travelled"
        for pair, row, expert, weight in zip(part.pair_P.tolist(), part.row_P.tolist(), part.expert_P, part.weight_P, strict=True):
            token, slot = divmod(pair, ids.shape[1])
            assert rows[row] == token
            assert expert == ids[token, slot]
            assert weight == weights[token, slot]
            assert part.server in replicas[int(expert)]
            covered.append(pair)
    assert sorted(covered) == list(range(ids.numel()))


def test_replica_table_refuses_unknown_servers() -> None:
    for replicas in ([[0], [2]], [[0], [-1]]):
        with pytest.raises(ValueError, match="expert 1 has replicas on servers"):
            ReplicaTable.from_lists(replicas, 2)


def test_pairs_of_an_unavailable_expert_form_a_part_without_server_and_are_partitioned_again() -> None:
    expert_ids_TA, weights_TA = torch.tensor([[0, 1], [1, 2]]), torch.tensor([[0.1, 0.2], [0.3, 0.4]])
    nowhere, there = partition(expert_ids_TA, weights_TA, ReplicaTable.from_lists([[0], [], [0]], 2))
    assert (nowhere.server, nowhere.pair_P.tolist(), nowhere.expert_P.tolist()) == (UNAVAILABLE, [1, 2], [1, 1])
    assert (there.server, there.pair_P.tolist()) == (0, [0, 3])
    (repeated,) = repartition(nowhere, 2, ReplicaTable.from_lists([[0], [1], [0]], 2))
    assert (repeated.server, repeated.pair_P.tolist(), repeated.rows_R.tolist(), repeated.row_P.tolist()) == (1, [1, 2], [0, 1], [0, 1])
    assert torch.equal(repeated.weight_P, torch.tensor([0.2, 0.3]))


@pytest.fixture(scope="module")
def experts(models: Any) -> Experts:
    config = read_model_config(models["wide"])
    return Experts(config, Checkpoint(models["wide"]), {1: tuple(range(config.num_experts))})


def test_experts_equal_their_definition(models: Any, experts: Experts) -> None:
    config, checkpoint = experts.config, Checkpoint(models["wide"])
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(7, config.hidden_size, generator=generator)
    row = torch.tensor([0, 0, 1, 3, 3, 3, 4, 6])  # rows 2 and 5 have no pairs
    expert = torch.tensor([4, 1, 4, 0, 11, 4, 2, 11])
    weight = torch.rand(8, generator=generator)
    pairs = experts.forward_pairs(1, x, row, expert)
    expected = torch.zeros_like(x)
    for pair in range(8):
        shape = 2 * config.expert_width, config.hidden_size
        gate, up = (checkpoint.read_part(config, "expert_gate_up", shape, layer=1, expert=int(expert[pair])) @ x[row[pair]]).chunk(2)
        down = checkpoint.read_part(config, "expert_down", (shape[1], config.expert_width), layer=1, expert=int(expert[pair]))
        y = down @ (torch.nn.functional.silu(gate) * up)
        torch.testing.assert_close(pairs[pair], y, rtol=1e-5, atol=1e-5)
        expected[row[pair]] += weight[pair] * y
    got = experts.forward(1, x, row, expert, weight)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    in_order = torch.zeros_like(x)
    for pair in range(8):
        in_order[row[pair]] += pairs[pair] * weight[pair]
    assert torch.equal(got, in_order), "pairs were not added in their order"
    assert not got[2].any()


def test_no_pairs_give_zero_rows(experts: Experts) -> None:
    nothing = torch.zeros(0, dtype=torch.int64)
    x = torch.ones(2, experts.config.hidden_size)
    assert not experts.forward(1, x, nothing, nothing, torch.zeros(0)).any()


def test_expert_not_held_is_refused(models: Any) -> None:
    some = Experts(read_model_config(models["wide"]), Checkpoint(models["wide"]), {1: (3, 5)})
    x, row = torch.ones(2, 64), torch.tensor([0, 1])
    with pytest.raises(ValueError, match=r"layer 1: experts \[4\] were requested but are not held here; held are \[3, 5\]"):
        some.forward(1, x, row, torch.tensor([5, 4]), torch.ones(2))
    assert some.forward(1, x, row, torch.tensor([5, 3]), torch.ones(2)).any()


def test_pairs_are_counted_by_layer_and_expert(models: Any) -> None:
    some = Experts(read_model_config(models["wide"]), Checkpoint(models["wide"]), {1: (5, 3)})
    for _ in range(2):
        some.forward(1, torch.ones(2, 64), torch.tensor([0, 1, 1]), torch.tensor([5, 3, 5]), torch.ones(3))
    assert some.num_pairs() == {1: {5: 4, 3: 2}}
    counted = PairCounts(3)
    for number in range(KEPT_CALLS + 3):
        counted.add(torch.tensor([1, 0, number % 2]))
    assert counted.read() == counted.read() == [KEPT_CALLS + 3, 0, KEPT_CALLS // 2 + 1]


@pytest.mark.parametrize("form", ["plain", "wide panels"])
def test_only_experts_with_rows_are_computed(form: Form) -> None:
    if form not in ("plain", form_for(torch.float16, "cpu", (16, 32))):
        pytest.skip("this processor has no AVX2, or there was no compiler")
    weights = torch.randn(3, 64, 32), torch.randn(3, 32, 32)
    for each in weights:
        each[1] = float("nan")
    held = one_by_one(*([lay_out(matrix, form) for matrix in each] for each in weights))
    assert held.run(torch.ones(3, 32), torch.tensor([1, 0, 2])).isfinite().all()


def test_combine_adds_in_the_order_given_and_changes_nothing_given() -> None:
    generator = torch.Generator().manual_seed(0)
    residual = torch.randn(5, 8, generator=generator)
    parts = [(torch.tensor(rows), torch.randn(len(rows), 8, generator=generator)) for rows in ([0, 2, 4], [2], [0, 1, 2, 3, 4], [0, 1, 2])]
    kept = residual.clone(), [y.clone() for _, y in parts]
    out = combine(residual, parts)
    total = torch.zeros(5, 8)
    for rows, y in parts:
        for index, row in enumerate(rows.tolist()):
            total[row] = total[row] + y[index]
    assert torch.equal(out, residual + total)
    assert torch.equal(residual, kept[0])
    assert all(torch.equal(y, before) for (_, y), before in zip(parts, kept[1], strict=True))
    assert torch.equal(combine(residual, []), residual)


@given(counts=st.lists(st.integers(0, 70), min_size=1, max_size=6))
def test_products_are_taken_of_few_numbers_of_rows_and_hold_the_requested_ones(counts: list[int]) -> None:
    total, start = sum(counts), 0
    for count in counts:
        first, taken = expert_products.window(start, count, total)
        assert 0 <= first <= start
        assert start + count <= first + taken <= total
        if count > expert_products.ROWS_ALIKE and -(-count // 16) * 16 <= total:
            assert taken % expert_products.ROWS_ALIKE == 0
            assert taken - count < expert_products.ROWS_ALIKE
        else:
            assert (first, taken) == (start, count)
        start += count


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_neighbours_rows_in_a_product_change_nothing(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    gate_up = (torch.randn(4, 48, 32, generator=generator) / 6).to(dtype)
    down = (torch.randn(4, 32, 24, generator=generator) / 5).to(dtype)
    counts = [17, 1, 40, 21]
    x_PH = torch.randn(sum(counts), 32, generator=generator).to(dtype)
    grouped = expert_products.GroupedExperts(
        [(expert_products.lay_out(each), expert_products.lay_out(other)) for each, other in zip(gate_up, down, strict=True)]
    )
    alone = torch.cat([grouped.expert(place)(rows) for place, rows in enumerate(x_PH.split(counts))])
    torch.testing.assert_close(grouped.run_counted(x_PH, counts), alone)
