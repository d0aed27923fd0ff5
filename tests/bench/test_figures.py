"""Figures and their statistics, against distributions whose quantiles are known."""

from __future__ import annotations

import math
import random

import pytest

from flowrt.bench.report.figures import Figure, Target, median_interval, median_ratio, nearest_rank, quantile_interval, verdict_of


def test_median_of_twenty_values_is_bounded_by_the_sixth_from_either_end() -> None:
    assert median_interval(list(range(1, 21))) == (6, 15)  # the textbook's table: 95.9 %
    assert median_interval(list(range(1, 41))) == (14, 27)  # 96.2 %


def test_median_interval_takes_six_values() -> None:
    assert median_interval([3.0, 1.0, 2.0, 6.0, 5.0, 4.0]) == (1.0, 6.0)
    assert median_interval([1.0] * 5) == (-math.inf, math.inf)
    assert median_interval([]) == (-math.inf, math.inf)


def test_interval_of_a_99th_percentile_takes_368_values() -> None:
    assert quantile_interval([0.005] * 367, 0.99)[1] == math.inf
    assert quantile_interval([0.005] * 368, 0.99) == (0.005, 0.005)
    assert quantile_interval([0.005] * 400 + [9.0] * 20, 0.99) == (9.0, 9.0)  # one in twenty is beyond: so is the percentile
    assert quantile_interval([0.005] * 400 + [9.0] * 4, 0.99) == (0.005, 9.0)
    assert quantile_interval([math.inf] * 400, 0.99) == (math.inf, math.inf)
    assert quantile_interval([], 0.99) == (-math.inf, math.inf)


def test_quantile_interval_holds_the_quantile_as_often_as_its_confidence() -> None:
    chance = random.Random("p99")
    hits = 0
    for _ in range(500):
        low, high = quantile_interval([chance.random() for _ in range(600)], 0.99)
        hits += low <= 0.99 <= high
    assert hits / 500 >= 0.94


@pytest.mark.parametrize("draw", ["lognormal", "exponential", "two_humps"])
@pytest.mark.parametrize("count", [20, 41])
def test_median_interval_holds_the_median_as_often_as_its_confidence(draw: str, count: int) -> None:
    """Whatever the distribution: 2000 samples from ones whose median is known, of which at least 95 % (less noise) must be hit."""
    chance = random.Random(f"{draw} {count}")
    draws = {
        "lognormal": (lambda: chance.lognormvariate(0.0, 1.5), 1.0),
        "exponential": (lambda: chance.expovariate(1.0), math.log(2)),
        "two_humps": (lambda: chance.gauss(1.0, 0.2) if chance.random() < 0.5 else chance.gauss(9.0, 0.2), None),
    }
    one, median = draws[draw]
    hits = 0
    for _ in range(2000):
        low, high = median_interval([one() for _ in range(count)])
        hits += low <= (median if median is not None else 5.0) <= high
    assert hits / 2000 >= 0.945
    assert hits / 2000 <= 0.99  # nor wider than necessary


def test_ratio_is_of_pairs_and_not_of_medians() -> None:
    """Load that slows both of a pair alike changes nothing."""
    chance = random.Random(7)
    load = [chance.uniform(1.0, 20.0) for _ in range(40)]
    ratio = median_ratio([3.0 * each for each in load], [2.0 * each for each in load])
    assert ratio.median == pytest.approx(1.5)
    assert (ratio.low, ratio.high) == pytest.approx((1.5, 1.5))
    assert ratio.count == 40


@pytest.mark.parametrize(("ours", "theirs"), [([], []), ([1.0], [1.0, 2.0]), ([1.0, 0.0], [1.0, 1.0]), ([1.0], [-1.0])])
def test_invalid_pairs_are_refused(ours: list[float], theirs: list[float]) -> None:
    with pytest.raises(ValueError):
        median_ratio(ours, theirs)


def test_target_is_met_only_by_the_whole_interval() -> None:
    at_most, at_least = Target(1.5), Target(0.5, at_most=False)
    assert verdict_of(1.0, 1.5, at_most) == "met"
    assert verdict_of(1.0, 1.6, at_most) == "undecided"
    assert verdict_of(1.6, 2.2, at_most) == "not met"
    assert verdict_of(0.5, 0.7, at_least) == "met"
    assert verdict_of(0.4, 0.6, at_least) == "undecided"
    assert verdict_of(0.2, 0.4, at_least) == "not met"
    assert verdict_of(-math.inf, math.inf, at_most) == "undecided"


def test_target_holds_for_the_ratio_to_a_peer_or_the_figure_itself() -> None:
    pairs = [float(number) for number in range(1, 21)]
    hop = Figure.paired("hop", "us", [2 * each for each in pairs], "a peer", pairs, Target(1.5))
    assert hop.ratio is not None
    assert (hop.ratio.median, hop.verdict) == (2.0, "not met")
    assert Figure.alone("start", "s", [4.0] * 6, Target(5.0)).verdict == "met"
    assert Figure.alone("too few values", "s", [4.0], Target(5.0)).verdict == "undecided"
    assert Figure.alone("without a target", "s", [1.0] * 6).verdict is None


def test_nearest_rank_is_one_of_the_values() -> None:
    values = [float(number) for number in range(100, 0, -1)]
    assert (nearest_rank(values, 0.99), nearest_rank(values, 0.5), nearest_rank([3.0], 0.99)) == (99.0, 50.0, 3.0)
