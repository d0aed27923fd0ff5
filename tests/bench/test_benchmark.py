"""`run_benchmark`: turns, repeats of undecided verdicts, figures and their statistics, and what the report has. No time is asserted."""

from __future__ import annotations

import asyncio
import io
import json
import math
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
from rich.console import Console

from flowrt.bench.measure.benchmark import Results, Trial, measure_trial, run_benchmark, seconds_per_call, turn_order
from flowrt.bench.report.figures import Figure, Target, median_interval, median_ratio, nearest_rank, quantile_interval, verdict_of
from flowrt.bench.report.report import BenchmarkReport, Machine, ReportSection, print_report
from flowrt.errors import UserError
from flowrt.system.output_file import json_text, write_file

MACHINE = Machine("a processor", 2, "Linux 6", {"python": "3.11"}, 0.5, 0.75)


def test_each_side_goes_first_equally_often() -> None:
    assert [turn_order(pair)[0] for pair in range(4)] == [0, 1, 0, 1]
    assert all(sorted(turn_order(pair, 3)) == [0, 1, 2] for pair in range(4))


async def test_turns_alternate_and_the_first_round_is_not_counted() -> None:
    calls: list[str] = []

    async def measure(name: str) -> float:
        calls.append(name)
        return float(len(calls))

    trial = Trial((lambda: measure("a"), lambda: measure("b")), lambda values: [])
    await measure_trial(trial, 4)
    assert "".join(calls) == "ab" + "abba" * 2
    assert trial.values == [[3.0, 6.0, 7.0, 10.0], [4.0, 5.0, 8.0, 9.0]]


@pytest.mark.parametrize(
    ("num_pairs", "bound", "verdict", "measured"),
    [(20, 1.5, "undecided", 100), (20, 3.0, "met", 20), (20, 0.5, "not met", 20), (19, 1.5, "undecided", 19)],
    ids=["an undecided claim is repeated", "met", "not met", "too few pairs for a claim"],
)
async def test_an_open_claim_is_repeated_with_up_to_100_pairs(num_pairs: int, bound: float, verdict: str, measured: int) -> None:
    """Ratios of 1 and 2 in turn: their interval lies on both sides of 1.5."""
    ours: list[float] = []

    async def measure_ours() -> float:
        ours.append(1.0 + len(ours) % 2)
        return ours[-1]

    async def measure_theirs() -> float:
        return 1.0

    (figure,) = await measure_trial(Trial.paired("a figure", "us", measure_ours, "a peer", measure_theirs, Target(bound)), num_pairs)
    assert figure.ratio is not None
    assert (figure.verdict, figure.ratio.count, len(ours)) == (verdict, measured, measured + 1)


async def test_a_call_is_measured_at_least_once() -> None:
    calls = []

    async def call() -> None:
        calls.append(1)

    assert await seconds_per_call(call) > 0
    assert calls


def test_what_a_case_opened_stays_open_while_its_trial_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    is_open = False

    async def measure_while_open() -> float:
        assert is_open
        return 2.0

    async def measure() -> Results:
        nonlocal is_open
        is_open = True
        try:
            trial = Trial([measure_while_open], lambda values: [Figure.alone("both", "s", values[0])])
            yield trial
            yield ReportSection("values", trial.values[0])
            yield "a peer is not installed"
        finally:
            is_open = False

    report = run_benchmark("test", measure(), 6, str(tmp_path / "figures.json"), {"graph": "a.yaml"})
    assert not is_open
    assert [figure.name for figure in report.figures] == ["both"]
    record = json.loads((tmp_path / "figures.json").read_text())
    assert record["details"] == {"graph": "a.yaml", "values": [2.0] * 6}
    assert record["notes"] == ["a peer is not installed"]
    assert record["machine"]["cores"] >= 1
    assert "python" in record["machine"]["versions"]
    assert "note: a peer is not installed" in capsys.readouterr().out


def test_what_a_case_opened_is_closed_by_the_same_task_when_a_trial_fails() -> None:
    """A group of tasks or a timeout cannot be left by another one."""
    closed_by_same: list[bool] = []

    async def fail() -> float:
        raise UserError("no token came")

    async def measure() -> Results:
        task = asyncio.current_task()
        try:
            yield Trial([fail], lambda values: [])
        finally:
            closed_by_same.append(asyncio.current_task() is task)

    with pytest.raises(UserError, match="no token came"):
        run_benchmark("test", measure(), 6)
    assert closed_by_same == [True]


def figures() -> Sequence[Figure]:
    pairs = [float(number) for number in range(1, 21)]
    return [
        Figure.paired("hop", "us", [2 * each for each in pairs], "a peer", pairs, Target(1.5)),
        Figure.alone("start", "s", [4.0] * 6, Target(5.0)),
        Figure.alone("too few values", "s", [4.0], Target(5.0)),
        Figure("only in the JSON", "s", Figure.alone("", "s", [4.0]).ours, listed=False),
        Figure.paired("without a unit", "", [4.0], "another", [5.0]),
    ]


def test_table_has_figures_verdicts_machine_and_load() -> None:
    out = io.StringIO()
    print_report(BenchmarkReport("hop", MACHINE, figures(), notes=["shm: no compiler"]), Console(file=out, width=160))
    text = out.getvalue()
    expected = (
        "2.00 (2.00 to 2.00)",
        "<= 1.5",
        "not met",
        "10.5 us, a peer",
        "5.00, another",
        "shm: no compiler",
        "2 cores of a processor",
    )
    assert all(each in text for each in expected)
    assert "load 0.5 before, 0.8 after" in text
    assert "inf" not in text
    assert "only in the JSON" not in text


def test_json_has_every_figure_and_no_infinity(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    write_file(str(path), json_text(BenchmarkReport("hop", MACHINE, figures()).record()))
    read = json.loads(path.read_text(), parse_constant=pytest.fail)
    assert read["machine"]["load_after"] == 0.75
    assert [figure["verdict"] for figure in read["figures"]] == ["not met", "met", "undecided", None, None]
    assert read["figures"][0]["ratio"] == {"median": 2.0, "low": 2.0, "high": 2.0, "count": 20}
    assert read["figures"][2]["ours"]["low"] is None


def test_a_file_that_cannot_be_written_is_a_user_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be written"):
        write_file(str(tmp_path / "no" / "such.json"), "")


# --- statistics, against distributions whose quantiles are known -----------------------------------------------------------------


def test_median_of_twenty_values_is_bounded_by_the_sixth_from_either_end_and_takes_six_values() -> None:
    assert median_interval(list(range(1, 21))) == (6, 15)  # the textbook's table: 95.9 %
    assert median_interval(list(range(1, 41))) == (14, 27)  # 96.2 %
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


def test_nearest_rank_is_one_of_the_values() -> None:
    values = [float(number) for number in range(100, 0, -1)]
    assert (nearest_rank(values, 0.99), nearest_rank(values, 0.5), nearest_rank([3.0], 0.99)) == (99.0, 50.0, 3.0)
