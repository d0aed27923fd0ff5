"""Fused CPU kernels for (row, expert) pairs: choice of experts, partition by server, sums, and the fallback without a compiler."""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any

import pytest
import torch
from checkpoints import load_truth
from drawn import DTYPES, drawn
from hypothesis import given, settings
from hypothesis import strategies as st

from flowrt.operators.attention import GroupedAttention
from flowrt.operators.combine import combine
from flowrt.operators.dispatch import Part, partition, repartition
from flowrt.operators.experts import Experts
from flowrt.operators.families.registry import read_model_config
from flowrt.operators.gate import Gate
from flowrt.operators.kernels import choice
from flowrt.operators.kernels.cpu import rows
from flowrt.operators.kernels.torch import rows as torch_rows
from flowrt.operators.kv_pages import KvPages
from flowrt.operators.replica_table import ReplicaTable
from flowrt.operators.step_layout import StepLayout
from flowrt.operators.weights import Checkpoint

needs_rows = pytest.mark.skipif(not rows.available, reason="without a compiler there are only the library's calls")


@pytest.mark.parametrize("name", [name for name in vars(choice.Kernels) if not name.startswith("_")])
def test_c_and_torch_kernels_have_equal_signatures(name: str) -> None:
    assert inspect.signature(getattr(rows, name)) == inspect.signature(getattr(torch_rows, name))


@needs_rows
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_experts", "num_active"), [(1, 1), (5, 5), (16, 1), (40, 8), (256, 20)])
def test_the_best_are_chosen_and_weighed(dtype: torch.dtype, num_experts: int, num_active: int) -> None:
    logits = torch.stack([torch.randperm(num_experts, generator=torch.Generator().manual_seed(row)) for row in range(9)]).to(dtype) / 8
    expert_ids, weights = rows.topk_softmax(logits, num_active, 2.5, dtype)
    best, expected = logits.topk(num_active, dim=-1)
    assert torch.equal(expert_ids, expected)
    torch.testing.assert_close(
        weights, (best.float().softmax(dim=-1) * 2.5).to(dtype), rtol=1e-2 if dtype == torch.bfloat16 else 1e-6, atol=0
    )


@needs_rows
def test_equal_scores_choose_the_first_and_nan_scores_choose_valid_experts() -> None:
    expert_ids, weights = rows.topk_softmax(torch.tensor([[1.0, 3, 2, 3, 3, 2], [0.0] * 6]), 4, 1.0, torch.float32)
    assert expert_ids.tolist() == [[1, 3, 4, 2], [0, 1, 2, 3]]
    assert torch.equal(weights[1], torch.full((4,), 0.25))
    for place in range(6):
        logits = torch.arange(6.0)[None]
        logits[0, place] = float("nan")  # is the greatest, as in torch
        expert_ids, weights = rows.topk_softmax(logits, 2, 1.0, torch.float32)
        assert expert_ids[0, 0] == place
        assert weights.isnan().all()
    for bad in (float("nan"), float("-inf"), float("inf")):
        expert_ids, weights = rows.topk_softmax(torch.full((1, 6), bad), 3, 1.0, torch.float32)
        assert expert_ids.tolist() == [[0, 1, 2]]
        assert weights.isnan().all()


@needs_rows
@settings(max_examples=100, deadline=None)
@given(st.data())
def test_pairs_are_partitioned_as_by_the_library(data: st.DataObject) -> None:
    num_experts, num_servers = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 5))
    num_rows, num_active = data.draw(st.integers(0, 12) | st.integers(40, 90)), data.draw(st.integers(1, num_experts))
    generator, turn = torch.Generator().manual_seed(data.draw(st.integers(0, 10_000))), data.draw(st.integers(0, 100))
    replicas = [data.draw(st.lists(st.integers(0, num_servers - 1), max_size=3, unique=True)) for _ in range(num_experts)]
    table = ReplicaTable.from_lists(replicas, num_servers)
    expert_P = torch.rand(num_rows, num_experts, generator=generator).topk(num_active, dim=1).indices.flatten()
    weight_P = torch.rand(num_rows * num_active, generator=generator).to(data.draw(st.sampled_from([*DTYPES, torch.float64])))
    everything = partition(expert_P.view(num_rows, num_active), weight_P.view(num_rows, num_active), table, turn)
    if table.num_servers > 1 or not table.is_complete:
        equal_parts(everything, by_torch(None, expert_P, weight_P, num_active, table, turn))
    for part in everything:
        shift = ReplicaTable.from_lists([[(server + 1) % num_servers for server in servers] for servers in replicas], num_servers)
        repeated = by_torch(part.pair_P, part.expert_P, part.weight_P, num_active, shift, turn)
        equal_parts(repartition(part, num_active, shift, turn), repeated)


