"""`run_benchmark`: turns, repeats of undecided verdicts, and what the report shows and contains. No time is asserted."""

from __future__ import annotations

import io
import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest
from rich.console import Console

from flowrt.bench.measure.benchmark import Result, Trial, measure_trial, run_benchmark, seconds_per_call, turn_order
from flowrt.bench.report.figures import Figure, Target
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

    async def measure() -> AsyncIterator[Result]:
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
