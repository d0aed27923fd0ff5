"""How rows spread over experts and servers: how many experts a batch touches, and the rows of the heaviest server. Pure.

`chances`, float64[E]: for each expert the chance that a token chooses it; they add up to the active experts of a token.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.floating[Any]]


def touched_experts(num_experts: float, active: float, rows: float) -> float:
    """E (1 - (1 - k / E)^m): the experts that a batch of `rows` tokens touches when all are equally likely (EPS-MoE, section III-B)."""
    return num_experts * -math.expm1(rows * math.log1p(-active / num_experts)) if active < num_experts else num_experts * (rows > 0)


def touched(chances: Floats, rows: float) -> float:
    """The same for experts of different chances."""
    with np.errstate(divide="ignore"):
        return float(-np.expm1(rows * np.log1p(-np.minimum(chances, 1.0))).sum()) if rows else 0.0


def power_law_chances(num_experts: int, active: int, exponent: float) -> Floats:
    """Chances of experts by rank: that of the i-th busiest falls as i^-exponent; no token chooses an expert twice, so none exceeds 1.

    Exponent 0: all equal. At 0.9 the top 20 % of 128 experts take 65 % of rows (Qwen3-235B), and of 256 experts the hottest has 30 times
    the mean while 20 % exceed it (DeepSeek-R1 on ShareGPT, xDeepServe section 4.5).
    """
    return chances_of_counts(np.arange(1, num_experts + 1, dtype=np.float64) ** -exponent, active)


def chances_of_counts(counts: Sequence[float] | Floats, active: int) -> Floats:
    """Chances in proportion to measured counts of rows by expert, at most 1 each: what exceeds 1 goes to the others."""
    weights = np.asarray(counts, dtype=np.float64)
    if not (np.isfinite(weights).all() and (weights >= 0).all() and weights.sum() > 0 and 0 < active <= len(weights)):
        raise ValueError(f"counts must be finite, none below 0 and not all 0, for at least {active} experts")
    full = np.zeros(len(weights), dtype=bool)
    while True:
        left = weights[~full].sum()
        if not left:  # fewer experts have counts than a token chooses
            return np.where(full, 1.0, (active - full.sum()) / max(1, (~full).sum()))
        chances = np.where(full, 1.0, weights * (active - full.sum()) / left)
        over = chances > 1.0
        if not over.any():
            return chances
        full |= over


def server_chances(chances: Floats, placement: Iterable[Sequence[int]]) -> Floats:
    """float64[servers]: mean rows of each server per token. `placement`: the experts that each server holds; the rows of an expert are
    split evenly over its replicas."""
    held = [np.asarray(experts, dtype=np.intp) for experts in placement]
    replicas = np.bincount(np.concatenate(held), minlength=len(chances))
    share = chances / np.maximum(1, replicas)
    return np.array([share[experts].sum() for experts in held])


def heaviest_rows(means: Floats) -> float:
    """The expected rows of the heaviest of servers whose rows have these means. Rows come by chance, so they vary by about the root of
    their mean: with equal means the result is what chance alone adds to a perfect placement."""
    if len(means) < 2 or means.max() <= 0:
        return float(means.max(initial=0.0))
    distinct, numbers = np.unique(means, return_counts=True)
    deviations = np.sqrt(np.maximum(distinct, 1e-12))
    least, most = float(distinct[-1]) - 4 * float(deviations[-1]), float(distinct[-1]) + 6 * float(deviations[-1])
    grid = np.linspace(max(0.0, least), most, 256)
    below = (_normal_below((grid[:, None] - distinct) / deviations) ** numbers).prod(axis=1)  # the chance that no server has more
    return most - float(((below[1:] + below[:-1]) / 2 * np.diff(grid)).sum())


@cache
def largest_of(count: int) -> float:
    """The mean of the largest of so many standard normal numbers; 0.0 for one."""
    grid = np.linspace(-6.0, 9.0, 512)
    below = _normal_below(grid) ** count
    return float(grid[-1]) - float(((below[1:] + below[:-1]) / 2 * np.diff(grid)).sum()) if count > 1 else 0.0


def _normal_below(x: Floats) -> Floats:
    """The distribution function of a standard normal number, to 0.0003 (Page 1977): quicker than erf, for many servers and layers."""
    return 0.5 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
