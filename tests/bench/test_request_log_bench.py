"""`flowrt bench log`: one graph with and without a request log in turns, and resumes of a log with open requests."""

from __future__ import annotations

from pathlib import Path

import pytest

from flowrt.bench.cases.case_options import DecodeOptions
from flowrt.bench.cases.log_cost import measure, read_graphs
from flowrt.bench.measure.benchmark import run_benchmark

QUICKSTART = Path(__file__).resolve().parents[2] / "examples" / "quickstart.yaml"
OPTIONS = DecodeOptions(batch=(4,), prompt_tokens=8, new_tokens=16, overrides=("deploy.processes=2", "numerics=strict"))


def test_graphs_differ_in_the_log_alone(tmp_path: Path) -> None:
    logged, plain = read_graphs(QUICKSTART, None, OPTIONS, tmp_path, synced=True)
    assert (logged.reliability.request_log, logged.reliability.request_log_sync) == (str(tmp_path / "log"), True)
    assert not plain.reliability.request_log
    assert plain.replace(reliability=logged.reliability) == logged


@pytest.mark.slow
def test_report_has_the_cost_and_the_time_of_a_resume(capsys: pytest.CaptureFixture[str]) -> None:
    report = run_benchmark("log", measure(QUICKSTART, None, OPTIONS, synced=False), 1)
    throughput, start, tokens = report.figures
    assert throughput.peer == "without"
    assert start.name == "start of the graph to the next token of 4 open requests"
    assert start.ours.median > tokens.ours.median > 0
    assert any("all 8 sequences equal" in note for note in report.notes)
