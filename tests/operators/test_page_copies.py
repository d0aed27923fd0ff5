"""Rows copied between slots of KV pages and packed memory: C against torch, byte for byte and hash for hash."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flowrt.operators.kernels.cpu import pages as cpu_pages
from flowrt.operators.kernels.torch import pages as torch_pages

pytestmark = pytest.mark.skipif(not cpu_pages.available, reason="the C module _pages was not built")
NUM_SLOTS = 64
DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int8]


def drawn_parts(dtype: torch.dtype, heads: int, widths: list[int], is_whole: bool, seed: int) -> tuple[Tensor, ...]:
    """Slots of [heads, width] each; if not `is_whole`, as pieces of wider rows, as the parts of latents are."""
    chance = torch.Generator().manual_seed(seed)
    if is_whole:
        return tuple(torch.randint(-100, 100, (NUM_SLOTS, heads, width), generator=chance).to(dtype) for width in widths)
    rows = torch.randint(-100, 100, (NUM_SLOTS, heads, sum(widths)), generator=chance).to(dtype)
    return rows.split(widths, dim=-1)


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from(DTYPES),
    st.integers(1, 2),
    st.lists(st.integers(1, 700), min_size=1, max_size=2),
    st.booleans(),
    st.one_of(
        st.lists(st.integers(0, NUM_SLOTS - 1), max_size=NUM_SLOTS, unique=True).map(lambda slots: torch.tensor(slots, dtype=torch.int64)),
        st.tuples(st.integers(0, NUM_SLOTS), st.integers(0, NUM_SLOTS)).map(lambda ends: slice(min(ends), max(ends))),
    ),
    st.integers(0, 1000),
)
def test_copies_and_hashes_are_those_of_the_reference(
    dtype: torch.dtype, heads: int, widths: list[int], is_whole: bool, slots: Tensor | slice, seed: int
) -> None:
    parts = drawn_parts(dtype, heads, widths, is_whole, seed)
    rows_of = [part[slots] for part in parts]
    packed, expected = [torch.zeros_like(rows).contiguous() for rows in rows_of], [torch.zeros_like(rows) for rows in rows_of]
    digest, expected_digest = cpu_pages.gather_slots(parts, slots, packed), torch_pages.gather_slots(parts, slots, expected)
    assert all(torch.equal(one, other) for one, other in zip(packed, expected, strict=True))
    assert digest == expected_digest == torch_pages.digest_of(rows_of)
    targets = drawn_parts(dtype, heads, widths, is_whole, seed + 1)
    expected_targets = drawn_parts(dtype, heads, widths, is_whole, seed + 1)
    assert cpu_pages.scatter_slots(targets, slots, packed) == torch_pages.scatter_slots(expected_targets, slots, packed) == digest
    assert all(torch.equal(one, other) for one, other in zip(targets, expected_targets, strict=True))


@pytest.mark.parametrize("num_bytes", [240, 241, 255, 256, 1023, 1024, 1025, 1088, 4096, 4097, 8191, 65536, 65599])
def test_each_length_of_a_hash_is_that_of_xxhash(num_bytes: int) -> None:
    """Around the sizes of XXH3's stripes and blocks, and of the pieces that are copied at a time."""
    part = torch.arange(num_bytes, dtype=torch.int64).mul(37).to(torch.uint8)[None, None]
    copy = torch.zeros_like(part)
    digest = cpu_pages.gather_slots((part,), torch.tensor([0]), (copy,))
    assert torch.equal(copy, part)
    assert digest == torch_pages.digest_of((part,))


@pytest.mark.parametrize("slot", [-1, NUM_SLOTS])
def test_a_slot_that_does_not_exist_moves_nothing(slot: int) -> None:
    parts = drawn_parts(torch.float32, 2, [64], True, 0)
    before = parts[0].clone()
    slots = torch.tensor([3, slot])
    with pytest.raises(IndexError, match=f"slot {slot} of {NUM_SLOTS}"):
        cpu_pages.scatter_slots(parts, slots, [torch.ones(2, 2, 64)])
    assert torch.equal(parts[0], before)
    rows = torch.ones(2, 2, 64)
    with pytest.raises(IndexError):
        cpu_pages.gather_slots(parts, slots, [rows])
    assert torch.equal(rows, torch.ones(2, 2, 64))


@pytest.mark.parametrize(
    "rows",
    [torch.zeros(2, 2, 63), torch.zeros(1, 2, 64), torch.zeros(2, 2, 64, dtype=torch.float64), torch.zeros(2, 2, 64, device="meta")],
    ids=["width", "rows", "dtype", "device"],
)
def test_rows_that_do_not_fit_are_refused(rows: Tensor) -> None:
    with pytest.raises(ValueError, match="do not go with"):
        cpu_pages.scatter_slots(drawn_parts(torch.float32, 2, [64], True, 0), torch.tensor([3, 4]), [rows])
