"""What lies between products, in calls of our own: against the library's, which are the reference, and row by row."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from checkpoints import load_truth
from hypothesis import given, settings
from hypothesis import strategies as st

from operators import rows
from operators.attention import AttentionBlock
from operators.attention_plan import PagedRows, plan_step
from operators.combine import combine, library_combine
from operators.dispatch import CopyTable, Part, by_server, cut, cut_again
from operators.experts import Experts
from operators.gate import Gate
from operators.kv_pages import KvPages
from operators.model_config import RotaryConfig, read_model_config
from operators.normalization import library_rms_norm, rms_norm
from operators.rotary import RotaryTable
from operators.row_blocks import _Watch
from operators.step_layout import StepLayout
from operators.weights import Checkpoint

pytestmark = pytest.mark.skipif(not rows.available, reason="without a compiler there are only the library's calls")
DTYPES = [torch.float32, torch.bfloat16]
TOLERANCE: dict[torch.dtype, dict[str, float]] = {
    torch.float32: {"rtol": 1e-5, "atol": 1e-5},
    torch.bfloat16: {"rtol": 2e-2, "atol": 1e-2},
}
TABLE = RotaryTable(8, RotaryConfig(), torch.float32)
SPECIAL = (0.0, -0.0, float("inf"), -float("inf"), float("nan"), 1e-40, -1e-45, 3.4e38, 1.0 + 2**-8, 1.0 + 3 * 2**-8, 65504.0)


@pytest.fixture(params=[1, 2, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def same_bits(x: torch.Tensor, y: torch.Tensor) -> bool:
    """NaN is NaN, whichever."""
    return torch.equal(x.isnan(), y.isnan()) and torch.equal(x.nan_to_num(0.0).contiguous(), y.nan_to_num(0.0).contiguous())


# --- norms ------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 7, 16, 40, 1024])
def test_a_norm_is_the_librarys_and_a_rows_bits_are_its_own(dtype: torch.dtype, width: int, threads: int) -> None:
    x, weight = drawn(70, width, dtype=dtype), drawn(width, seed=1, dtype=dtype)
    found = rms_norm(x, weight, 1e-6)
    torch.testing.assert_close(found, library_rms_norm(x, weight, 1e-6), **TOLERANCE[dtype])
    for number in (0, 33, 69):
        assert torch.equal(rms_norm(x[number : number + 1].clone(), weight, 1e-6)[0], found[number])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_sum_is_rounded_as_the_librarys_is_whatever_it_is_made_of(dtype: torch.dtype) -> None:
    special = torch.tensor(SPECIAL).to(dtype)
    x, y = (each.contiguous() for each in torch.broadcast_tensors(special[:, None], special))
    total, normed = rows.norm_of_sum(x, y, torch.ones(len(SPECIAL), dtype=dtype), 1e-6)
    assert same_bits(total, x + y)
    assert normed.isnan().all(), "each row has a number that is none"
    x, y, weight = drawn(50, 200, dtype=dtype), drawn(50, 200, seed=1, dtype=dtype), drawn(200, seed=2, dtype=dtype)
    total, normed = rows.norm_of_sum(x, y, weight, 1e-6)
    assert torch.equal(total, x + y)
    assert torch.equal(normed, rms_norm(total, weight, 1e-6))


def test_what_does_not_belong_together_is_refused_before_an_address_is_handed_over() -> None:
    x, weight = drawn(3, 8), drawn(8)
    layout, pages = StepLayout.from_lists([3], [3], [[0]], 4), KvPages(1, 1, 4, 1, 8, torch.float32)
    two_heads = KvPages(1, 1, 4, 2, 8, torch.float32)
    plan = plan_step(layout, pages, TABLE, is_paged=True)
    one_row = PagedRows(*(torch.zeros(1, dtype=torch.int64) for _ in range(3)), torch.zeros(1, 1, dtype=torch.int64))
    calls: list[tuple[Callable[[], object], str]] = [
        (lambda: rows.norm(x, weight.double(), 1e-6), "torch.float64 on cpu does not go with torch.float32 on cpu"),
        (lambda: rows.norm(x, drawn(4), 1e-6), r"a weight \[4\] does not go with rows \[3, 8\]"),
        (lambda: rows.norm(x, drawn(2, 8), 1e-6), r"a weight \[2, 8\] does not go with rows \[3, 8\]"),
        (lambda: rows.norm_of_sum(x, drawn(2, 8), weight, 1e-6), r"rows \[2, 8\] cannot be added to \[3, 8\]"),
        (
            lambda: combine(x, [(torch.arange(2), drawn(3, 8))]),
            r"parts \[\(\[2\], \[3, 8\]\)\] .* cannot be added to \[3, 8\]",
        ),
        (lambda: rows.norm(drawn(2, 3, 8), drawn(6, 8), 1e-6), r"a weight \[6, 8\] does not go with rows \[2, 3, 8\]"),
        (
            lambda: rows.place(drawn(2, 24), 1, plan, None, 0.0, layout.slots_T, 0, pages),
            r"rows \[2, 24\], positions \[3, 1, 8\]",
        ),
        (
            lambda: rows.place(drawn(3, 23), 1, plan, None, 0.0, layout.slots_T, 0, pages),
            r"rows \[3, 23\] of 1 heads do not go with pages \[1, 4, 1, 8\]",
        ),
        (lambda: rows.place(drawn(3, 24), 1, plan, None, 0.0, layout.slots_T[:2], 0, pages), r"slots \[2\] do not go together"),
        (lambda: rows.place(drawn(3, 24), 1, plan, drawn(3, 8), 0.0, layout.slots_T, 0, pages), r"weights \[3, 8\] for 2 heads of 8"),
        (lambda: rows.place(drawn(3, 24), 1, plan, None, 0.0, layout.slots_T.int(), 0, pages), "indices must be int64 on the host"),
        (lambda: rows.place(drawn(3, 24).bfloat16(), 1, plan, None, 0.0, layout.slots_T, 0, pages), "does not go with torch.bfloat16"),
        (lambda: rows.place(drawn(3, 48)[:, ::2], 1, plan, None, 0.0, layout.slots_T, 0, pages), "must lie in one piece each"),
        (lambda: rows.attend(drawn(3, 24), 1, one_row, None, 0, pages, drawn(3, 12)), r"results \[3, 12\] for 3 rows of 1 heads of 8"),
        (lambda: rows.attend(drawn(3, 24), 1, one_row, None, 0, pages, drawn(2, 8)), r"results \[2, 8\] for 3 rows of 1 heads of 8"),
        (lambda: rows.attend(drawn(3, 24), 1, one_row, None, 0, pages, drawn(3, 8).bfloat16()), "torch.bfloat16 on cpu does not go with"),
        (lambda: rows.attend(drawn(3, 24), 1, one_row, 0, 0, pages, drawn(3, 8)), "a row sees itself at least, not 0 tokens"),
        (lambda: rows.place(drawn(3, 24), 2, plan, None, 0.0, layout.slots_T, 0, pages), r"rows \[3, 24\] of 2 heads do not go with pages"),
        (lambda: rows.place(drawn(3, 24), 1, plan, None, 0.0, layout.slots_T, 0, two_heads), r"do not go with pages \[1, 4, 2, 8\]"),
        (lambda: rows.add_parts(torch.zeros(1, 1, 1), []), "too many values to unpack"),
        (lambda: combine(x, [(torch.arange(2)[None], drawn(1, 8))]), r"parts \[\(\[1, 2\], \[1, 8\]\)\]"),
        (lambda: rows.norm(x.double(), weight.double(), 1e-6), "torch.float64 on cpu: rows are float32 or bfloat16 on the host"),
        (lambda: combine(x, [(torch.arange(2, dtype=torch.int32), drawn(2, 8))]), "indices must be int64 on the host"),
        (lambda: rows.choose(drawn(2, 4), 5, 1.0, torch.float32), "5 of 4 experts"),
        (lambda: StepLayout.from_tensors([each.int() for each in layout.to_tensors()]), "a step layout is made of int64"),
        (lambda: layout_with(torch.tensor([7, 8])), r"sequences of \[1\] rows from row 7 on"),
        (lambda: layout_with(torch.tensor([0])[:0]), r"a step layout cannot have shapes"),
        (lambda: layout_with(torch.tensor([0, 1]), table_dim=1), r"a step layout cannot have shapes"),
        (lambda: layout_with(torch.tensor([0, 1]), context=0), r"in contexts of \[0\]: 0 < rows <= context is needed"),
        (lambda: layout_with(torch.tensor([0, 2**63 - 1, -2, 1])), r"0 < rows <= context is needed"),
        (
            lambda: plan_step(layout_with(torch.tensor([0, 1]), context=10**9), pages, TABLE),
            "a context of 1000000000 tokens in a page table of 4",
        ),
        (lambda: layout_with(torch.tensor([0, 2, 1])), r"sequences of \[2, -1\] rows"),
    ]
    for call, message in calls:
        with pytest.raises(ValueError, match=message):
            call()
    for row in (-1, 3):
        with pytest.raises(IndexError, match=f"row {row} of 3"):
            combine(x, [(torch.tensor([0, row]), drawn(2, 8))])
    for name in ("norm", "place", "attend", "choose", "cut", "sort", "weigh", "add_parts"):
        with pytest.raises(TypeError, match="numbers are wanted"):
            getattr(rows._rows, name)(0, 0)
        with pytest.raises(TypeError, match="numbers are wanted"):
            getattr(rows._rows, name)()


def layout_with(starts: torch.Tensor, context: int = 1, table_dim: int = 2) -> StepLayout:
    """As it would come in a message, of one row."""
    num_sequences = max(0, len(starts) - 1)
    contexts, table = torch.full((num_sequences,), context), torch.zeros((num_sequences, 1)[:table_dim], dtype=torch.int64)
    return StepLayout.from_tensors([torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64), starts, contexts, table])


# --- attention --------------------------------------------------------------------------------------------------------------------


def exact(q_ND: torch.Tensor, keys_LKD: torch.Tensor, values_LKD: torch.Tensor) -> torch.Tensor:
    sharing = q_ND.shape[0] // keys_LKD.shape[1]
    keys, values = (each.double().repeat_interleave(sharing, dim=1) for each in (keys_LKD, values_LKD))
    scores = torch.einsum("nd,lnd->nl", q_ND.double(), keys) / q_ND.shape[1] ** 0.5
    return torch.einsum("nl,lnd->nd", scores.softmax(dim=1), values)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "width"), [(4, 4, 16), (6, 2, 40), (8, 1, 128), (1, 1, 2), (3, 3, 17)])
@pytest.mark.parametrize("window", [None, 1, 6])
def test_attention_over_pages_is_that_over_the_context(
    dtype: torch.dtype, num_heads: int, num_kv_heads: int, width: int, window: int | None, threads: int
) -> None:
    lengths, page_tokens, num_pages = [1, 3, 4, 5, 16, 33, 900], 5, 220
    pages = KvPages(1, num_pages, page_tokens, num_kv_heads, width, dtype)
    for number, block in enumerate(pages.blocks(0)):
        block.fill_(float("nan"))  # what belongs to nobody must not show
        order = torch.randperm(num_pages, generator=torch.Generator().manual_seed(5)).tolist()
        tables = []
        for length in lengths:
            table = [order.pop() for _ in range(-(-length // page_tokens))]
            tables.append(table + [0] * (num_pages - len(table)))
            slots = torch.tensor([table[token // page_tokens] * page_tokens + token % page_tokens for token in range(length)])
            block.flatten(0, 1)[slots] = drawn(length, num_kv_heads, width, seed=10 * length + number, dtype=dtype)
    # Rows 1, 3, 5, ... of a step, last sequence first.
    sequences = torch.arange(len(lengths)).flip(0)
    paged = PagedRows(2 * torch.arange(len(lengths)) + 1, sequences, torch.tensor(lengths), torch.tensor(tables))
    qkv_TC = drawn(2 * len(lengths), (num_heads + 2 * num_kv_heads) * width, dtype=dtype)
    out_TC = torch.full((2 * len(lengths), num_heads * width), 7.0, dtype=dtype)
    rows.attend(qkv_TC, num_heads, paged, window, 0, pages, out_TC)
    assert (out_TC[0::2] == 7.0).all(), "other rows are left alone"
    for row, sequence in zip(paged.rows_P.tolist(), sequences.tolist(), strict=True):
        length = lengths[sequence]
        q_ND = qkv_TC[row, : num_heads * width].view(num_heads, width)
        keys, values = (drawn(length, num_kv_heads, width, seed=10 * length + number, dtype=dtype) for number in (0, 1))
        seen = slice(max(0, length - (window or length)), length)
        torch.testing.assert_close(out_TC[row].view(num_heads, width).double(), exact(q_ND, keys[seen], values[seen]), **TOLERANCE[dtype])
        alone = PagedRows(torch.tensor([row]), torch.tensor([sequence]), paged.kv_length_S, paged.page_table_SG)
        again = torch.empty_like(out_TC)
        rows.attend(qkv_TC, num_heads, alone, window, 0, pages, again)
        assert torch.equal(again[row], out_TC[row]), "a row's bits do not depend on others"


def test_attention_takes_scores_of_any_size() -> None:
    """The largest of them counts, and what is no number shows."""
    pages = KvPages(1, 4, 4, 1, 16, torch.float32)
    keys, values = pages.blocks(0)
    values[:] = torch.arange(16.0).view(4, 4, 1, 1)
    paged = PagedRows(torch.tensor([0]), torch.tensor([0]), torch.tensor([14]), torch.tensor([[2, 0, 3, 1]]))
    q, out = torch.ones(1, 48), torch.empty(1, 16)
    for size in (1e4, -1e4, 1e30):
        keys.zero_()
        keys[3, 1] = size  # token 9 lies in slot 13
        rows.attend(q, 1, paged, None, 0, pages, out)
        others = torch.cat((torch.arange(8.0, 12), torch.arange(4.0), torch.tensor([12.0, 14, 15, 4, 5])))
        assert torch.allclose(out, torch.full((1, 16), 13.0) if size > 0 else others.mean().expand(1, 16))
    keys[3, 1] = float("nan")
    rows.attend(q, 1, paged, None, 0, pages, out)
    assert out.isnan().all()


def test_attention_refuses_pages_and_slots_that_there_are_not() -> None:
    pages = KvPages(1, 4, 4, 1, 16, torch.float32)
    q, out = torch.ones(1, 48), torch.empty(1, 16)
    for lengths, table, message in (
        ([5], [[3, 4]], "page 4 of 4"),
        ([5], [[-1, 0]], "page -1 of 4"),
        ([9], [[0, 1]], "of 9 tokens in 2 pages"),
        ([0], [[0, 1]], "of 0 tokens"),
    ):
        paged = PagedRows(torch.tensor([0]), torch.tensor([0]), torch.tensor(lengths), torch.tensor(table))
        with pytest.raises(IndexError, match=message):
            rows.attend(q, 1, paged, None, 0, pages, out)
    for row, sequence in ((1, 0), (-1, 0), (0, 1), (0, -1)):
        paged = PagedRows(torch.tensor([row]), torch.tensor([sequence]), torch.tensor([1]), torch.tensor([[0]]))
        with pytest.raises(IndexError, match=f"row {row} of 1, sequence {sequence} of 1"):
            rows.attend(q, 1, paged, None, 0, pages, out)
    layout = StepLayout.from_lists([1], [1], [[0]], 4)
    plan = plan_step(layout, pages, RotaryTable(16, RotaryConfig(), torch.float32), is_paged=True)
    for slot in (-1, 16):
        with pytest.raises(IndexError, match=f"slot {slot} of 16"):
            rows.place(torch.ones(1, 48), 1, plan, None, 0.0, torch.tensor([slot]), 0, pages)
    assert not any(block.any() for block in pages.blocks(0))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["plain", "mixed", "wide", "mixtral window", "dbrx"])
def test_a_block_gives_what_it_gives_by_the_library(models: Any, name: str, dtype: str) -> None:
    """Chunks beside decode rows, contexts that are continued, windows, norms of heads, biases, clipping."""
    config = read_model_config(models[name]).with_dtype(dtype)
    found: list[list[torch.Tensor]] = []
    for in_rows in (True, False):
        block = AttentionBlock(config, Checkpoint(models[name]), [0])
        assert block._in_rows
        block._in_rows = in_rows
        pages = KvPages.for_model(config, 40, 4)
        tables = [list(range(20)), list(range(20, 30)), list(range(30, 40))]
        results: list[torch.Tensor] = []
        for query_lengths, kv_lengths in (
            ([30, 5, 1], [30, 5, 1]),
            ([1, 7, 1], [31, 12, 2]),
            ([1, 1, 1], [32, 13, 3]),
            ([9, 1, 1], [41, 14, 4]),
        ):
            layout = StepLayout.from_lists(query_lengths, kv_lengths, tables, 4)
            x_TH = drawn(sum(query_lengths), config.hidden_size, seed=sum(kv_lengths), dtype=getattr(torch, dtype))
            results += block.forward(0, x_TH, layout, pages)
        found.append([*results, *pages.blocks(0)])
    for own, by_library in zip(*found, strict=True):
        torch.testing.assert_close(own, by_library, rtol=2e-2 if dtype == "bfloat16" else 1e-4, atol=6e-2 if dtype == "bfloat16" else 1e-4)


# --- routing ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_experts", "num_active"), [(1, 1), (5, 5), (16, 1), (40, 8), (256, 20)])
def test_the_best_are_chosen_and_weighed(dtype: torch.dtype, num_experts: int, num_active: int) -> None:
    logits = torch.stack([torch.randperm(num_experts, generator=torch.Generator().manual_seed(row)) for row in range(9)]).to(dtype) / 8
    expert_ids, weights = rows.choose(logits, num_active, 2.5, dtype)
    best, expected = logits.topk(num_active, dim=-1)
    assert torch.equal(expert_ids, expected)
    torch.testing.assert_close(
        weights, (best.float().softmax(dim=-1) * 2.5).to(dtype), rtol=1e-2 if dtype == torch.bfloat16 else 1e-6, atol=0
    )


def test_of_equal_scores_the_first_are_chosen_and_what_is_no_number_chooses_somebody() -> None:
    expert_ids, weights = rows.choose(torch.tensor([[1.0, 3, 2, 3, 3, 2], [0.0] * 6]), 4, 1.0, torch.float32)
    assert expert_ids.tolist() == [[1, 3, 4, 2], [0, 1, 2, 3]]
    assert torch.equal(weights[1], torch.full((4,), 0.25))
    for place in range(6):
        logits = torch.arange(6.0)[None]
        logits[0, place] = float("nan")  # is the greatest, as in torch
        expert_ids, weights = rows.choose(logits, 2, 1.0, torch.float32)
        assert expert_ids[0, 0] == place
        assert weights.isnan().all()
    for bad in (float("nan"), float("-inf"), float("inf")):
        expert_ids, weights = rows.choose(torch.full((1, 6), bad), 3, 1.0, torch.float32)
        assert expert_ids.tolist() == [[0, 1, 2]]
        assert weights.isnan().all()


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_pairs_are_cut_as_by_the_library(data: st.DataObject) -> None:
    num_experts, num_servers = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 5))
    num_rows, num_active = data.draw(st.integers(0, 12)), data.draw(st.integers(1, num_experts))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 10_000)))
    copies = [data.draw(st.lists(st.integers(0, num_servers - 1), max_size=3, unique=True)) for _ in range(num_experts)]
    table = CopyTable.from_lists(copies, num_servers)
    expert_P = torch.rand(num_rows, num_experts, generator=generator).topk(num_active, dim=1).indices.flatten()
    weight_P = torch.rand(num_rows * num_active, generator=generator).to(data.draw(st.sampled_from([*DTYPES, torch.float64])))
    positions_T = torch.randint(0, 1000, (num_rows,), generator=generator)
    everything = cut(expert_P.view(num_rows, num_active), weight_P.view(num_rows, num_active), positions_T, table)
    if table.num_servers > 1 or not table.everywhere:
        equal_parts(everything, by_server(None, expert_P, weight_P, positions_T, num_active, table))
    for part in everything:
        shift = CopyTable.from_lists([[(server + 1) % num_servers for server in servers] for servers in copies], num_servers)
        again = by_server(part.pair_P, part.expert_P, part.weight_P, positions_T, num_active, shift)
        equal_parts(cut_again(part, positions_T, num_active, shift), again)


def equal_parts(found: list[Part], expected: list[Part]) -> None:
    assert [part.server for part in found] == [part.server for part in expected]
    for own, other in zip(found, expected, strict=True):
        for name in ("rows_R", "row_P", "expert_P", "weight_P", "pair_P"):
            assert torch.equal(getattr(own, name), getattr(other, name)), name


def test_a_pair_that_nobody_can_be_given_is_refused() -> None:
    table, weights = CopyTable.from_lists([[0], [1]], 2), torch.ones(1, 2)
    for expert in (-1, 2):
        with pytest.raises(IndexError, match="a pair names what there is not: 2 experts, 2 servers"):
            cut(torch.tensor([[0, expert]]), weights, torch.zeros(1, dtype=torch.int64), table)
    both = CopyTable.from_lists([[0, 1], [1, 0]], 2)
    part = Part(0, *(torch.zeros(1, dtype=torch.int64) for _ in range(3)), torch.ones(1), torch.tensor([4]))
    with pytest.raises(IndexError, match="a pair names what there is not"):
        cut_again(part, torch.zeros(2, dtype=torch.int64), 2, both)  # row 2 of 2
    with pytest.raises(IndexError, match="a pair names what there is not"):
        cut(torch.tensor([[0, 1]]), weights, torch.tensor([-1]), both)
    with pytest.raises(IndexError, match="a pair names what there is not"):
        cut(
            torch.tensor([[0, 1]]),
            weights,
            torch.tensor([0]),
            CopyTable(torch.empty(2, 0, dtype=torch.int64), torch.tensor([0, 0]), 2, False),
        )
    with pytest.raises(IndexError, match="a pair names what there is not"):
        cut_again(replace(part, pair_P=torch.tensor([-1])), torch.zeros(2, dtype=torch.int64), 2, table)
    with pytest.raises(ValueError, match="1 pairs do not go with"):
        cut_again(part, torch.zeros(2, dtype=torch.int64), 0, table)
    with pytest.raises(ValueError, match="indices must be int64 on the host"):
        cut(torch.tensor([[0, 1]], dtype=torch.int32), weights, torch.zeros(1, dtype=torch.int64), table)
    with pytest.raises(ValueError, match="2 pairs do not go with 2 weights and 3 rows of 2"):
        cut(torch.tensor([[0, 1]]), weights, torch.zeros(3, dtype=torch.int64), table)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", [0, 1, 9, 700])
def test_answers_are_added_with_the_librarys_bits(dtype: torch.dtype, num_rows: int, threads: int) -> None:
    residual = drawn(num_rows, 88, dtype=dtype)
    generator = torch.Generator().manual_seed(num_rows)
    where = [(torch.rand(num_rows, generator=generator) < share).nonzero()[:, 0] for share in (1.0, 0.5, 0.1, 0.0, 0.7)]
    parts = [(rows_R, drawn(len(rows_R), 88, seed=seed, dtype=dtype)) for seed, rows_R in enumerate(where)]
    before = [y.clone() for _, y in parts]
    assert torch.equal(combine(residual, parts), library_combine(residual, parts))
    assert all(torch.equal(y, kept) for (_, y), kept in zip(parts, before, strict=True))
    assert torch.equal(combine(residual, []), residual)


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
        monkeypatch.setattr(rows, "_DTYPES", {})
    assert all(torch.equal(own, other) for own, other in zip(*found, strict=True))
    monkeypatch.undo()
    if dtype != torch.float64:
        message = r"layer 1: experts \[12\] were asked for but are not held here; held are \[0, 3, 7, 11\]"
        with pytest.raises(ValueError, match=message):
            experts.forward(1, x_RH, torch.tensor([0, 1]), torch.tensor([7, 12]), torch.ones(2, dtype=dtype))
        for row in (-1, 9):
            with pytest.raises(IndexError, match=f"row {row} of 9"):
                experts.forward(1, x_RH, torch.tensor([row]), torch.tensor([7]), torch.ones(1, dtype=dtype))
        nothing = torch.zeros(0, dtype=torch.int64)
        assert experts.forward(1, x_RH[:0], nothing, nothing, weight_P[:0]).shape == (0, config.hidden_size)
        with pytest.raises(ValueError, match="1 experts do not go with 2 rows"):
            experts.forward(1, x_RH, torch.tensor([0, 1]), torch.tensor([7]), torch.ones(1, dtype=dtype))
        with pytest.raises(ValueError, match="1 answers do not go with 1 rows and 2 weights"):
            experts.forward(1, x_RH, torch.tensor([0]), torch.tensor([7]), torch.ones(2, dtype=dtype))


def test_places_that_there_are_not_are_refused_by_an_expert_servers_sums() -> None:
    y, one = drawn(2, 4), torch.ones(2)
    for places, where in (([0, 2], [0, 1]), ([-1, 0], [0, 1]), ([0, 1], [0, 3]), ([0, 1], [-1, 0])):
        with pytest.raises(IndexError, match=r"answer .* of 2, row .* of 3"):
            rows.weigh(y, torch.tensor(places), torch.tensor(where), one, 3)
    with pytest.raises(ValueError, match="2 answers do not go with"):
        rows.weigh(y, torch.tensor([0, 1]), torch.tensor([0, 1]), torch.ones(2, 2), 3)
    for place in (10**9, -5):
        assert rows.sort(y, torch.tensor([0, 1]), torch.tensor([0, 0]), torch.tensor([place]), 1) is None


# --- strict, and without --------------------------------------------------------------------------------------------------------


def test_a_proof_watches_what_is_computed() -> None:
    x, weight = drawn(8, 16), drawn(16, seed=1)
    for call, count in (
        (lambda: rows.norm(x, weight, 1e-6), 16),
        (lambda: rows.norm_of_sum(x, x, weight, 1e-6), 32),
        (lambda: rows.choose(x, 3, 1.0, torch.float32), 9),  # 3 ids of 8 bytes, 3 weights of 4
    ):
        watch = _Watch(8)
        with watch:
            call()
        assert watch.bits().shape == (8, 4 * count)


def test_without_the_c_module_the_library_computes(models: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    truth = load_truth(models["plain"])
    config, checkpoint = read_model_config(models["plain"]), Checkpoint(models["plain"])
    monkeypatch.setattr(rows, "_DTYPES", {})
    monkeypatch.setattr(rows, "available", False)
    monkeypatch.setattr(rows, "_rows", None)
    block, gate = AttentionBlock(config, checkpoint, [0]), Gate(config, checkpoint, [0])
    pages, layout = KvPages.for_model(config, 4, 16), StepLayout.from_lists([5, 1], [5, 1], [[0], [1]], 16)
    residual, normed = block.forward(0, truth.model.embed_tokens.weight[:6].detach().float(), layout, pages)
    expert_ids, weights = gate.forward(0, normed)
    parts = cut(expert_ids, weights, layout.positions_T, CopyTable.from_lists([[e % 2] for e in range(config.num_experts)], 2))
    assert len(parts) == 2
    total = combine(residual, [(part.rows_R, normed[part.rows_R]) for part in parts])
    assert torch.isfinite(total).all()
