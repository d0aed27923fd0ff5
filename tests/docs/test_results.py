"""docs/results.md is the rendering of docs/results/*.json, whose figures are complete."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from docs.blocks import ROOT, pages

sys.path.insert(0, str(ROOT / "docs"))
import render_results

FILES = sorted((ROOT / "docs" / "results").glob("*.json"))


def test_the_page_is_the_rendering_of_the_files() -> None:
    assert render_results.PAGE.read_text(encoding="utf-8") == render_results.rendered(), "run: python docs/render_results.py"


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_each_run_has_its_commit_date_and_complete_figures(file: Path) -> None:
    result = json.loads(file.read_text(encoding="utf-8"))
    assert result["benchmark"] == file.stem
    assert render_results.file_text(result) == file.read_text(encoding="utf-8")
    for run in result["runs"]:
        assert run.keys() <= {"title", "command", "commit", "date", "processor", "state", "note", "columns", "figures"}
        assert re.fullmatch(r"[0-9a-f]{7,12}", run["commit"])
        assert re.fullmatch(r"\d{4}-\d\d-\d\d", run["date"])
        for figure in run["figures"]:
            assert len(figure["found"]) == len(run["columns"]), figure["figure"]
            for found in figure["found"]:
                assert found.keys() <= {"value", "interval", "target", "verdict"}
                verdicts = found.get("verdict", "met").split(", ")
                assert set(verdicts) <= {"met", "not met", "undecided"}, figure["figure"]


def test_a_report_of_a_benchmark_becomes_a_run() -> None:
    def spread(median: float) -> dict[str, Any]:
        return {"median": median, "low": median - 0.05, "high": median + 0.05, "count": 20}

    figure = {"name": "hop", "unit": "us", "ours": spread(20), "peer": "echo", "theirs": spread(10), "ratio": spread(2), "about": {}}
    report = {
        "benchmark": "hop",
        "machine": {"cpu": "CPU", "cores": 2, "system": "Linux", "versions": {"torch": "2"}, "load_before": 0.1, "load_after": 0.2},
        "figures": [figure | {"target": {"bound": 1.5, "at_most": True}, "listed": True, "verdict": "not met"}, figure | {"listed": False}],
        "notes": ["a note"],
    }
    run = render_results.add(report, "0123abc", "2026-01-01", "flowrt bench hop")
    found = [{"value": "20.0 us"}, {"value": "10.0 us, echo"}, {"value": "2.00", "interval": "1.95 to 2.05", "verdict": "not met"}]
    assert run["figures"] == [{"figure": "hop", "target": "<= 1.5", "found": found}]
    assert (run["processor"], run["note"], run["columns"]) == ("2 cores of CPU", "a note", ["flowrt", "peer", "ratio"])


def test_figures_are_on_the_page_of_results_alone() -> None:
    """Elsewhere they would lack their machine and commit, and grow old unseen."""
    other = [page for page in pages() if page != "docs/results.md"]
    measured = re.compile(r"\d \([\d.]+ to [\d.]+\)|\*\*met\*\*|\*not met\*:?$|AMD EPYC|Intel Xeon")
    wrong = [
        f"{page}:{number}: {line[:80]}"
        for page in other
        for number, line in enumerate((ROOT / page).read_text(encoding="utf-8").split("\n"), 1)
        if measured.search(line)
    ]
    assert not wrong, "add it to docs/results (python docs/render_results.py --add), and link it"
