"""Step layouts and pages: where the key and value of each row are stored."""

from __future__ import annotations

import pytest
import torch

from flowrt.operators.kv_pages import KvPages
from flowrt.operators.model_config import RotaryConfig
from flowrt.operators.rotary import FIRST_LENGTH, RotaryTable, rotate
from flowrt.operators.step_layout import StepLayout


def test_a_mixed_step() -> None:
    layout = StepLayout.from_lists([3, 1, 2], [5, 9, 2], [[7, 2], [4, 0, 9], [5]], page_size=4)
    assert layout.positions_T.tolist() == [2, 3, 4, 8, 0, 1]
    assert layout.slots_T.tolist() == [30, 31, 8, 36, 20, 21]
    assert layout.query_start_S1.tolist() == [0, 3, 4, 6]
    assert layout.kv_length_S.tolist() == [5, 9, 2]
    assert layout.page_table_SG.tolist() == [[7, 2, 0], [4, 0, 9], [5, 0, 0]]
    assert (layout.num_rows, layout.num_sequences) == (6, 3)


def test_a_layout_travels_as_tensors() -> None:
    layout = StepLayout.from_lists([3, 1], [5, 9], [[7, 2], [4, 0, 9]], page_size=4)
    copy = StepLayout.from_tensors([tensor.clone() for tensor in layout.to_tensors()])
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(layout.to_tensors(), copy.to_tensors(), strict=True))
    assert all(tensor.dtype == torch.int64 for tensor in layout.to_tensors())
    assert (copy.query_lengths, copy.kv_lengths) == ((3, 1), (5, 9))
    positions, slots, starts, contexts, table = layout.to_tensors()
    with_states = StepLayout.from_lists([3, 1], [5, 9], [[7, 2], [4, 0, 9]], 4, states=[(-1, 3), (2, 5)])
    *_, states_2S = with_states.to_tensors()
    assert states_2S.tolist() == [[-1, 2], [3, 5]]
    copy = StepLayout.from_tensors(with_states.to_tensors())
    assert copy.states_2S is not None
    assert torch.equal(copy.states_2S, states_2S)
    for wrong in (
        (positions, slots, starts, contexts, table, states_2S[:, :1]),
        (positions[1:], slots, starts, contexts, table),
        (positions, slots, starts, contexts[1:], table),
    ):
        with pytest.raises(ValueError, match="cannot have shapes"):
            StepLayout.from_tensors(wrong)


@pytest.mark.parametrize(
    ("query", "context", "tables"),
    [([0], [1], [[0]]), ([2], [1], [[0]]), ([1], [5], [[0]]), ([1], [1], [[0], [1]]), ([1, 1], [1], [[0]])],
)
def test_lists_that_do_not_belong_together(query: list[int], context: list[int], tables: list[list[int]]) -> None:
    with pytest.raises(ValueError, match=r"is needed"):
        StepLayout.from_lists(query, context, tables, page_size=4)


def test_pages_give_back_what_was_written() -> None:
    pages = KvPages(2, 3, 4, 2, 8, torch.float32)
    keys, values = torch.randn(5, 2, 8), torch.randn(5, 2, 8)
    slots = torch.tensor([11, 0, 5, 6, 3])
    pages.write(1, slots, keys, values)
    got_keys, got_values = pages.read(1, slots.flip(0))
    assert torch.equal(got_keys, keys.flip(0))
    assert torch.equal(got_values, values.flip(0))
    assert torch.equal(pages.keys_GCKD[1][2, 3], keys[0])
    assert not pages.keys_GCKD[0].any()


def test_the_rotary_table_grows_without_changing() -> None:
    table = RotaryTable(16, RotaryConfig(), torch.float32)
    positions = torch.tensor([0, 17, FIRST_LENGTH - 1])
    before = table.rows(positions, FIRST_LENGTH)
    table.rows(torch.tensor([FIRST_LENGTH + 100]), FIRST_LENGTH + 101)
    after = table.rows(positions, FIRST_LENGTH)
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
    x = torch.randn(3, 2, 16)
    turned = rotate(x, *before)
    torch.testing.assert_close(turned.norm(dim=-1), x.norm(dim=-1))
    assert torch.equal(turned[0], x[0])
