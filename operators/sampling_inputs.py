"""How the tokens of a step are drawn, as tensors: what the engine asks for, ready to travel to the worker that ends the step.

Here: Draw (one token's settings, plain numbers), SamplingInputs (all of a step's). Not here: what is done with them (sampling.py).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import NamedTuple

import torch
from torch import Tensor


class Draw(NamedTuple):
    """One token: from which row's logits, and how. temperature 0 is greedy; top_k 0, top_p 1, and the penalties' defaults are off.

    `output_counts` is for penalties: each token of prompt and output -> how often it is in the output. `num_logprobs` None: no
    logprobs; else how many of the likeliest tokens are wanted beside the drawn one.
    """

    row: int
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    choice: int = 0
    token_index: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    num_logprobs: int | None = None
    output_counts: Mapping[int, int] | None = None
    forbidden_token_ids: Collection[int] = ()


@dataclass(frozen=True, eq=False)
class SamplingInputs:
    """S = samples. What only some of them use has a length of its own, 0 when none does: nobody waits for a device to learn that.

    `integers_5S` int64: row, top_k, seed, choice (which of a request's outputs), token index (in that output).
    `floats_5S` float64: temperature, top_p, repetition, presence and frequency penalty.
    `unfiltered_U`, `filtered_F` int64: samples drawn from all tokens, and those with top_k or top_p; the others are greedy.
    `penalized_3N` int64: sample, token id, occurrences in the output; pairs of sample and id are all different.
    `forbidden_2M` int64: sample, token id. `logprobs_L` int64: samples whose logprobs are wanted; `ranks_K`: of 0 .. K-1.
    """

    integers_5S: Tensor
    floats_5S: Tensor
    unfiltered_U: Tensor
    filtered_F: Tensor
    penalized_3N: Tensor
    forbidden_2M: Tensor
    logprobs_L: Tensor
    ranks_K: Tensor

    @classmethod
    def from_draws(cls, draws: Sequence[Draw], device: torch.device | str = "cpu") -> SamplingInputs:
        """The tensors of these draws, in order."""
        wanted = [each.num_logprobs for each in draws if each.num_logprobs is not None]
        drawn = [sample for sample, each in enumerate(draws) if each.temperature > 0]
        filtered = [sample for sample in drawn if draws[sample].top_k > 0 or draws[sample].top_p < 1]
        unfiltered = [sample for sample in drawn if not (draws[sample].top_k > 0 or draws[sample].top_p < 1)]
        integers = [[each.row, each.top_k, each.seed, each.choice, each.token_index] for each in draws]
        floats = [[each[1], each[3], each.repetition_penalty, each.presence_penalty, each.frequency_penalty] for each in draws]
        penalized, forbidden = _ragged(draws)
        tensors = (
            torch.tensor(integers, dtype=torch.int64).reshape(-1, 5).t(),
            torch.tensor(floats, dtype=torch.float64).reshape(-1, 5).t(),
            torch.tensor(unfiltered, dtype=torch.int64),
            torch.tensor(filtered, dtype=torch.int64),
            penalized,
            forbidden,
            torch.tensor([sample for sample, each in enumerate(draws) if each.num_logprobs is not None], dtype=torch.int64),
            torch.arange(max(wanted, default=0)),
        )
        return cls(*(tensor.to(device) for tensor in tensors))

    def to_tensors(self) -> tuple[Tensor, ...]:
        """What travels."""
        return (
            self.integers_5S,
            self.floats_5S,
            self.unfiltered_U,
            self.filtered_F,
            self.penalized_3N,
            self.forbidden_2M,
            self.logprobs_L,
            self.ranks_K,
        )

    @classmethod
    def from_tensors(cls, tensors: Sequence[Tensor]) -> SamplingInputs:
        """The inverse of to_tensors."""
        return cls(*tensors)

    @property
    def rows_S(self) -> Tensor:
        return self.integers_5S[0]


def _ragged(draws: Sequence[Draw]) -> tuple[Tensor, Tensor]:
    """penalized_3N and forbidden_2M."""
    penalized: list[list[int]] = [[], [], []]
    forbidden: list[list[int]] = [[], []]
    for sample, each in enumerate(draws):
        if each.output_counts:
            penalized[0].extend(repeat(sample, len(each.output_counts)))
            penalized[1].extend(each.output_counts.keys())
            penalized[2].extend(each.output_counts.values())
        if each.forbidden_token_ids:
            forbidden[0].extend(repeat(sample, len(each.forbidden_token_ids)))
            forbidden[1].extend(each.forbidden_token_ids)
    return torch.tensor(penalized, dtype=torch.int64), torch.tensor(forbidden, dtype=torch.int64)
