"""Sampling: the distribution, the filters, and noise that depends on the token and not on the batch."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from transformers import MinPLogitsWarper

from flowrt.operators import sampling
from flowrt.operators.sampling import filtered_candidates, log_probabilities, penalized_logits, sample
from flowrt.operators.sampling_inputs import Draw, SamplingInputs, Score

LOGITS = torch.tensor([2.0, 1.0, 0.0, 0.5, -1.0, 1.5, -3.0, 0.25])


def draw(
    logits: torch.Tensor,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seed: int = 0,
    choice: int = 0,
    first: int = 0,
) -> torch.Tensor:
    """One token per row, the rows being consecutive tokens of one sequence."""
    draws = [Draw(row, temperature, top_k, top_p, seed, choice, first + row, min_p=min_p) for row in range(len(logits))]
    return sample(logits, SamplingInputs.from_draws(draws))


def gumbel_noise(seed: torch.Tensor, choice: torch.Tensor, token_index: torch.Tensor, num_tokens: int) -> torch.Tensor:
    return sampling.gumbel_noise(seed, choice, token_index, torch.arange(num_tokens).unsqueeze(0))


def test_greedy_and_its_logprobs() -> None:
    logits = torch.stack((LOGITS, -LOGITS, LOGITS))
    inputs = SamplingInputs.from_draws(
        [Draw(0, top_k=3, top_p=0.5, num_logprobs=2), Draw(1, num_logprobs=3, presence_penalty=2.0, output_counts={6: 1}), Draw(2)]
    )
    tokens = sample(logits, inputs)
    assert tokens.tolist() == [0, 4, 0]
    assert tokens.dtype == torch.int64
    own, top_ids, top = log_probabilities(logits[inputs.logprobs_L], tokens[inputs.logprobs_L], inputs.ranks_K.numel())
    truth = logits.log_softmax(-1)
    torch.testing.assert_close(own, torch.stack((truth[0, 0], truth[1, 4])))
    assert top_ids.tolist() == [[0, 5, 1], [6, 4, 2]], "the likeliest of the raw logits, whatever penalties say"
    torch.testing.assert_close(top, truth[:2].gather(1, top_ids))


def test_logprobs_of_more_tokens_than_there_are() -> None:
    _, top_ids, _ = log_probabilities(LOGITS.unsqueeze(0), torch.tensor([0]), 20)
    assert sorted(top_ids[0].tolist()) == list(range(8))


def test_equal_logprobs_have_one_order() -> None:
    logits = torch.randint(0, 9, (3, 4000), generator=torch.Generator().manual_seed(4)).float()
    tokens = torch.zeros(3, dtype=torch.int64)
    _, most, _ = log_probabilities(logits, tokens, 20)
    for number in (1, 3, 5, 12):
        assert torch.equal(log_probabilities(logits, tokens, number)[1], most[:, :number])
        assert torch.equal(log_probabilities(logits[2:], tokens[2:], number)[1], most[2:, :number])


def test_penalties_are_what_they_are_called() -> None:
    """Repetition as transformers has it, over prompt and output; presence and frequency over the output, as OpenAI defines them.

    (tests/end_to_end/test_request_parameters.py compares with transformers itself.)
    """
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(2)) * 3
    prompt, output = [3, 4, 4, 5, 6], [7, 4, 7, 7, 9, 3]
    counts = {token: output.count(token) for token in prompt + output}
    draws = [Draw(0), Draw(1, repetition_penalty=1.7, output_counts=counts)]
    draws.append(Draw(2, presence_penalty=0.6, frequency_penalty=-0.4, output_counts=counts, forbidden_token_ids=(1, 7)))
    before = logits.clone()
    got = penalized_logits(logits, SamplingInputs.from_draws(draws))
    assert torch.equal(logits, before)
    assert torch.equal(got[0], logits[0])
    expected = logits[1].clone()
    for token in set(prompt + output):
        expected[token] = expected[token] * 1.7 if expected[token] < 0 else expected[token] / 1.7
    assert torch.equal(got[1], expected)
    assert (logits[1, list(counts)] < 0).any()
    assert (logits[1, list(counts)] > 0).any()
    expected = logits[2].clone()
    for token in set(output):
        expected[token] -= 0.6 - 0.4 * output.count(token)
    expected[[1, 7]] = float("-inf")
    torch.testing.assert_close(got[2], expected)


def test_forbidden_tokens_are_never_drawn() -> None:
    logits = torch.tensor([[9.0, 8.0, 1.0, 0.0]]).repeat(200, 1)
    for settings in ({}, {"temperature": 1.0}, {"temperature": 1.0, "top_k": 2}, {"temperature": 1.0, "top_p": 0.5}):
        draws = [Draw(row, token_index=row, forbidden_token_ids={0, 1}, **settings) for row in range(200)]
        assert set(sample(logits, SamplingInputs.from_draws(draws)).tolist()) <= {2, 3}


def test_bias_is_added_before_penalties() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.5, -1.0]])
    bias = [(1, 3.0), (2, -100.0), (3, 100.0)]
    draws = [Draw(0, logit_bias=bias, forbidden_token_ids=(3,), repetition_penalty=2.0, output_counts={0: 1, 1: 0})]
    assert penalized_logits(logits, SamplingInputs.from_draws(draws)).tolist() == [[1.0, 2.0, -99.5, -math.inf]]


def test_rough_noise_rules_out_no_winner() -> None:
    """Draws from all tokens are what exact noise on every token gives: flat and steep logits, two tokens and many, every temperature."""
    generator = torch.Generator().manual_seed(5)
    for num_tokens, scale, temperature in (
        (2, 1.0, 1.0),
        (2, 60.0, 3.0),
        (7, 0.0, 1.0),
        (4000, 3.0, 0.8),
        (4000, 0.1, 0.02),
        (300, 5.0, 50.0),
    ):
        logits = torch.randn(500, num_tokens, generator=generator) * scale
        numbers = torch.arange(500)
        noise = gumbel_noise(numbers, numbers % 3, numbers * 7, num_tokens)
        expected = (logits.double() / temperature + noise).argmax(dim=-1)
        draws = [Draw(row, temperature, seed=row, choice=row % 3, token_index=7 * row) for row in range(500)]
        assert torch.equal(sample(logits, SamplingInputs.from_draws(draws)), expected)


@pytest.mark.parametrize("filters", [{}, {"top_k": 5}, {"top_p": 0.9}, {"top_k": 3, "top_p": 0.8}, {"min_p": 0.4}])
def test_tiny_temperatures_draw_as_the_smallest_one(filters: dict[str, Any]) -> None:
    for dtype, scale in itertools.product((torch.float32, torch.float64), (0.01, 1e9)):
        logits = LOGITS.to(dtype).repeat(200, 1) * scale
        smallest = draw(logits, temperature=sampling.MIN_TEMPERATURE, **filters)
        assert (len(smallest.unique()) > 1) == (scale < 1)
        for temperature in (5e-324, 1e-300, 1e-38, 1e-3):
            assert torch.equal(draw(logits, temperature=temperature, **filters), smallest)


def test_inputs_travel_as_tensors() -> None:
    inputs = SamplingInputs.from_draws([Draw(3, 0.5, seed=2**63 - 1, num_logprobs=2, output_counts={1: 0, 2: 3}, forbidden_token_ids={4})])
    assert all(isinstance(tensor, torch.Tensor) for tensor in inputs)
    assert SamplingInputs(*tuple(inputs)) is not inputs
    assert inputs.rows_S.tolist() == [3]
    assert inputs.penalized_3N.tolist() == [[0, 0], [1, 2], [0, 3]]
    assert (inputs.biased_2C.tolist(), inputs.bias_C.tolist()) == ([[0], [4]], [-math.inf])
    scored = SamplingInputs.from_draws([Draw(0)], scores=[Score(2, 7, 3), Score(4, 8, 1)])
    assert (scored.scored_2G.tolist(), scored.ranks_K.tolist(), scored.logprobs_L.tolist()) == ([[2, 4], [7, 8]], [0, 1, 2], [])
    none = SamplingInputs.from_draws([])
    assert sample(torch.zeros(0, 5), none).tolist() == []


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ({}, range(8)),
        ({"temperature": 0.5}, range(8)),
        ({"top_k": 3}, [0, 5, 1]),
        ({"top_p": 0.6}, [0, 5]),
        ({"top_k": 2, "top_p": 0.99, "temperature": 2.0}, [0, 5]),
    ],
)
@pytest.mark.parametrize("vary", ["token_index", "seed", "choice"])
def test_chi_square(settings: dict[str, float], kept: list[int], vary: str) -> None:
    """10 000 draws, each with noise of its own, are spread as the filtered softmax is. Fixed seeds: the result is always the same."""
    size = 10_000
    full = {"temperature": 1.0, "top_k": 0, "top_p": 1.0} | settings
    where = {"seed": 12345, "choice": 0, "token_index": 0}
    draws = [Draw(row, **(full | where | {vary: row + 5})) for row in range(size)]  # type: ignore[arg-type]
    tokens = sample(LOGITS.expand(size, 8), SamplingInputs.from_draws(draws))
    allowed = torch.tensor(list(kept))
    expected = (LOGITS[allowed] / full["temperature"]).softmax(0) * size
    counts = torch.bincount(tokens, minlength=8)
    assert counts.sum() == counts[allowed].sum()
    statistic = float(((counts[allowed] - expected) ** 2 / expected).sum())
    freedom = len(allowed) - 1
    assert statistic < freedom + 4 * math.sqrt(2 * freedom)


def test_neighbouring_noise_is_independent() -> None:
    """Noise of neighbouring indices, seeds, choices and vocabulary ids is not correlated."""
    numbers = torch.arange(300)
    zero = torch.zeros(300, dtype=torch.int64)
    for noise in (gumbel_noise(zero, zero, numbers, 200), gumbel_noise(numbers, zero, zero, 200), gumbel_noise(zero, numbers, zero, 200)):
        assert abs(float(noise.mean()) - 0.5772) < 0.02
        assert abs(float(noise.var()) - math.pi**2 / 6) < 0.05
        for one, other in ((noise[1:], noise[:-1]), (noise[:, 1:], noise[:, :-1])):
            assert abs(float(torch.corrcoef(torch.stack((one.flatten(), other.flatten())))[0, 1])) < 0.02
    swapped = gumbel_noise(torch.tensor([1]), torch.tensor([2]), torch.tensor([3]), 4)
    for permutation in itertools.permutations((1, 2, 3)):
        if permutation != (1, 2, 3):
            assert not torch.equal(gumbel_noise(*(torch.tensor([value]) for value in permutation), 4), swapped)


def test_noise_is_what_it_was() -> None:
    """The noise is stable across versions: replaying a log must give the same tokens. Values from SplitMix64 in plain integers."""

    def mix(bits: int) -> int:
        bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EB % 2**64
        return bits ^ (bits >> 31)

    step = 0x9E3779B97F4A7C15
    for seed, choice, index in ((0, 0, 0), (2**63 - 1, 3, 77), (-5, 0, 4096)):
        key = 0
        for value in (seed, choice, index):
            key = mix((key + value + step) % 2**64)
        expected = []
        for token in range(5):
            uniform = ((mix((key + (token + 1) * step) % 2**64) >> 12) + 0.5) * 2.0**-52
            expected.append(-math.log(-math.log(uniform)))
        got = gumbel_noise(torch.tensor([seed]), torch.tensor([choice]), torch.tensor([index]), 5)
        torch.testing.assert_close(got[0], torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=1e-12)


def test_a_draw_does_not_depend_on_its_batch() -> None:
    generator = torch.Generator().manual_seed(0)
    size = 24
    logits = torch.randn(size, 300, generator=generator).mul(2).bfloat16().float()  # bfloat16: many ties
    seeds = torch.randint(0, 2**62, (size,), generator=generator).tolist()
    indices = torch.randint(0, 500, (size,), generator=generator).tolist()
    draws = [
        Draw(
            row, (0.0, 0.7, 1.0, 1.5)[row % 4], (0, 5, 0, 40, 300, 1)[row % 6], (1.0, 0.9, 0.3)[row % 3], seeds[row], row % 3, indices[row]
        )
        for row in range(size)
    ]
    draws[5] = draws[5]._replace(frequency_penalty=1.0, output_counts={int(token): 2 for token in logits[5].topk(9).indices})
    tokens = sample(logits, SamplingInputs.from_draws(draws))
    order = torch.randperm(size, generator=generator)
    for rows in (order, order[:7], *order[:, None]):
        alone = sample(logits[rows], SamplingInputs.from_draws([draws[row] for row in rows.tolist()]))
        assert torch.equal(alone, tokens[rows])


def test_filters_keep_ties_and_at_least_one_token() -> None:
    tied = torch.tensor([[1.0, 3.0, 1.0, 1.0, 0.0]], dtype=torch.float64)

    def kept(top_k: int, top_p: float) -> list[int]:
        ids, scaled = filtered_candidates(tied, torch.ones(1), torch.tensor([top_k]), torch.tensor([top_p]), torch.zeros(1))
        return sorted(ids[scaled.isfinite()].tolist())

    assert kept(0, 1.0) == [0, 1, 2, 3, 4]
    assert kept(1, 1.0) == kept(0, 0.1) == kept(0, 0.0) == [1]
    assert kept(2, 1.0) == kept(3, 1.0) == kept(0, 0.8) == [0, 1, 2, 3]
    assert kept(5, 1.0) == kept(9, 1.0) == [0, 1, 2, 3, 4]
    assert kept(2, 0.5) == [1]


def test_filters_look_as_deep_as_they_must(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looking first at few tokens keeps the same ones as looking at all of them, also when ties reach beyond the few."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(40, 3000, generator=generator)
    logits[:20] = logits[:20].mul(2).round()  # many ties
    temperature = torch.tensor([0.5, 1.0, 3.0, 1.2]).repeat(10)
    top_k = torch.tensor([0, 3, 50, 2000, 4000]).repeat(8)
    top_p = torch.tensor([0.2, 0.9, 0.999, 0.5, 1.0, 0.7, 0.95, 0.99]).repeat(5)
    min_p = torch.tensor([0.0, 0.1, 0.0, 1e-3, 0.0, 0.4, 1e-6, 1.0]).repeat(5)

    def kept() -> list[set[int]]:
        ids, scaled = filtered_candidates(logits, temperature, top_k, top_p, min_p)
        return [set(some[row.isfinite()].tolist()) for some, row in zip(ids, scaled, strict=True)]

    monkeypatch.setattr(sampling, "FIRST_DEPTH", 3000)
    everything = kept()
    monkeypatch.setattr(sampling, "FIRST_DEPTH", 2)
    assert kept() == everything
    for row, some in enumerate(everything):  # and by the definition, in Python
        values = sorted((logits[row].double() / temperature[row].double()).tolist(), reverse=True)
        if 0 < top_k[row] < 3000:
            values = [value for value in values if value >= values[int(top_k[row]) - 1]]
        total, mass, cutoff = sum(map(math.exp, values)), 0.0, values[-1]
        for value in values:
            mass += math.exp(value) / total
            if mass >= top_p[row].double() and top_p[row] < 1:
                cutoff = value
                break
        if min_p[row] > 0:
            cutoff = max(cutoff, values[0] + math.log(min_p[row].double()))
        assert len(some) == sum(value >= cutoff for value in values)


def test_min_p_keeps_what_transformers_keeps() -> None:
    logits = torch.randn(30, 500, generator=torch.Generator().manual_seed(8)) * 3
    temperature, min_p = torch.tensor([0.5, 1.0, 2.0]).repeat(10), torch.tensor([0.02, 0.1, 0.5, 0.9, 1.0]).repeat(6)
    ids, scaled = filtered_candidates(logits, temperature, torch.zeros(30, dtype=torch.int64), torch.ones(30), min_p)
    for row in range(30):
        warped = MinPLogitsWarper(float(min_p[row]))(torch.zeros(1, 1, dtype=torch.int64), logits[row : row + 1] / temperature[row])
        assert sorted(ids[row][scaled[row].isfinite()].tolist()) == warped[0].isfinite().nonzero().squeeze(1).tolist()
    draws = [Draw(row, 2.0, seed=row, min_p=0.5) for row in range(30)]
    drawn = sample(logits, SamplingInputs.from_draws(draws))
    assert (logits[torch.arange(30), drawn] / 2 >= logits.amax(dim=1) / 2 + math.log(0.5)).all()
    assert len({*(drawn - logits.argmax(dim=1)).tolist()}) > 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_masks_rule_tokens_out_of_their_rows(dtype: torch.dtype) -> None:
    """Before penalties; a row without a mask and raw logits stay as they are, and what is not finite stays so behind a mask."""
    logits = torch.randn(4, 203, generator=torch.Generator().manual_seed(4)).to(dtype)
    logits[2, 9] = float("nan")
    allowed = [{0, 8, 202}, None, {3}, {7, 9}]
    draws = [Draw(row, allowed_B=None if some is None else mask_of(some, 203)) for row, some in enumerate(allowed)]
    draws[3] = draws[3]._replace(repetition_penalty=2.0, output_counts={7: 1})
    before = logits.clone()
    got = penalized_logits(logits, SamplingInputs.from_draws(draws))
    assert torch.equal(logits.nan_to_num(5.0), before.nan_to_num(5.0))
    assert torch.equal(got[1], logits[1])
    assert {*got[0].isfinite().nonzero().squeeze(1).tolist()} == allowed[0]
    assert torch.equal(got[0, [0, 8, 202]], logits[0, [0, 8, 202]])
    assert got[2].isnan().nonzero().tolist() == [[9]]
    assert got[3, 7] == (logits[3, 7] * 2 if logits[3, 7] < 0 else logits[3, 7] / 2)
    if dtype is not torch.bfloat16:  # the head gives wide logits
        tokens = sample(logits, SamplingInputs.from_draws([draw._replace(temperature=2.0, top_k=draw.row) for draw in draws])).tolist()
        assert (tokens[0] in {0, 8, 202}, tokens[2], tokens[3] in {7, 9}) == (True, sampling.NO_TOKEN, True)


def mask_of(token_ids: set[int], num_tokens: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.packbits([token_id in token_ids for token_id in range(num_tokens)], bitorder="little")


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_a_row_whose_logits_are_not_finite_gives_no_token(broken: float) -> None:
    """However its token is drawn; the other rows of the batch are drawn as without it, and a token that is ruled out (-inf) is no fault."""
    draws = [Draw(0), Draw(1, 0.8, num_logprobs=2), Draw(2, 0.8, 50), Draw(3, 0.8, 0, 0.9), Draw(4, num_logprobs=1)]
    good = torch.randn(5, 300, generator=torch.Generator().manual_seed(1))
    good[:, 7] = float("-inf")
    inputs = SamplingInputs.from_draws(draws)
    expected = sample(good, inputs)
    assert (expected >= 0).all()
    for row in range(5):
        logits = good.clone()
        logits[row, 123] = broken
        tokens = sample(logits, inputs)
        assert tokens.tolist() == [sampling.NO_TOKEN if at == row else token for at, token in enumerate(expected.tolist())]
        log_probabilities(logits, tokens, 2)
    assert sample(torch.full((5, 300), float("-inf")), inputs).tolist() == [sampling.NO_TOKEN] * 5


@pytest.mark.gpu
def test_cuda_draws_the_same_tokens() -> None:
    logits = torch.randn(64, 1000, generator=torch.Generator().manual_seed(3))
    draws = [Draw(row, 0.8, (50, 0)[row % 2], (0.9, 1.0)[row % 2], row, row, row, num_logprobs=3) for row in range(64)]
    here, there = SamplingInputs.from_draws(draws), SamplingInputs.from_draws(draws, "cuda")
    tokens = sample(logits, here)
    assert torch.equal(tokens, sample(logits.cuda(), there).cpu())
    for one, other in zip(log_probabilities(logits, tokens, 3), log_probabilities(logits.cuda(), tokens.cuda(), 3), strict=True):
        torch.testing.assert_close(one, other.cpu())
