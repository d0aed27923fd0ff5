"""Composes the batch of a step to a target time (MegaScale-Infer section 8). Pure: times of steps in, numbers of rows out.

The time of a step is modelled as a sum: a fixed part, a part per row, and a part per token of context. The factors are fitted to the times
that steps of each size have taken in this group, so they hold for its model, its machine and its links. Groups with equal targets then have
steps of equal time whatever their contexts are, and a prompt delays the tokens of other sequences by a known time.
"""

from __future__ import annotations

import math
from collections.abc import Collection

import numpy as np

from flowrt.costs.fit import fit_factors
from flowrt.graph.settings import ComputeCost

WEIGHT_OF_LATEST = 0.25  # in the mean time of steps of a size
FIT_STEPS = 16  # from one fit to the next, unless a step has a new size
MIN_PROMPT_ROWS = 16  # of a prompt in each step: it advances even if decoding alone takes longer than the target
MIN_GAIN = 0.999  # of a fit with one more factor

_Size = tuple[float, float, float]  # rows, tokens of context, seconds


class StepTimes:
    """What steps have cost. `cost` is None before the first one."""

    def __init__(self) -> None:
        self.cost: ComputeCost | None = None
        self._means: dict[tuple[int, int], _Size] = {}  # of steps of similar size
        self._num_steps = 0

    def observe(self, num_rows: int, num_kv_tokens: int, seconds: float) -> None:
        """A step of so many rows, whose sequences have so many tokens of context together, took so long."""
        if seconds <= 0:
            return
        size, new = (_bucket(num_rows), _bucket(num_kv_tokens)), (float(num_rows), float(num_kv_tokens), seconds)
        known = self._means.get(size)
        self._means[size] = new if known is None else _mean(known, new)
        self._num_steps += 1
        if known is None or self._num_steps % FIT_STEPS == 0:
            self.cost = fit(self._means.values())


class StepBudget:
    """The rows that a step may still take: at most `num_rows`, and those that it computes in `target_seconds` (0: no target)."""

    def __init__(self, num_rows: int, target_seconds: float, cost: ComputeCost | None, chunk_tokens: int = 0) -> None:
        self.num_rows = num_rows
        self.has_target = target_seconds > 0
        self._cost = cost or ComputeCost()
        fixed = self._cost.fixed_seconds
        self._seconds = max(target_seconds - fixed, fixed) if self.has_target else math.inf  # no step is mostly its fixed part
        self._min_prompt_rows = max(MIN_PROMPT_ROWS, chunk_tokens)

    def has_room(self, num_kv_tokens: int) -> bool:
        """Whether a row of a sequence with so many tokens of context is within the target."""
        return self._cost.row_seconds + self._cost.kv_token_seconds * num_kv_tokens <= self._seconds

    def num_prompt_rows(self, num_computed_tokens: int) -> int:
        """The most rows of a prompt of which so many tokens are computed."""
        row_seconds = self._cost.row_seconds + self._cost.kv_token_seconds
        left = self._seconds - self._cost.kv_token_seconds * num_computed_tokens
        if not row_seconds or math.isinf(left):
            return self.num_rows
        return min(self.num_rows, max(self._min_prompt_rows, math.floor(left / row_seconds)))

    def take(self, num_rows: int, num_kv_tokens: int) -> None:
        """Take rows of a sequence that has so many tokens of context with them."""
        self.num_rows -= num_rows
        self._seconds -= self._cost.row_seconds * num_rows + self._cost.kv_token_seconds * num_kv_tokens
        if num_rows > 1:
            self._min_prompt_rows = 0  # one prompt has advanced


def fit(sizes: Collection[_Size]) -> ComputeCost:
    """The factors that explain these times. Rows come first: a group whose steps are all alike learns what a row costs."""
    rows, context, seconds = (np.array(column) for column in zip(*sizes, strict=True))
    terms = np.stack([rows, context, np.ones(len(rows))], axis=1)
    row_seconds, kv_token_seconds, fixed_seconds = fit_factors(terms, seconds, MIN_GAIN)
    return ComputeCost(fixed_seconds=fixed_seconds, row_seconds=row_seconds, kv_token_seconds=kv_token_seconds)


def _mean(known: _Size, new: _Size) -> _Size:
    rows, context, seconds = (before + WEIGHT_OF_LATEST * (after - before) for before, after in zip(known, new, strict=True))
    return rows, context, seconds


def _bucket(number: int) -> int:
    """Two to each doubling."""
    return round(2 * math.log2(number + 1))
