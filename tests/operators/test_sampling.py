"""Sampling: the right distribution, the right filters, and noise that belongs to a token and not to a batch."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from operators import sampling
from operators.sampling import filtered_candidates, sample

LOGITS = torch.tensor([2.0, 1.0, 0.0, 0.5, -1.0, 1.5, -3.0, 0.25])


def draw(
    logits: torch.Tensor, *, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, seed: int = 0, choice: int = 0, first: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token per row, the rows being consecutive tokens of one sequence."""
    size = logits.shape[0]
    return sample(
        logits,
        torch.full((size,), temperature),
        torch.full((size,), top_k),
        torch.full((size,), top_p),
        torch.full((size,), seed),
        torch.full((size,), choice),
        torch.arange(first, first + size),
    )


def gumbel_noise(seed: torch.Tensor, choice: torch.Tensor, token_index: torch.Tensor, num_tokens: int) -> torch.Tensor:
    return sampling.gumbel_noise(seed, choice, token_index, torch.arange(num_tokens).unsqueeze(0))


def test_greedy_and_its_logprob() -> None:
    logits = torch.stack((LOGITS, -LOGITS))
    tokens, logprobs = draw(logits, temperature=0.0, top_k=3, top_p=0.5)
    assert tokens.tolist() == [0, 6]
    torch.testing.assert_close(logprobs, torch.stack((LOGITS.log_softmax(0)[0], (-LOGITS).log_softmax(0)[6])))
    assert (tokens.dtype, logprobs.dtype) == (torch.int64, torch.float32)


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
    """40 000 draws, each with noise of its own, are spread as the filtered softmax is. Fixed seeds: the result is always the same."""
    size = 40_000
    counter, zero = torch.arange(size) + 5, torch.zeros(size, dtype=torch.int64)
    where = {"seed": zero + 12345, "choice": zero, "token_index": zero} | {vary: counter}
    full = {"temperature": 1.0, "top_k": 0, "top_p": 1.0} | settings
    tokens, logprobs = sample(
        LOGITS.expand(size, 8),
        *(torch.full((size,), full[key]) for key in ("temperature", "top_k", "top_p")),
        where["seed"],
        where["choice"],
        where["token_index"],
    )
    allowed = torch.tensor(list(kept))
    expected = (LOGITS[allowed] / full["temperature"]).softmax(0) * size
    counts = torch.bincount(tokens, minlength=8)
    assert counts.sum() == counts[allowed].sum()
    statistic = float(((counts[allowed] - expected) ** 2 / expected).sum())
    freedom = len(allowed) - 1
    assert statistic < freedom + 4 * math.sqrt(2 * freedom)
    torch.testing.assert_close(logprobs, LOGITS.log_softmax(0)[tokens])


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
    """The noise is a promise across versions: replaying a log must give the same tokens. Values from SplitMix64 in plain integers."""

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
    columns = (
        torch.tensor([0.0, 0.7, 1.0, 1.5] * 6),
        torch.tensor([0, 5, 0, 40, 300, 1] * 4),
        torch.tensor([1.0, 0.9, 0.3] * 8),
        torch.randint(-(2**62), 2**62, (size,), generator=generator),
        torch.arange(size) % 3,
        torch.randint(0, 500, (size,), generator=generator),
    )
    tokens, logprobs = sample(logits, *columns)
    order = torch.randperm(size, generator=generator)
    for rows in (order, order[:7], *order[:, None]):
        alone, alone_logprobs = sample(logits[rows], *(column[rows] for column in columns))
        assert torch.equal(alone, tokens[rows])
        torch.testing.assert_close(alone_logprobs, logprobs[rows])


def test_filters_keep_ties_and_at_least_one_token() -> None:
    tied = torch.tensor([[1.0, 3.0, 1.0, 1.0, 0.0]], dtype=torch.float64)

    def kept(top_k: int, top_p: float) -> list[int]:
        ids, scaled = filtered_candidates(tied, torch.ones(1), torch.tensor([top_k]), torch.tensor([top_p]))
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

    def kept() -> list[set[int]]:
        ids, scaled = filtered_candidates(logits, temperature, top_k, top_p)
        return [set(some[row.isfinite()].tolist()) for some, row in zip(ids, scaled, strict=True)]

    monkeypatch.setattr(sampling, "FIRST_DEPTH", 3000)
    everything = kept()
    monkeypatch.setattr(sampling, "FIRST_DEPTH", 2)
    assert kept() == everything
    for row, some in enumerate(everything):  # and as the definition says, in Python
        values = sorted((logits[row].double() / temperature[row].double()).tolist(), reverse=True)
        if 0 < top_k[row] < 3000:
            values = [value for value in values if value >= values[int(top_k[row]) - 1]]
        total, mass, cutoff = sum(map(math.exp, values)), 0.0, values[-1]
        for value in values:
            mass += math.exp(value) / total
            if mass >= top_p[row].double() and top_p[row] < 1:
                cutoff = value
                break
        assert len(some) == sum(value >= cutoff for value in values)


@pytest.mark.gpu
def test_cuda_draws_the_same_tokens() -> None:
    logits = torch.randn(64, 1000, generator=torch.Generator().manual_seed(3))
    arguments = (torch.full((64,), 0.8), torch.full((64,), 50), torch.full((64,), 0.9), *(torch.arange(64) for _ in range(3)))
    here, there = sample(logits, *arguments), sample(logits.cuda(), *(argument.cuda() for argument in arguments))
    assert torch.equal(here[0], there[0].cpu())
