"""Figures, their verdicts, and what of them is shown and written. No time is measured here."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from flowrt.bench.pairs import Target, take_turns
from flowrt.bench.report import Figure, Machine, Report, print_report, write_report
from flowrt.errors import UserError

MACHINE = Machine("a processor", 2, "Linux 6", {"python": "3.11"}, 0.5, 0.75)


def figures() -> list[Figure]:
    pairs = [float(number) for number in range(1, 21)]
    return [
        Figure.paired("hop", "us", [2 * each for each in pairs], "a peer", pairs, Target(1.5)),
        Figure.alone("start", "s", [4.0] * 6, Target(5.0)),
        Figure.alone("too few to say", "s", [4.0], Target(5.0)),
    ]


def test_a_figure_with_a_peer_is_judged_by_its_ratio_and_one_without_by_itself() -> None:
    hop, start, few = figures()
    assert hop.ratio is not None
    assert hop.ratio.median == 2.0
    assert (hop.verdict, start.verdict, few.verdict) == ("not met", "met", "not resolved")
    assert Figure.alone("without a target", "s", [1.0] * 6).verdict is None


def test_the_table_says_figure_verdict_machine_and_load() -> None:
    out = io.StringIO()
    print_report(Report("hop", MACHINE, figures(), notes=["shm: no compiler"]), Console(file=out, width=160))
    text = out.getvalue()
    assert all(
        word in text for word in ("2.00 (2.00 to 2.00)", "<= 1.5", "not met", "a peer", "shm: no compiler", "2 cores of a processor")
    )
    assert "load 0.5 before, 0.8 after" in text
    assert "inf" not in text


def test_the_json_holds_all_of_it_and_no_infinity(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    write_report(str(path), Report("hop", MACHINE, figures()))
    read = json.loads(path.read_text(), parse_constant=pytest.fail)
    assert read["machine"]["load_after"] == 0.75
    assert [figure["verdict"] for figure in read["figures"]] == ["not met", "met", "not resolved"]
    assert read["figures"][0]["ratio"] == {"median": 2.0, "low": 2.0, "high": 2.0, "num_pairs": 20}
    assert read["figures"][2]["ours"]["low"] is None


def test_a_file_that_cannot_be_written_is_the_users_to_mend(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be written"):
        write_report(str(tmp_path / "no" / "such.json"), Report("hop", MACHINE, []))


async def test_turns_alternate_and_the_first_round_is_not_counted() -> None:
    calls: list[str] = []

    async def measure(name: str) -> float:
        calls.append(name)
        return float(len(calls))

    values = await take_turns((lambda: measure("a"), lambda: measure("b")), 4)
    assert "".join(calls) == "ab" + "abba" * 2
    assert values == [[3.0, 6.0, 7.0, 10.0], [4.0, 5.0, 8.0, 9.0]]


def test_this_machine_can_be_described() -> None:
    machine = Machine.here()
    assert machine.cores >= 1
    assert machine.cpu
    assert "python" in machine.versions
