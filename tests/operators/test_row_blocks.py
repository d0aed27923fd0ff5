"""Strict row blocks: the bits of a row do not depend on other rows; functions and machines that cannot ensure this are detected."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from flowrt.operators.attention import attention_for
from flowrt.operators.combine import combine_pairs
from flowrt.operators.dispatch import partition
from flowrt.operators.experts import Experts
from flowrt.operators.families.registry import read_model_config
from flowrt.operators.kv_pages import KvPages
from flowrt.operators.model_config import DtypeOrInt8, ModelError
from flowrt.operators.proof import prove, prove_model
from flowrt.operators.replica_table import ReplicaTable
from flowrt.operators.row_blocks import PROOF_ROWS, SIZES, WHOLE, StrictBlocks, describe
from flowrt.operators.state_slots import NO_STATE
from flowrt.operators.step_layout import StepLayout
from flowrt.operators.weights import Checkpoint, torch_dtype


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def drawn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def bits(*tensors: Tensor) -> list[bytes]:
    return [each.contiguous().view(torch.uint8).numpy().tobytes() for each in tensors]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_product_of_real_size_gives_a_row_the_same_bits_among_any_others(threads: int, dtype: torch.dtype) -> None:
    weights, x_TH = drawn(160, 1024, dtype=dtype), drawn(300, 1024, dtype=dtype, seed=1)
    blocks = StrictBlocks()
    project = partial(F.linear, weight=weights)
    blocks.run("product", project, x_TH[:PROOF_ROWS])
    whole = blocks.run("product", project, x_TH)
    for start, stop in ((0, 1), (7, 12), (3, 20), (100, 300), (299, 300)):
        assert bits(blocks.run("product", project, x_TH[start:stop])) == bits(whole[start:stop])
    order = torch.randperm(300, generator=torch.Generator().manual_seed(2))
    assert bits(blocks.run("product", project, x_TH[order])) == bits(whole[order])
    torch.testing.assert_close(whole, F.linear(x_TH, weights), rtol=2e-2, atol=1e-3)


def test_several_results_of_several_inputs_come_back_row_by_row() -> None:
    blocks = StrictBlocks()

    def function(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x + y, (y * 2).unsqueeze(2)

    for num_rows in (PROOF_ROWS, 1, 5, 129, 200, 0):
        x, y = drawn(num_rows, 3), drawn(num_rows, 3, seed=1)
        for found, expected in zip(blocks.run("both", function, x, y), function(x, y), strict=True):
            assert torch.equal(found, expected)
    assert blocks.sizes == {"both": SIZES}
    assert describe(blocks.sizes) == "blocks of 4, 8 to 128 rows: both"


def test_rows_are_given_to_a_function_in_blocks_of_the_proven_sizes_only() -> None:
    blocks, seen = StrictBlocks(), []
    blocks.run("own", torch.neg, drawn(PROOF_ROWS, 2))

    def function(x: Tensor) -> Tensor:
        seen.append((x.shape[0], x.is_contiguous(), x.data_ptr() % 64))
        return -x

    wide = drawn(200, 5)
    assert torch.equal(blocks.run("own", function, wide[1:198, 1:3]), -wide[1:198, 1:3])
    assert seen == [(128, True, 0), (128, True, 0)]
    seen.clear()
    blocks.run("own", function, wide[:3])
    assert seen == [(4, True, 0)]


UNFIT: dict[str, Callable[[Tensor], Tensor]] = {
    "place": lambda x: x + torch.arange(x.shape[0]).unsqueeze(1),
    "neighbours": lambda x: x - x.mean(dim=0),
    "the last row": lambda x: torch.cat((x[:-1], x[-1:] * (1 + 2**-20))),
}


@pytest.mark.parametrize("name", UNFIT)
def test_a_function_whose_rows_depend_on_others_is_refused(name: str) -> None:
    with pytest.raises(ModelError, match=r"strict numerics are not possible on this machine.*\(unfit\); write numerics: fast"):
        StrictBlocks().run("unfit", UNFIT[name], drawn(PROOF_ROWS, 8))


def test_sizes_that_give_other_bits_are_left_out() -> None:
    """As of a library that adds in another order for few rows: found even where bfloat16 rounds the difference away."""

    def function(x: Tensor) -> Tensor:
        sums = x.float().cumsum(dim=1)[:, -1:] if x.shape[0] < 16 else x.float().flip(1).cumsum(dim=1)[:, -1:]
        return sums.to(torch.bfloat16)

    blocks = StrictBlocks()
    blocks.run("sum", function, drawn(PROOF_ROWS, 64, dtype=torch.bfloat16))
    assert blocks.sizes == {"sum": (16, 32, 64, 128)}


def test_what_was_not_proven_while_loading_does_not_run() -> None:
    with pytest.raises(RuntimeError, match="experts was not proven when it was loaded"):
        StrictBlocks().run("experts", torch.neg, drawn(3, 4))


def test_fast_gives_all_rows_at_once() -> None:
    assert not WHOLE.strict
    assert WHOLE.run("any", lambda x: x.sum(dim=0), torch.ones(5, 2)).tolist() == [5, 5]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["mixed", "deepseek_v3 yarn", "dbrx unequal", "qwen3_next"])
def test_every_function_of_a_model_can_be_proven(models: Any, name: str, dtype: str) -> None:
    config = read_model_config(models[name])
    found = prove_model(models[name], dtype).sizes
    kinds = {"dense": bool(config.dense_layers), "shared": bool(config.shared_expert_width)}
    kinds |= dict.fromkeys(("delta in", "delta norm", "delta out"), bool(config.recurrent_layers))
    kinds["activation of experts"] = "activation of experts" in found  # where the matrices fill panels
    assert set(found) == {"attention in", "attention out", "gate", "experts", "head"} | {kind for kind, there in kinds.items() if there}
    assert all(sizes and set(sizes) <= set(SIZES) for sizes in found.values())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["plain", "mixtral window", "deepseek_v3", "deepseek_v2 limited", "qwen3_next"])
@pytest.mark.parametrize("kept", ["dtype", "int8"])
@torch.inference_mode()
def test_attention_gives_a_sequence_the_same_bits_alone_and_beside_others(models: Any, name: str, dtype: str, kept: DtypeOrInt8) -> None:
    """Chunks and decode rows, in other pages, at another place of the step, and computed a second time."""
    config, blocks = read_model_config(models[name], dtype, kv_cache=kept), StrictBlocks()
    attention = attention_for(config, Checkpoint(models[name]), [0], blocks=blocks)
    prove(attention, config)
    cuts = [[16, 16, 5, 1, 1, 1], [16, 1, 1, 1, 1, 1], [16, 16, 16, 16, 3, 1]]
    x = [drawn(sum(each), config.hidden_size, dtype=torch_dtype(config), seed=index) for index, each in enumerate(cuts)]

    def attend(sequences: list[int], first_page: int) -> dict[int, list[bytes]]:
        pages, found = KvPages.for_model(config, 70, 4, num_slots=6), {sequence: [] for sequence in sequences}
        for turn in range(6):
            lengths = [sum(cuts[each][: turn + 1]) for each in sequences]
            rows = [cuts[each][turn] for each in sequences]
            tables = [list(range(first_page + 20 * at, first_page + 20 * at + 20)) for at in range(len(sequences))]
            slots = [(NO_STATE if not turn else 2 * at + turn % 2, 2 * at + 1 - turn % 2) for at in range(len(sequences))]
            layout = StepLayout.from_lists(rows, lengths, tables, 4, states=slots if config.recurrent_layers else ())
            step = torch.cat([x[each][length - row : length] for each, row, length in zip(sequences, rows, lengths, strict=True)])
            results = zip(*(result.split(rows) for result in attention.forward(0, step, layout, pages)), strict=True)
            for each, result in zip(sequences, results, strict=True):
                found[each] += bits(*result)
        return found

    together = attend([2, 0, 1], 3)
    assert together == attend([1, 2, 0], 0)
    for sequence in range(3):
        assert attend([sequence], 9 * sequence) == {sequence: together[sequence]}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@torch.inference_mode()
def test_results_do_not_depend_on_the_server_that_computes(models: Any, dtype: str) -> None:
    config, blocks, checkpoint = read_model_config(models["plain"], dtype), StrictBlocks(), Checkpoint(models["plain"])
    x_TH, residual_TH = (drawn(40, config.hidden_size, dtype=torch_dtype(config), seed=seed) for seed in (1, 2))
    generator = torch.Generator().manual_seed(3)
    expert_ids_TA = torch.rand((40, 8), generator=generator).argsort(dim=1)[:, :3]
    weights_TA = torch.rand((40, 3), generator=generator).to(x_TH.dtype)

    def answer(placement: list[list[int]], rows: slice) -> Tensor:
        num_servers = len(placement)
        replicas = [[server for server in range(num_servers) if expert in placement[server]] for expert in range(8)]
        servers = [Experts(config, checkpoint, {0: held}, blocks=blocks) for held in placement]
        servers[0].prove()
        table = ReplicaTable.from_lists(replicas, num_servers)
        parts = partition(expert_ids_TA[rows], weights_TA[rows], table)
        found = [(each.pair_P, servers[each.server].forward_pairs(0, x_TH[rows][each.rows_R], each.row_P, each.expert_P)) for each in parts]
        return combine_pairs(residual_TH[rows], weights_TA[rows], reversed(found))

    whole = answer([list(range(8))], slice(0, 40))
    assert bits(whole) == bits(answer([[7, 1, 3], [0, 2, 4, 5, 6], [5, 3, 1, 0]], slice(0, 40)))
    for rows in (slice(0, 1), slice(11, 14), slice(20, 40)):
        assert bits(whole[rows]) == bits(answer([[0, 1, 2, 3], [4, 5, 6, 7]], rows))
    fast = Experts(config, checkpoint, {0: range(8)})
    row_P = torch.arange(40).repeat_interleave(3)
    expected = residual_TH + fast.forward(0, x_TH, row_P, expert_ids_TA.flatten(), weights_TA.flatten())
    torch.testing.assert_close(whole, expected, rtol=2e-2, atol=2e-2)
