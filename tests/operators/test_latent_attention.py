"""Latent attention: both forms agree, pages hold only latents, and old page contents do not leak."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from checkpoints import random_prompts, truth_logits
from fast_model import FastModel

from flowrt.operators import latent_attention
from flowrt.operators.families.registry import read_model_config
from flowrt.operators.kv_pages import KvPages
from flowrt.operators.latent_attention import LatentAttention, expanding_pays
from flowrt.operators.model_config import DtypeOrInt8, LatentConfig, ModelError
from flowrt.operators.step_layout import StepLayout
from flowrt.operators.weights import Checkpoint

NAMES = ["deepseek_v3", "deepseek_v3 yarn", "deepseek_v3 other", "deepseek_v2 limited"]


@torch.inference_mode()
def attend(directory: Any, cuts: list[list[int]]) -> list[torch.Tensor]:
    """Residuals and normed rows of steps in which several sequences bring rows, in float64."""
    config = read_model_config(directory, "float64")
    block = LatentAttention(config, Checkpoint(directory), [0])
    pages = KvPages.for_model(config, 64, 4)
    generator = torch.Generator().manual_seed(5)
    lengths, results = [0] * len(cuts), []
    for turn in range(max(map(len, cuts))):
        active = [index for index in range(len(cuts)) if turn < len(cuts[index])]
        for index in active:
            lengths[index] += cuts[index][turn]
        tables = [list(range(20 * index, 20 * index + 20)) for index in active]
        layout = StepLayout.from_lists([cuts[index][turn] for index in active], [lengths[index] for index in active], tables, 4)
        x_TH = torch.randn(layout.num_rows, config.hidden_size, dtype=torch.float64, generator=generator)
        results += block.forward(0, x_TH, layout, pages)
    return results


@pytest.mark.parametrize("name", NAMES)
def test_absorbed_and_expanded_chunks_agree(models: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cuts = [[40, 1, 9], [2, 3, 1], [1, 30, 2]]
    cheaper = attend(models[name], cuts)
    monkeypatch.setattr(latent_attention, "expanding_pays", lambda *_: False)
    absorbed = attend(models[name], cuts)
    monkeypatch.setattr(latent_attention, "expanding_pays", lambda *_: True)
    expanded = attend(models[name], cuts)
    torch.testing.assert_close(absorbed, expanded, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(cheaper, expanded, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kept", ["dtype", "int8"])
def test_decode_rows_equal_the_rows_of_a_chunk(models: Any, name: str, kept: DtypeOrInt8, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same rows, one per step, always absorbed, or in one expanded chunk."""
    config = read_model_config(models[name], "float64", kv_cache=kept)
    block = LatentAttention(config, Checkpoint(models[name]), [0])
    monkeypatch.setattr(latent_attention, "expanding_pays", lambda *_: True)
    x_TH = torch.randn(12, config.hidden_size, dtype=torch.float64, generator=torch.Generator().manual_seed(6))
    with torch.inference_mode():
        whole, _ = block.forward(0, x_TH, StepLayout.from_lists([12], [12], [[3, 1, 2]], 4), KvPages.for_model(config, 4, 4))
        pages = KvPages.for_model(config, 4, 4)
        for row in range(12):
            layout = StepLayout.from_lists([1], [row + 1], [[3, 1, 2]], 4)
            one, _ = block.forward(0, x_TH[row : row + 1], layout, pages)
            torch.testing.assert_close(one, whole[row : row + 1], rtol=1e-11, atol=1e-11)


def test_pages_hold_one_latent_and_one_rotary_key_per_token(models: Any) -> None:
    config = read_model_config(models["deepseek_v3"])
    assert config.latent is not None
    pages = KvPages.for_model(config, 10, 4)
    assert [block.shape for block in pages.blocks(0)] == [(10, 4, 1, config.latent.rank + config.latent.rope_width)]
    grouped = KvPages.for_model(read_model_config(models["plain"]), 10, 4)
    keys, values = grouped.blocks(0)
    assert keys.shape == values.shape
    assert keys.shape[2] * keys.shape[3] * 2 == read_model_config(models["plain"]).kv_width


def test_long_chunks_are_expanded_and_short_ones_are_not() -> None:
    """With the widths of DeepSeek-V3 the two meet at 512 * 256 / (2 * (576 - 192)) = 170.7 rows."""
    latent = LatentConfig(query_rank=1536, rank=512, nope_width=128, rope_width=64, value_width=128, scale=1.0)
    assert [expanding_pays(latent, rows) for rows in (1, 170, 171, 4096)] == [False, False, True, True]


@pytest.mark.parametrize("name", ["deepseek_v3", "mixtral window"])
def test_pages_of_another_sequence_do_not_leak_in(models: Any, name: str) -> None:
    """Pages full of NaN change nothing when they belong to no sequence or lie before the window."""
    ids = random_prompts([60, 21], seed=6)
    fast = FastModel(models[name])
    tables = [fast.new_sequence(61), fast.new_sequence(22)]
    fast.step(ids, [60, 21], tables)
    owned = {page for table in tables for page in table}
    window = fast.config.sliding_window
    if window is not None:
        owned -= set(tables[0][: (61 - window) // 4])
    for page in range(fast.pages.num_pages):
        if page not in owned:
            for layer in range(fast.pages.num_layers):
                for block in fast.pages.blocks(layer):
                    block[page] = float("nan")
    logits = fast.step([[5], [6]], [61, 22], tables)
    for got, text in zip(logits, ([*ids[0], 5], [*ids[1], 6]), strict=True):
        torch.testing.assert_close(got, truth_logits(models.truth(name), text)[-1], rtol=1e-4, atol=1e-4)


def test_a_model_without_latents_is_refused(models: Any) -> None:
    with pytest.raises(ValueError, match="a qwen3_moe model without latent attention"):
        LatentAttention(read_model_config(models["plain"]), Checkpoint(models["plain"]), [0])


@pytest.mark.parametrize("name", ["plain", "deepseek_v3"])
def test_pages_beyond_the_memory_are_refused(models: Any, name: str) -> None:
    with pytest.raises(
        ModelError, match=r"limits.kv_pages 16777216 of limits.page_size 1024 need [\d.e+]+ GiB, and this machine has [\d.e+]+;"
    ):
        KvPages.for_model(read_model_config(models[name]), 1 << 24, 1024)


def test_pages_that_the_allocator_refuses_are_named(models: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("can't allocate memory")

    monkeypatch.setattr(torch, "zeros", refuse)
    with pytest.raises(ModelError, match=r"limits.kv_pages 3 of limits.page_size 4 need [\d.e-]+ GiB, which cpu does not have"):
        KvPages.for_model(read_model_config(models["plain"]), 3, 4)
