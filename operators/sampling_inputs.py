"""Holds how the tokens of a step are drawn, as tensors that the engine sends to the worker that ends the step.

`Draw` holds the settings of one token as plain numbers, `SamplingInputs` those of all tokens of a step.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from itertools import repeat
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_NONE = torch.zeros(0, dtype=torch.int64)
_NO_MASK = torch.zeros(0, 0, dtype=torch.uint8)


class Draw(NamedTuple):
    """The row of logits and the sampling parameters of one token.

    temperature 0 is greedy; top_k 0, top_p 1, min_p 0, and the penalties' defaults are off.

    `output_counts` is for penalties: each token of prompt and output -> how often it is in the output. `num_logprobs` None: no
    logprobs; else how many of the likeliest tokens are wanted beside the drawn one. `logit_bias`: (token id, what is added to its logit).
    `allowed_B`: a bit per token that may be drawn, the least significant first; None: all.
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
    logit_bias: Sequence[tuple[int, float]] = ()
    min_p: float = 0.0
    allowed_B: NDArray[np.uint8] | None = None


class Score(NamedTuple):
    """A token of a prompt whose logprob is wanted, and the row of logits for its place. `num_logprobs`: as in Draw."""

    row: int
    token_id: int
    num_logprobs: int


class SamplingInputs(NamedTuple):
    """The tensors that are sent, in this order. S = samples.

    Settings that only some samples use have their own length, 0 if unused, so that the host does not wait for a device.

    `integers_5S` int64: row, top_k, seed, choice (which of a request's outputs), token index (in that output).
    `floats_6S` float64: temperature, top_p, repetition, presence and frequency penalty, min_p.
    `unfiltered_U`, `filtered_F` int64: samples drawn from all tokens, and those with top_k, top_p or min_p; the others are greedy.
    `penalized_3N` int64: sample, token id, occurrences in the output; pairs of sample and id are all different.
    `biased_2C` int64: sample, token id, all different; `bias_C` float64: -inf for forbidden tokens.
    `masked_M` int64: samples that may not be any token; `allowed_MB` uint8: as Draw.allowed_B.
    `logprobs_L` int64: samples whose logprobs are wanted; `ranks_K`: of 0 .. K-1.
    `scored_2G` int64: row, token id: tokens of prompts whose logprobs are wanted, behind those of the samples.
    """

    integers_5S: Tensor
    floats_6S: Tensor
    unfiltered_U: Tensor
    filtered_F: Tensor
    penalized_3N: Tensor
    biased_2C: Tensor
    bias_C: Tensor
    masked_M: Tensor
    allowed_MB: Tensor
    logprobs_L: Tensor
    ranks_K: Tensor
    scored_2G: Tensor

    @classmethod
    def from_draws(cls, draws: Sequence[Draw], device: torch.device | str = "cpu", scores: Sequence[Score] = ()) -> SamplingInputs:
        """The tensors of these draws and scores, in order."""
        fields: list[tuple[Any, ...]] = list(zip(*draws, strict=True)) if draws else [()] * len(Draw._fields)
        row, temperature, top_k, top_p, seed, choice, token_index, repetition, presence, frequency = fields[:10]
        num_logprobs, counts, ids, biases, min_p, allowed = fields[10:]
        unfiltered: list[int] = []
        filtered: list[int] = []
        if any(temperature):
            for sample, each in enumerate(draws):
                if each.temperature > 0:
                    (filtered if each.top_k > 0 or each.top_p < 1 or each.min_p > 0 else unfiltered).append(sample)
        biased = [{**dict(bias), **dict.fromkeys(forbidden, -math.inf)} for bias, forbidden in zip(biases, ids, strict=True)]
        wanted = [sample for sample, number in enumerate(num_logprobs) if number is not None]
        masks = [(sample, mask) for sample, mask in enumerate(allowed) if mask is not None]
        max_logprobs = max((number for number in (*num_logprobs, *(each.num_logprobs for each in scores)) if number is not None), default=0)
        tensors = (
            torch.tensor(row + top_k + seed + choice + token_index, dtype=torch.int64).view(5, -1),
            torch.tensor(temperature + top_p + repetition + presence + frequency + min_p, dtype=torch.float64).view(6, -1),
            _NONE if not unfiltered else torch.tensor(unfiltered),
            _NONE if not filtered else torch.tensor(filtered),
            _penalized(counts) if any(counts) else _NONE.view(3, 0),
            torch.tensor([(sample, each) for sample, bias in enumerate(biased) for each in bias], dtype=torch.int64).view(-1, 2).t(),
            torch.tensor([value for bias in biased for value in bias.values()], dtype=torch.float64),
            torch.tensor([sample for sample, _ in masks]) if masks else _NONE,
            torch.from_numpy(np.stack([mask for _, mask in masks])) if masks else _NO_MASK,
            _NONE if not wanted else torch.tensor(wanted),
            _NONE if not max_logprobs else torch.arange(max_logprobs),
            torch.tensor([(each.row, each.token_id) for each in scores]).t() if scores else _NONE.view(2, 0),
        )
        return cls(*(tensor.to(device) for tensor in tensors))

    @property
    def rows_S(self) -> Tensor:
        return self.integers_5S[0]


def _penalized(counts: Sequence[Mapping[int, int] | None]) -> Tensor:
    """penalized_3N."""
    columns: tuple[list[int], list[int], list[int]] = ([], [], [])
    for sample, each in enumerate(counts):
        if each:
            columns[0].extend(repeat(sample, len(each)))
            columns[1].extend(each.keys())
            columns[2].extend(each.values())
    return torch.tensor(columns[0] + columns[1] + columns[2]).view(3, -1)
