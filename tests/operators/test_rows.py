"""Fused CPU kernels for norms and attention, compared with the library row by row, and what strict proofs observe.

test_rows_of_pairs.py covers (row, expert) pairs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from drawn import DTYPES, drawn

from flowrt.operators.attention import GroupedAttention
from flowrt.operators.attention_plan import PagedRows, plan_step
from flowrt.operators.combine import combine
from flowrt.operators.families.registry import read_model_config
from flowrt.operators.int8_rows import packed_rows, unpacked_rows
from flowrt.operators.kernels.cpu import rows
from flowrt.operators.kernels.torch import rows as torch_rows
from flowrt.operators.kv_pages import KvPages
from flowrt.operators.model_config import DtypeOrInt8, RotaryConfig
from flowrt.operators.rotary import RotaryTable
from flowrt.operators.row_blocks import _Recorder
from flowrt.operators.step_layout import StepLayout
from flowrt.operators.weights import Checkpoint

pytestmark = pytest.mark.skipif(not rows.available, reason="without a compiler there are only the library's calls")
TOLERANCE: dict[torch.dtype, dict[str, float]] = {torch.float32: {"rtol": 1e-5, "atol": 1e-5}, torch.bfloat16: {"rtol": 2e-2, "atol": 1e-2}}
TABLE = RotaryTable(8, RotaryConfig(), torch.float32)
SPECIAL = (0.0, -0.0, float("inf"), -float("inf"), float("nan"), 1e-40, -1e-45, 3.4e38, 1.0 + 2**-8, 1.0 + 3 * 2**-8, 65504.0)


def same_bits(x: torch.Tensor, y: torch.Tensor) -> bool:
    """NaN is NaN, whichever."""
    return torch.equal(x.isnan(), y.isnan()) and torch.equal(x.nan_to_num(0.0).contiguous(), y.nan_to_num(0.0).contiguous())


# --- norms ------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 7, 16, 40, 1024])
def test_a_norm_is_the_librarys_and_a_rows_bits_are_its_own(dtype: torch.dtype, width: int, threads: int) -> None:
    x, weight = drawn(70, width, dtype=dtype), drawn(width, seed=1, dtype=dtype)
    found = rows.rms_norm(x, weight, 1e-6)
    torch.testing.assert_close(found, torch_rows.rms_norm(x, weight, 1e-6), **TOLERANCE[dtype])
    for number in (0, 33, 69):
        assert torch.equal(rows.rms_norm(x[number : number + 1].clone(), weight, 1e-6)[0], found[number])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_sum_is_rounded_as_the_librarys_is_whatever_it_is_made_of(dtype: torch.dtype) -> None:
    special = torch.tensor(SPECIAL).to(dtype)
    x, y = (each.contiguous() for each in torch.broadcast_tensors(special[:, None], special))
    total, normed = rows.add_rms_norm(x, y, torch.ones(len(SPECIAL), dtype=dtype), 1e-6)
    assert same_bits(total, x + y)
    assert normed.isnan().all(), "each row has a number that is none"
    x, y, weight = drawn(50, 200, dtype=dtype), drawn(50, 200, seed=1, dtype=dtype), drawn(200, seed=2, dtype=dtype)
    total, normed = rows.add_rms_norm(x, y, weight, 1e-6)
    assert torch.equal(total, x + y)
    assert torch.equal(normed, rows.rms_norm(total, weight, 1e-6))


def test_what_does_not_belong_together_is_refused_before_an_address_is_handed_over() -> None:
    x, weight = drawn(3, 8), drawn(8)
    layout, pages = StepLayout.from_lists([3], [3], [[0]], 4), KvPages(1, 1, 4, 1, 8, torch.float32)
    two_heads = KvPages(1, 1, 4, 2, 8, torch.float32)
    plan = plan_step(layout, pages, TABLE, is_paged=True)
    one_row = PagedRows(*(torch.zeros(1, dtype=torch.int64) for _ in range(3)), torch.zeros(1, 1, dtype=torch.int64))
    store, attend = rows.rope_and_store_kv, rows.paged_attention
    calls: list[tuple[Callable[[], object], str]] = [
        (lambda: rows.rms_norm(x, weight.double(), 1e-6), "torch.float64 on cpu does not go with torch.float32 on cpu"),
        (lambda: rows.rms_norm(x, drawn(4), 1e-6), r"a weight \[4\] does not go with rows \[3, 8\]"),
        (lambda: rows.rms_norm(x, drawn(2, 8), 1e-6), r"a weight \[2, 8\] does not go with rows \[3, 8\]"),
        (lambda: rows.add_rms_norm(x, drawn(2, 8), weight, 1e-6), r"rows \[2, 8\] cannot be added to \[3, 8\]"),
        (lambda: combine(x, [(torch.arange(2), drawn(3, 8))]), r"rows \[2\] and responses \[3, 8\] of a part cannot be added to \[3, 8\]"),
        (lambda: rows.rms_norm(drawn(2, 3, 8), drawn(6, 8), 1e-6), r"a weight \[6, 8\] does not go with rows \[2, 3, 8\]"),
        (lambda: store(drawn(2, 24), 1, plan, None, 0.0, layout.slots_T, 0, pages), r"rows \[2, 24\], positions \[3, 1, 8\]"),
        (
            lambda: store(drawn(3, 23), 1, plan, None, 0.0, layout.slots_T, 0, pages),
            r"rows \[3, 23\] of 1 heads do not go with pages \[1, 4, 1, 8\]",
        ),
        (lambda: store(drawn(3, 24), 1, plan, None, 0.0, layout.slots_T[:2], 0, pages), r"slots \[2\] do not go together"),
        (lambda: store(drawn(3, 24), 1, plan, drawn(3, 8), 0.0, layout.slots_T, 0, pages), r"weights \[3, 8\] for 2 heads of 8"),
        (lambda: store(drawn(3, 24), 1, plan, None, 0.0, layout.slots_T.int(), 0, pages), "indices must be int64 on the host"),
        (lambda: store(drawn(3, 24).bfloat16(), 1, plan, None, 0.0, layout.slots_T, 0, pages), "does not go with torch.bfloat16"),
        (lambda: store(drawn(3, 48)[:, ::2], 1, plan, None, 0.0, layout.slots_T, 0, pages), "must lie in one piece each"),
        (lambda: attend(drawn(3, 24), 1, one_row, None, 0, pages, drawn(3, 12)), r"results \[3, 12\] for 3 rows of 1 heads of 8"),
        (lambda: attend(drawn(3, 24), 1, one_row, None, 0, pages, drawn(2, 8)), r"results \[2, 8\] for 3 rows of 1 heads of 8"),
        (lambda: attend(drawn(3, 24), 1, one_row, None, 0, pages, drawn(3, 8).bfloat16()), "torch.bfloat16 on cpu does not go with"),
        (lambda: attend(drawn(3, 24), 1, one_row, 0, 0, pages, drawn(3, 8)), "a window of 0 tokens"),
        (lambda: store(drawn(3, 24), 2, plan, None, 0.0, layout.slots_T, 0, pages), r"rows \[3, 24\] of 2 heads do not go with pages"),
        (lambda: store(drawn(3, 24), 1, plan, None, 0.0, layout.slots_T, 0, two_heads), r"do not go with pages \[1, 4, 2, 8\]"),
        (lambda: rows.add_parts(torch.zeros(1, 1, 1), []), "too many values to unpack"),
        (lambda: combine(x, [(torch.arange(2)[None], drawn(1, 8))]), r"rows \[1, 2\] and responses \[1, 8\]"),
        (lambda: rows.rms_norm(x.double(), weight.double(), 1e-6), "torch.float64 on cpu: rows are float32 or bfloat16 on the host"),
        (lambda: combine(x, [(torch.arange(2, dtype=torch.int32), drawn(2, 8))]), "indices must be int64 on the host"),
        (lambda: rows.topk_softmax(drawn(2, 4), 5, 1.0, torch.float32), "5 of 4 experts"),
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
    for name in [name for name, function in vars(rows._rows).items() if inspect.isbuiltin(function)]:
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
@pytest.mark.parametrize("int8", [False, True])
def test_attention_over_pages_is_that_over_the_context(
    dtype: torch.dtype, num_heads: int, num_kv_heads: int, width: int, window: int | None, threads: int, int8: bool
) -> None:
    lengths, page_size, num_pages = [1, 3, 4, 5, 16, 33, 900], 5, 220
    pages = KvPages(1, num_pages, page_size, num_kv_heads, width, dtype, int8=int8)
    for number, block in enumerate(pages.blocks(0)):
        block.fill_(-1 if int8 else float("nan"))  # slots without an owner must have no effect; bytes of ones are a scale of NaN
        order = torch.randperm(num_pages, generator=torch.Generator().manual_seed(5)).tolist()
        tables = []
        for length in lengths:
            table = [order.pop() for _ in range(-(-length // page_size))]
            tables.append(table + [0] * (num_pages - len(table)))
            slots = torch.tensor([table[token // page_size] * page_size + token % page_size for token in range(length)])
            written = drawn(length, num_kv_heads, width, seed=10 * length + number, dtype=dtype)
            block.flatten(0, 1)[slots] = packed_rows(written) if int8 else written
    # Rows 1, 3, 5, ... of a step, last sequence first.
    sequences = torch.arange(len(lengths)).flip(0)
    paged = PagedRows(2 * torch.arange(len(lengths)) + 1, sequences, torch.tensor(lengths), torch.tensor(tables))
    qkv_TC = drawn(2 * len(lengths), (num_heads + 2 * num_kv_heads) * width, dtype=dtype)
    out_TC = torch.full((2 * len(lengths), num_heads * width), 7.0, dtype=dtype)
    rows.paged_attention(qkv_TC, num_heads, paged, window, 0, pages, out_TC)
    assert (out_TC[0::2] == 7.0).all(), "other rows are left alone"
    for row, sequence in zip(paged.rows_P.tolist(), sequences.tolist(), strict=True):
        length = lengths[sequence]
        q_ND = qkv_TC[row, : num_heads * width].view(num_heads, width)
        keys, values = (drawn(length, num_kv_heads, width, seed=10 * length + number, dtype=dtype) for number in (0, 1))
        if int8:
            keys, values = (unpacked_rows(packed_rows(each), torch.float32, width) for each in (keys, values))
        seen = slice(max(0, length - (window or length)), length)
        torch.testing.assert_close(out_TC[row].view(num_heads, width).double(), exact(q_ND, keys[seen], values[seen]), **TOLERANCE[dtype])
        alone = PagedRows(torch.tensor([row]), torch.tensor([sequence]), paged.kv_length_S, paged.page_table_SG)
        repeated = torch.empty_like(out_TC)
        rows.paged_attention(qkv_TC, num_heads, alone, window, 0, pages, repeated)
        assert torch.equal(repeated[row], out_TC[row]), "a row's bits do not depend on others"


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
        rows.paged_attention(q, 1, paged, None, 0, pages, out)
        others = torch.cat((torch.arange(8.0, 12), torch.arange(4.0), torch.tensor([12.0, 14, 15, 4, 5])))
        assert torch.allclose(out, torch.full((1, 16), 13.0) if size > 0 else others.mean().expand(1, 16))
    keys[3, 1] = float("nan")
    rows.paged_attention(q, 1, paged, None, 0, pages, out)
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
            rows.paged_attention(q, 1, paged, None, 0, pages, out)
    for row, sequence in ((1, 0), (-1, 0), (0, 1), (0, -1)):
        paged = PagedRows(torch.tensor([row]), torch.tensor([sequence]), torch.tensor([1]), torch.tensor([[0]]))
        with pytest.raises(IndexError, match=f"row {row} of 1, sequence {sequence} of 1"):
            rows.paged_attention(q, 1, paged, None, 0, pages, out)
    layout = StepLayout.from_lists([1], [1], [[0]], 4)
    plan = plan_step(layout, pages, RotaryTable(16, RotaryConfig(), torch.float32), is_paged=True)
    for slot in (-1, 16):
        with pytest.raises(IndexError, match=f"slot {slot} of 16"):
            rows.rope_and_store_kv(torch.ones(1, 48), 1, plan, None, 0.0, torch.tensor([slot]), 0, pages)
    assert not any(block.any() for block in pages.blocks(0))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["plain", "mixed", "wide", "mixtral window", "dbrx"])
@pytest.mark.parametrize("kept", ["dtype", "int8"])
def test_a_block_gives_what_it_gives_by_the_library(models: Any, name: str, dtype: str, kept: DtypeOrInt8) -> None:
    """Chunks beside decode rows, contexts that are continued, windows, norms of heads, biases, clipping."""
    config = read_model_config(models[name], dtype, kv_cache=kept)
    found: list[list[torch.Tensor]] = []
    for is_paged in (True, False):
        block = GroupedAttention(config, Checkpoint(models[name]), [0])
        assert block._is_paged
        block._is_paged = is_paged
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
        found.append([*results, *pages.read(0, slice(0, 160))])
    for own, by_library in zip(*found, strict=True):
        torch.testing.assert_close(own, by_library, rtol=2e-2 if dtype == "bfloat16" else 1e-4, atol=6e-2 if dtype == "bfloat16" else 1e-4)


# --- strict ---------------------------------------------------------------------------------------------------------------------


def test_a_proof_watches_what_is_computed() -> None:
    x, weight = drawn(8, 16), drawn(16, seed=1)
    for call, count in (
        (lambda: rows.rms_norm(x, weight, 1e-6), 16),
        (lambda: rows.add_rms_norm(x, x, weight, 1e-6), 32),
        (lambda: rows.topk_softmax(x, 3, 1.0, torch.float32), 9),  # 3 ids of 8 bytes, 3 weights of 4
    ):
        watch = _Recorder(8)
        with watch:
            call()
        assert watch.bits().shape == (8, 4 * count)
