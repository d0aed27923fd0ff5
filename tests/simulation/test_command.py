"""`flowrt simulate`: its options, and its errors for invalid input."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from simulation.simulate_command import simulate

REPOSITORY = Path(__file__).resolve().parents[2]
GRAPHS = Path(__file__).resolve().parent / "graphs"


def test_a_bad_graph_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text("flowrt: 1\nnonsense: 2\n")
    command = [sys.executable, "-m", "flowrt", "simulate", str(tmp_path / "bad.yaml")]
    outcome = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert outcome.returncode == 2
    assert "nonsense" in outcome.stderr
    assert len(outcome.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "expected_text"),
    [
        (["{empty}"], "no *.yaml in it"),
        (["{graph}", "--scenario", "{empty}/none.yaml"], "no such file; give the path of a scenario file"),
        (["{graph}", "--scenario", "{scenario}"], "scenario.yaml:3: faults.0: no process is called 'experts.9'"),
        (["{graph}", "--keep-faults", "one"], "'one' is not a list of numbers"),
        (["{graph}", "--record", "{scenario}"], "is not a record of seeds"),
        (["{graph}", "--record", "{empty}/new", "--calm"], "--record is for whole seeds"),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], expected_text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "scenario.yaml").write_text("scenario: 1\nfaults:\n  - {fault: crash, process: experts.9}\n")
    places = {"empty": tmp_path / "empty", "graph": GRAPHS / "2x3.yaml", "scenario": tmp_path / "scenario.yaml"}
    assert simulate([argument.format(**places) for argument in arguments]) == 2
    printed = capsys.readouterr().err
    assert expected_text in printed
    assert len(printed.strip().splitlines()) == 1


def test_a_scenario_file_takes_the_place_of_drawn_faults(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "scenario.yaml"
    file.write_text("scenario: 1\nfaults:\n  - {fault: pause, process: attention.0, at_seconds: 0.001, for_seconds: 0.5}\n")
    assert simulate([str(GRAPHS / "2x3.yaml"), "--scenario", str(file), "--seeds", "2"]) == 0
    printed = capsys.readouterr().out
    assert "faults: pause 2\n" in printed
    assert "outcomes: tokens 2;" in printed


@pytest.mark.parametrize("options", [[], ["--weights"]])
def test_the_quickstart_graph_runs_as_the_docs_say(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Its dtype is float32; the exact model computes in float64."""
    assert simulate([str(REPOSITORY / "examples" / "quickstart.yaml"), "--seeds", "1", *options]) == 0
    assert "1 seeds, 0 failed" in capsys.readouterr().out


def test_weights_that_are_missing_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate([str(GRAPHS / "2x3.yaml"), "--seeds", "1", "--weights", "--no-shrink"]) == 1
    assert "holds no *.safetensors file" in capsys.readouterr().err


def test_a_recorded_range_goes_on_after_an_interruption(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = tmp_path / "seeds.jsonl"
    record.write_text('{"first":0,"seeds":4,"failed":[2]}\n')
    assert simulate([str(GRAPHS / "calls.yaml"), "--first", "3", "--seeds", "3", "--record", str(record)]) == 0
    assert record.read_text().splitlines()[1:] == ['{"first":4,"seeds":2,"failed":[]}']
    assert simulate([str(GRAPHS / "calls.yaml"), "--seeds", "6", "--record", str(record)]) == 1, "seed 2 has failed before"
    assert f"{record}: 6 seeds, failed: 2\n" in capsys.readouterr().out
