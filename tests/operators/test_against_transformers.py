"""The fast operators and the slow reference give transformers' logits and greedy tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from checkpoints import fuse_experts, random_prompts, truth_continues, truth_greedy, truth_logits
from fast_model import PAGE_TOKENS, FastModel
from reference_model import ReferenceModel

NAMES = [
    "plain",
    "mixed",
    "wide",
    "qwen3_next",
    "mixtral",
    "mixtral window",
    "mixtral llama3",
    "deepseek_v3",
    "deepseek_v3 yarn",
    "deepseek_v3 other",
    "deepseek_v2",
    "deepseek_v2 limited",
    "dbrx",
    "dbrx unequal",
]
PROMPTS = random_prompts([1, 2, 3, 7, 16, 33, 70, 150], seed=11)
NUM_NEW = 64


@pytest.mark.parametrize("name", NAMES)
def test_reference_gives_the_logits_of_transformers(models: Any, name: str) -> None:
    ids = random_prompts([40], seed=1)[0]
    torch.testing.assert_close(ReferenceModel(models[name]).extend(ids), truth_logits(models.truth(name), ids), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_greedy_tokens_equal_those_of_transformers(models: Any, name: str) -> None:
    tokens = FastModel(models[name]).greedy(PROMPTS, NUM_NEW)
    assert min(len(set(some)) for some in tokens) >= 12, "the checkpoint repeats itself; equal tokens would prove little"
    assert tokens == [truth_continues(models.truth(name), prompt, some) for prompt, some in zip(PROMPTS, tokens, strict=True)]
    assert tokens[3] == truth_greedy(models.truth(name), PROMPTS[3], NUM_NEW)
    reference = ReferenceModel(models[name])
    for prompt, some in zip(PROMPTS[:2], tokens, strict=False):
        assert reference.generate(prompt, 16, ignore_eos=True) == some[:16]


@pytest.mark.parametrize("name", NAMES)
def test_logits_of_mixed_chunks_and_decode_rows(models: Any, name: str) -> None:
    """Five sequences cut into uneven chunks, some of one row, in steps that mix them: every row's logits are right."""
    fast = FastModel(models[name])
    texts = random_prompts([40, 9, 23, 1, 150], seed=2)
    cuts = [[5, 1, 20, 1, 13], [1, 1, 1, 6], [23], [1], [140, 1, 1, 8]]
    tables = [fast.new_sequence(len(text)) for text in texts]
    read, logits = [0] * 5, [torch.empty(0, 512)] * 5
    for turn in range(5):
        active = [index for index in range(5) if turn < len(cuts[index])]
        rows = [texts[index][read[index] : read[index] + cuts[index][turn]] for index in active]
        for index, row in zip(active, rows, strict=True):
            read[index] += len(row)
        out = fast.step(rows, [read[index] for index in active], [tables[index] for index in active])
        for index, part in zip(active, out.split([len(row) for row in rows]), strict=True):
            logits[index] = torch.cat((logits[index], part))
    for text, got in zip(texts, logits, strict=True):
        torch.testing.assert_close(got, truth_logits(models.truth(name), text), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_bfloat16(models: Any, name: str) -> None:
    """Loaded in bfloat16 from float32 files, logits are as near to those of float32 as transformers' own."""
    ids = random_prompts([48], seed=3)[0]
    exact = truth_logits(models.truth(name), ids)
    theirs = truth_logits(models.truth(name, "bfloat16"), ids).float()
    fast = FastModel(models[name], "bfloat16")
    ours = fast.step([ids], [len(ids)], [fast.new_sequence(len(ids))])
    assert ours.dtype == torch.float32
    reference = ReferenceModel(models[name], "bfloat16").extend(ids).float()

    def error(logits: torch.Tensor) -> float:
        # The median over rows: where rounding picks another expert a row is far off, in theirs as in ours.
        return float((logits - exact).square().mean(dim=1).sqrt().median())

    assert error(theirs) > 1e-3, "bfloat16 was not used"
    assert error(ours) < 1.5 * error(theirs)
    assert error(reference) < 1.5 * error(theirs)


@pytest.mark.parametrize("name", ["plain", "qwen3_next", "mixtral window", "deepseek_v3", "deepseek_v2", "dbrx"])
def test_float64_equals_the_reference(models: Any, name: str) -> None:
    ids = random_prompts([30], seed=4)[0]
    fast = FastModel(models[name], "float64")
    ours = fast.step([ids], [len(ids)], [fast.new_sequence(len(ids))])
    assert ours.dtype == torch.float64
    torch.testing.assert_close(ours, ReferenceModel(models[name], "float64").extend(ids), rtol=1e-11, atol=1e-11)


def test_fused_experts_are_read_alike(models: Any, tmp_path: Any) -> None:
    ids = random_prompts([20], seed=5)[0]
    fused = fuse_experts(models["mixed"], tmp_path / "fused")
    assert torch.equal(ReferenceModel(fused).extend(ids), ReferenceModel(models["mixed"]).extend(ids))
    split, joined = FastModel(models["mixed"]), FastModel(fused)
    pages = split.new_sequence(20), joined.new_sequence(20)
    assert torch.equal(split.step([ids], [20], [pages[0]]), joined.step([ids], [20], [pages[1]]))


def test_generation_ends_with_an_end_of_sequence_id(models: Any) -> None:
    prompt = PROMPTS[4]
    tokens = truth_greedy(models.truth("plain"), prompt, 20)
    assert ReferenceModel(models["plain"]).generate(prompt, 20, ignore_eos=True) == tokens
    model = ReferenceModel(models["plain"])
    object.__setattr__(model.config, "eos_token_ids", (tokens[6],))
    assert model.generate(prompt, 20) == tokens[: tokens.index(tokens[6]) + 1]


def test_pages_of_another_sequence_do_not_leak_in(models: Any) -> None:
    """A page full of NaN, and a page that was used before, change nothing for the sequences that do not own it."""
    ids = random_prompts([10, 21], seed=6)
    clean, dirty = FastModel(models["plain"]), FastModel(models["plain"])
    used = clean.new_sequence(11), clean.new_sequence(22)
    owned = {page for table in used for page in table}
    for page in range(clean.pages.num_pages):
        if page not in owned:
            for layer in range(clean.pages.num_layers):
                dirty.pages.keys_GCKD[layer][page] = float("nan")
                dirty.pages.values_GCKD[layer][page] = float("nan")
    for model in (clean, dirty):
        model.step(ids, [10, 21], used)
    repeated = [model.step([[5], [6]], [11, 22], used) for model in (clean, dirty)]
    assert PAGE_TOKENS == 4
    assert torch.equal(*repeated)


@pytest.mark.gpu
def test_cuda(models: Any) -> None:
    ids = random_prompts([48], seed=3)[0]
    fast = FastModel(models["plain"], device="cuda")
    ours = fast.step([ids], [len(ids)], [fast.new_sequence(len(ids))])
    torch.testing.assert_close(ours.cpu(), truth_logits(models.truth("plain"), ids), rtol=1e-3, atol=1e-3)
    assert fast.greedy(PROMPTS[:3], 16) == [truth_greedy(models.truth("plain"), prompt, 16) for prompt in PROMPTS[:3]]
