"""Contiguous contexts are read in place, with the same result as copying."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flowrt.operators import attention_plan
from flowrt.operators.attention import attention_for
from flowrt.operators.attention_plan import Chunk, DecodeGroup, StepPlan, plan_step
from flowrt.operators.families.registry import read_model_config
from flowrt.operators.kv_pages import KvPages
from flowrt.operators.model_config import RotaryConfig
from flowrt.operators.rotary import RotaryTable
from flowrt.operators.step_layout import StepLayout
from flowrt.operators.weights import Checkpoint

IN_ONE_PIECE = [list(range(3, 23)), list(range(30, 50)), list(range(50, 70))]
SCATTERED = [pages[::-1] for pages in IN_ONE_PIECE]
STEPS = [([17, 30, 1], [17, 30, 1]), ([1, 5, 1], [18, 35, 2]), ([1, 1, 9], [19, 36, 11]), ([1, 1, 1], [20, 37, 12])]


def slots_of(plan: StepPlan) -> list[torch.Tensor | slice | None]:
    return [group.slots for group in plan.groups] + [chunk.slots_L for chunk in plan.chunks]


@torch.inference_mode()
def attend(directory: Any, tables: list[list[int]], dtype: str = "float64") -> list[torch.Tensor]:
    config = read_model_config(directory, dtype)
    block, pages = attention_for(config, Checkpoint(directory), [0]), KvPages.for_model(config, 70, 4)
    generator, results = torch.Generator().manual_seed(5), []
    for queries, contexts in STEPS:
        layout = StepLayout.from_lists(queries, contexts, tables, 4)
        x_TH = torch.randn(layout.num_rows, config.hidden_size, dtype=torch.float64, generator=generator).to(getattr(torch, dtype))
        results += block.forward(0, x_TH, layout, pages)
    return results


@pytest.mark.parametrize("name", ["plain", "mixtral window", "deepseek_v2"])
def test_reading_in_place_equals_copying(models: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    copied = attend(models[name], SCATTERED)
    monkeypatch.setattr(attention_plan, "COPIED_BYTES", 0)
    torch.testing.assert_close(attend(models[name], IN_ONE_PIECE), copied, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(attend(models[name], SCATTERED), copied, rtol=1e-11, atol=1e-11)


def plan_of(tables: list[list[int]], window: int | None = None) -> StepPlan:
    pages = KvPages(1, 70, 4, 2, 16, torch.float32)
    layout = StepLayout.from_lists([1, 6, 1], [20, 37, 12], tables, 4)
    plan = plan_step(layout, pages, RotaryTable(16, RotaryConfig(), torch.float32), window)
    assert all(isinstance(each, DecodeGroup) for each in plan.groups)
    assert all(isinstance(each, Chunk) for each in plan.chunks)
    return plan


def test_long_contexts_in_one_piece_are_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_plan, "COPIED_BYTES", 15 * 2 * 16 * 4)
    found = slots_of(plan_of(IN_ONE_PIECE))
    assert found[0] == slice(12, 32)  # sequence 0 alone
    assert isinstance(found[1], torch.Tensor)  # sequence 2 is short: it is copied
    assert found[2] == slice(120, 157)  # the chunk
    assert all(isinstance(each, torch.Tensor) for each in slots_of(plan_of(SCATTERED)))


def test_with_a_window_only_what_is_seen_must_lie_in_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_plan, "COPIED_BYTES", 0)
    tables = [[60, *range(1, 20)], [61, *range(30, 49)], [62, *range(50, 69)]]
    assert slots_of(plan_of(tables, window=7)) == [slice(13, 20), slice(201, 208), slice(141, 153)]
    assert all(isinstance(each, torch.Tensor) for each in slots_of(plan_of(tables)))


def test_what_lies_at_odd_places_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_plan, "COPIED_BYTES", 0)
    pages = KvPages(1, 70, 4, 1, 8, torch.float32)  # 32 bytes a token
    layout = StepLayout.from_lists([1], [20], [list(range(5))], 4)
    plan = plan_step(layout, pages, RotaryTable(8, RotaryConfig(), torch.float32))
    assert isinstance(plan.groups[0].slots, torch.Tensor)