def by_torch(
    pair_P: torch.Tensor | None,
    expert_P: torch.Tensor,
    weight_P: torch.Tensor,
    num_active: int,
    table: ReplicaTable,
    turn: int,
) -> list[Part]:
    return [Part(*fields) for fields in torch_rows.partition_by_server(pair_P, expert_P, weight_P, num_active, table, turn)]


def equal_parts(found: list[Part], expected: list[Part]) -> None:
    assert [part.server for part in found] == [part.server for part in expected]
    for own, other in zip(found, expected, strict=True):
        for name in ("rows_R", "row_P", "expert_P", "weight_P", "pair_P"):
            assert torch.equal(getattr(own, name), getattr(other, name)), name


@needs_rows
def test_pair_without_a_possible_server_is_refused() -> None:
    table, weights = ReplicaTable.from_lists([[0], [1]], 2), torch.ones(1, 2)
    for expert in (-1, 2):
        with pytest.raises(IndexError, match="a pair names an expert or a server that does not exist: 2 experts, 2 servers"):
            partition(torch.tensor([[0, expert]]), weights, table)
    part = Part(0, *(torch.zeros(1, dtype=torch.int64) for _ in range(3)), torch.ones(1), torch.tensor([4]))
    servers_EB, none = torch.zeros(2, 2, dtype=torch.int64), torch.empty(2, 0, dtype=torch.int64)
    for bad in (
        ReplicaTable(none, torch.tensor([0, 0]), 2, False),
        ReplicaTable(servers_EB, torch.tensor([2, 0]), 2),
        ReplicaTable(servers_EB, torch.tensor([2, 3]), 2),
        ReplicaTable(servers_EB + torch.tensor([0, 2]), torch.tensor([1, 2]), 2),
        ReplicaTable(servers_EB - torch.tensor([0, 2]), torch.tensor([1, 2]), 2),
    ):
        with pytest.raises(IndexError, match="a pair names an expert or a server that does not exist"):
            partition(torch.tensor([[0, 1]]), weights, bad)
    with pytest.raises(IndexError, match="a pair names an expert or a server that does not exist"):
        repartition(replace(part, pair_P=torch.tensor([-1])), 2, table)
    with pytest.raises(ValueError, match="1 pairs do not go with"):
        repartition(part, 0, table)
    with pytest.raises(ValueError, match="indices must be int64 on the host"):
        partition(torch.tensor([[0, 1]], dtype=torch.int32), weights, table)
    with pytest.raises(ValueError, match="2 pairs do not go with 3 weights"):
        partition(torch.tensor([[0, 1]]), torch.ones(1, 3), table)


@needs_rows
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", [0, 1, 9, 700])
def test_responses_are_summed_with_the_librarys_bits(dtype: torch.dtype, num_rows: int, threads: int) -> None:
    residual = drawn(num_rows, 88, dtype=dtype)
    generator = torch.Generator().manual_seed(num_rows)
    where = [(torch.rand(num_rows, generator=generator) < share).nonzero()[:, 0] for share in (1.0, 0.5, 0.1, 0.0, 0.7)]
    parts = [(rows_R, drawn(len(rows_R), 88, seed=seed, dtype=dtype)) for seed, rows_R in enumerate(where)]
    before = [y.clone() for _, y in parts]
    assert torch.equal(combine(residual, parts), torch_rows.add_parts(residual, parts))
    assert all(torch.equal(y, kept) for (_, y), kept in zip(parts, before, strict=True))
    assert torch.equal(combine(residual, []), residual)


