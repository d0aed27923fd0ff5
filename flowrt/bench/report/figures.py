"""Figures and their statistics: medians, their 95 % intervals, ratios of pairs, targets and verdicts. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Self

CONFIDENCE = 0.95
MIN_VALUES_OF_P99 = 100  # of fewer the 99th percentile is the worst
MIN_VALUES_OF_VERDICT = 6  # on times: fewer bound not even a median
MIN_PAIRS, MAX_PAIRS = 20, 100  # of a claim: fewer are for trying out; an undecided one is tried with MAX_PAIRS

Verdict = Literal["met", "not met", "undecided"]


@dataclass(frozen=True)
class Target:
    """What a ratio, or a figure without a peer, should be: at most `bound`, or at least."""

    bound: float
    at_most: bool = True

    def __str__(self) -> str:
        return f"{'<=' if self.at_most else '>='} {self.bound:g}"


@dataclass(frozen=True)
class Spread:
    """The median of repeated measurements and its 95 % interval; infinite when too few values bound nothing."""

    median: float
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Self:
        return cls(statistics.median(values), *median_interval(values), len(values))

    def text(self, unit: str = "") -> str:
        median = f"{format_amount(self.median)} {unit}".rstrip()
        return f"{median} ({format_amount(self.low)} to {format_amount(self.high)})" if math.isfinite(self.low) else median


@dataclass(frozen=True)
class Figure:
    """One published number: `ours` in `unit`, and `theirs` of `peer` where it was measured in alternating pairs.

    `target` holds for the ratio if there is a peer, else for `ours`. `about` has what a program would otherwise parse out of the name.
    """

    name: str
    unit: str
    ours: Spread
    peer: str | None = None
    theirs: Spread | None = None
    ratio: Spread | None = None
    target: Target | None = None
    about: Mapping[str, Any] = field(default_factory=dict)
    listed: bool = True  # False: in the JSON and the plots, not in the table

    @classmethod
    def paired(
        cls, name: str, unit: str, ours: Sequence[float], peer: str, theirs: Sequence[float], target: Target | None = None, **about: Any
    ) -> Self:
        return cls(name, unit, Spread.of(ours), peer, Spread.of(theirs), median_ratio(ours, theirs), target, about)

    @classmethod
    def alone(cls, name: str, unit: str, values: Sequence[float], target: Target | None = None, **about: Any) -> Self:
        return cls(name, unit, Spread.of(values), target=target, about=about)

    @property
    def verdict(self) -> Verdict | None:
        """Judges the figure; None without a target."""
        spread = self.ratio or self.ours
        return verdict_of(spread.low, spread.high, self.target) if self.target is not None else None

    def as_json(self) -> dict[str, Any]:
        return {**vars(self), "verdict": self.verdict}


def median_ratio(ours: Sequence[float], theirs: Sequence[float]) -> Spread:
    """The ratios of the pairs (ours[i], theirs[i]). Raises ValueError for unequal lengths, no pairs, or a value that is not above zero."""
    if len(ours) != len(theirs) or not ours:
        raise ValueError(f"pairs need two sequences of one length, at least 1; got {len(ours)} and {len(theirs)}")
    if min(*ours, *theirs) <= 0:
        raise ValueError("a measured value must be above zero")
    return Spread.of([one / other for one, other in zip(ours, theirs, strict=True)])


def median_interval(values: Sequence[float], confidence: float = CONFIDENCE) -> tuple[float, float]:
    """The interval between two of the sorted values that holds the true median with at least `confidence`."""
    return quantile_interval(values, 0.5, confidence)


def quantile_interval(values: Sequence[float], share: float, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """The interval between two of the sorted values that holds the quantile `share` with at least `confidence`.

    The number of values below the quantile is binomial(n, share), whatever the distribution (Conover, Practical Nonparametric Statistics,
    section 3.2). An end that so few values cannot bound is infinite: a median takes 6 values, a 99th percentile 368.
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


def tail_interval(values: Sequence[float], num_independent: int) -> tuple[float, float]:
    """The interval of the 99th percentile of times, of which so many are independent; of few it bounds nothing."""
    return quantile_interval(values, 0.99) if num_independent >= MIN_VALUES_OF_VERDICT else (-math.inf, math.inf)


def nearest_rank(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of all values do not exceed."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def verdict_of(low: float, high: float, target: Target) -> Verdict:
    """Met when the whole interval is inside the target, not met when it is outside, undecided when it straddles the bound."""
    inside = high <= target.bound if target.at_most else low >= target.bound
    outside = low > target.bound if target.at_most else high < target.bound
    return "met" if inside else "not met" if outside else "undecided"


def format_amount(value: float) -> str:
    """Three figures, as the tables have them."""
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"
