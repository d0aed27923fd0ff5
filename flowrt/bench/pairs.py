"""The statistics of a claimed difference: alternating pairs, the median ratio, its interval, and the verdict on a target. Pure.

Here: `median_ratio`, Ratio, Target, `verdict`, intervals of quantiles, and `take_turns`, which measures by pairs. Not here: what is
measured (one module per benchmark), how it is shown (report.py).

Two things measured on a shared machine drift together. So they are measured in turns, each pair gives one ratio, and what is claimed is
the median of the ratios with an interval that supposes nothing about their distribution.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

CONFIDENCE = 0.95
MIN_PAIRS = 20  # of a claim; fewer are for trying out

V = TypeVar("V")
Verdict = Literal["met", "not met", "not resolved"]


@dataclass(frozen=True)
class Ratio:
    """The median of ours / theirs over `num_pairs` pairs, and the interval that holds the true median in 95 of 100 such runs."""

    median: float
    low: float
    high: float
    num_pairs: int

    def __str__(self) -> str:
        bounded = math.isfinite(self.low)  # too few pairs bound nothing
        return f"{self.median:.2f} ({self.low:.2f} to {self.high:.2f})" if bounded else f"{self.median:.2f}"


@dataclass(frozen=True)
class Target:
    """What a ratio, or a figure, should be: at most `bound`, or at least."""

    bound: float
    at_most: bool = True

    def __str__(self) -> str:
        return f"{'<=' if self.at_most else '>='} {self.bound:g}"


def median_ratio(ours: Sequence[float], theirs: Sequence[float]) -> Ratio:
    """The ratio of pairs (ours[i], theirs[i]), all above zero. Raises ValueError for unequal lengths, none, or a value that is not."""
    if len(ours) != len(theirs) or not ours:
        raise ValueError(f"pairs need as many of ours as of theirs, at least one; got {len(ours)} and {len(theirs)}")
    if min(*ours, *theirs) <= 0:
        raise ValueError("a measured value must be above zero")
    ratios = [one / other for one, other in zip(ours, theirs, strict=True)]
    low, high = median_interval(ratios)
    return Ratio(statistics.median(ratios), low, high, len(ratios))


def median_interval(values: Sequence[float], confidence: float = CONFIDENCE) -> tuple[float, float]:
    """The interval between two of the sorted values that holds the true median with at least `confidence`.

    The number of values below the true median is binomial(n, 1/2), whatever the distribution (Conover, Practical Nonparametric
    Statistics, section 3.2). Fewer than six values cannot bound a median at 95 %: minus to plus infinity.
    """
    count = len(values)
    rank, outside = -1, 0.0
    while True:  # the largest rank k with P(fewer than k+1 on one side) * 2 <= 1 - confidence
        outside += 2 * math.comb(count, rank + 1) / 2**count
        if outside > 1 - confidence or rank + 1 >= count / 2:
            break
        rank += 1
    if rank < 0:
        return -math.inf, math.inf
    ordered = sorted(values)
    return ordered[rank], ordered[count - 1 - rank]


def quantile_interval(values: Sequence[float], share: float, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """As `median_interval`, of the value that `share` of all do not exceed: how many values lie below it is binomial(n, share).

    Values may be infinite. An end that so few values cannot bound is infinite: 368 are the fewest that bound a 99th percentile at 95 %.
    """
    count = len(values)
    at_most = [0.0]  # at_most[k]: P(fewer than k values lie below)
    for below in range(count + 1):
        ways = math.lgamma(count + 1) - math.lgamma(below + 1) - math.lgamma(count - below + 1)
        at_most.append(at_most[-1] + math.exp(ways + below * math.log(share) + (count - below) * math.log1p(-share)))
    tail = (1 - confidence) / 2
    low = max((rank for rank in range(1, count + 1) if at_most[rank] <= tail), default=0)
    high = min((rank for rank in range(1, count + 1) if at_most[rank] >= 1 - tail), default=0)
    ordered = sorted(values)
    return ordered[low - 1] if low else -math.inf, ordered[high - 1] if high else math.inf


def verdict(ratio: Ratio, target: Target) -> Verdict:
    """Met when the whole interval is inside the target, not met when it is outside, not resolved when it straddles it."""
    return judge(ratio.low, ratio.high, target)


def judge(low: float, high: float, target: Target) -> Verdict:
    """As `verdict`, of an interval of any figure."""
    inside = high <= target.bound if target.at_most else low >= target.bound
    outside = low > target.bound if target.at_most else high < target.bound
    return "met" if inside else "not met" if outside else "not resolved"


def order_of(pair: int, num_sides: int = 2) -> list[int]:
    """In which order the sides are measured in pair number `pair`: each is first equally often."""
    first = pair % num_sides
    return [*range(first, num_sides), *range(first)]


async def take_turns(measures: Sequence[Callable[[], Awaitable[V]]], num_pairs: int) -> list[list[V]]:
    """Measure two things (or more, each of which makes pairs with each other) in turns, `num_pairs` times each after one round that
    is not counted. Returns what each gave, in order."""
    for measure in measures:
        await measure()
    values: list[list[V]] = [[] for _ in measures]
    for pair in range(num_pairs):
        for side in order_of(pair, len(measures)):
            values[side].append(await measures[side]())
    return values