@needs_rows
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("num_pairs", [0, 1, 40, 1500])
def test_an_expert_server_sorts_and_weighs_as_the_library_does(models: Any, dtype: torch.dtype, num_pairs: int, monkeypatch: Any) -> None:
    config = read_model_config(models["wide"]).with_dtype(str(dtype).removeprefix("torch."))
    held = (7, 0, 3, 11)
    experts = Experts(config, Checkpoint(models["wide"]), {1: held})
    generator = torch.Generator().manual_seed(num_pairs)
    x_RH, weight_P = drawn(9, config.hidden_size, dtype=dtype), torch.rand(num_pairs, generator=generator).to(dtype)
    row_P = torch.randint(0, 9, (num_pairs,), generator=generator).sort().values
    expert_P = torch.tensor(held)[torch.randint(0, len(held), (num_pairs,), generator=generator)]
    found = []
    for _ in range(2):
        found.append((experts.forward(1, x_RH, row_P, expert_P, weight_P), experts.forward_pairs(1, x_RH, row_P, expert_P)))
        for absent in (1, -1, 12):
            with pytest.raises((ValueError, IndexError)):
                experts.forward(1, x_RH, torch.tensor([0, 1]), torch.tensor([7, absent]), torch.ones(2, dtype=dtype))
        monkeypatch.setattr(experts, "_kernels", torch_rows)
    assert all(torch.equal(own, other) for own, other in zip(*found, strict=True))
    monkeypatch.undo()
    if dtype != torch.float64:
        message = r"layer 1: experts \[12\] were requested but are not held here; held are \[0, 3, 7, 11\]"
        with pytest.raises(ValueError, match=message):
            experts.forward(1, x_RH, torch.tensor([0, 1]), torch.tensor([7, 12]), torch.ones(2, dtype=dtype))
        for row in (-1, 9):
            with pytest.raises(IndexError, match=f"row {row} of 9"):
                experts.forward(1, x_RH, torch.tensor([row]), torch.tensor([7]), torch.ones(1, dtype=dtype))
        nothing = torch.zeros(0, dtype=torch.int64)
        assert experts.forward(1, x_RH[:0], nothing, nothing, weight_P[:0]).shape == (0, config.hidden_size)
        with pytest.raises(ValueError, match="1 experts do not go with 2 rows"):
            experts.forward(1, x_RH, torch.tensor([0, 1]), torch.tensor([7]), torch.ones(1, dtype=dtype))
        with pytest.raises(ValueError, match="1 responses do not go with 1 rows and 2 weights"):
            experts.forward(1, x_RH, torch.tensor([0]), torch.tensor([7]), torch.ones(2, dtype=dtype))


@needs_rows
def test_places_that_there_are_not_are_refused_by_an_expert_servers_sums() -> None:
    y, one = drawn(2, 4), torch.ones(2)
    for places, where in (([0, 2], [0, 1]), ([-1, 0], [0, 1]), ([0, 1], [0, 3]), ([0, 1], [-1, 0])):
        with pytest.raises(IndexError, match=r"result -?\d of 2|row -?\d of 3"):
            rows.weighted_sum(y, torch.tensor(places), torch.tensor(where), one, 3)
    with pytest.raises(ValueError, match="2 responses do not go with"):
        rows.weighted_sum(y, torch.tensor([0, 1]), torch.tensor([0, 1]), torch.ones(2, 2), 3)
    for place in (10**9, -5):
        assert rows.sort_by_expert(y, torch.tensor([0, 1]), torch.tensor([0, 0]), torch.tensor([place]), 1) is None


def test_without_the_c_module_the_library_computes(models: Any, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    truth = load_truth(models["plain"])
    config, checkpoint = read_model_config(models["plain"]), Checkpoint(models["plain"])
    monkeypatch.setattr(rows, "_DTYPES", {})
    monkeypatch.setattr(rows, "_rows", None, raising=False)
    choice._chosen.cache_clear()
    request.addfinalizer(choice._chosen.cache_clear)  # what was chosen here holds for no other test
    block, gate = GroupedAttention(config, checkpoint, [0]), Gate(config, checkpoint, [0])
    pages, layout = KvPages.for_model(config, 4, 16), StepLayout.from_lists([5, 1], [5, 1], [[0], [1]], 16)
    residual, normed = block.forward(0, truth.model.embed_tokens.weight[:6].detach().float(), layout, pages)
    expert_ids, weights = gate.forward(0, normed)
    parts = partition(expert_ids, weights, ReplicaTable.from_lists([[e % 2] for e in range(config.num_experts)], 2))
    assert len(parts) == 2
    total = combine(residual, [(part.rows_R, normed[part.rows_R]) for part in parts])
    assert torch.isfinite(total).all()
