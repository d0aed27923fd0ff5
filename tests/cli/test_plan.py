"""flowrt plan and fleet: a plan becomes a graph that validate, sim and fleet accept; bad input is one line; nothing fits is exit 1."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from cli.conftest import flowrt_here, refusal
from library_checkpoints import small_config

TRAFFIC = "in=571,out=159,rate=4"


def words(model: str, **given: str | Path) -> list[str | Path]:
    options = {"hardware": "1xl40s", "traffic": TRAFFIC, "slo": "ttft=3s,itl=200ms"} | given
    return ["plan", model, *(part for name, value in options.items() for part in (f"--{name}", value))]


def numbers(value: Any) -> list[float]:
    if isinstance(value, dict | list):
        return [number for each in (value.values() if isinstance(value, dict) else value) for number in numbers(each)]
    return [float(value)] if isinstance(value, int | float) and not isinstance(value, bool) else []


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, dict[str, Any]]:
    """The graph file of a plan, what was printed, and the record."""
    folder = tmp_path_factory.mktemp("plan")
    done = flowrt_here(*words("mixtral-8x7b", out=folder / "graph.yaml", json=folder / "plan.json", objective="cost"))
    assert done.returncode == 0, done.stderr
    return folder / "graph.yaml", done.stdout, json.loads((folder / "plan.json").read_text())


def test_a_plan_prints_inputs_constants_ranks_and_levels(planned: tuple[Path, str, dict[str, Any]]) -> None:
    _, printed, record = planned
    for text in ("mixtral-8x7b: 93.4 GB", "8 x l40s;", "4 requests/s of 571 + 159 tokens", "constants ", "L3", "(L2)", "limited by"):
        assert text in printed
    assert record["level"] == "L3"
    assert record["plans"]
    assert all(math.isfinite(number) and number >= 0 for number in numbers(record))


def test_its_graph_has_its_provenance_and_is_valid(planned: tuple[Path, str, dict[str, Any]]) -> None:
    path, _, record = planned
    text = path.read_text()
    assert text.startswith(f"# Written by: {record['command']}\n")
    assert record["calibration"] in text
    done = flowrt_here("graph", "validate", path)
    assert done.returncode == 0, done.stderr


def test_sim_and_fleet_accept_its_graph(planned: tuple[Path, str, dict[str, Any]], tmp_path: Path) -> None:
    path, _, _ = planned
    done = flowrt_here("sim", path, "--traffic", TRAFFIC, "--requests", "8")
    assert done.returncode == 0, done.stderr
    day = tmp_path / "day.csv"
    day.write_text("hour,requests_per_second\n0,1\n12,9\n")
    done = flowrt_here("fleet", path, "--traffic", TRAFFIC, "--daily", day, "--lost", "1", "--json", tmp_path / "fleet.json")
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "fleet.json").read_text())
    assert [each["recovery"] for each in record["policies"]] == ["fine", "restart_role", "restart_all", "off"]
    assert all(math.isfinite(number) and number >= 0 for number in numbers(record))


def test_nothing_fits_is_exit_1_with_what_to_relax() -> None:
    done = flowrt_here(*words("mixtral-8x7b", slo="itl=1ms"))
    assert done.returncode == 1
    assert "nothing fits" in done.stdout
    assert "--slo itl: from 1.0 ms to " in done.stdout


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"model": "mixtral"}, "did you mean 'mixtral-8x"),
        ({"hardware": "l40"}, "did you mean 'l40s'"),
        ({"slo": "itl=50"}, "has no unit"),
        ({"traffic": "in=8,out=8,concurrency=2"}, "a plan needs requests per second"),
        ({"traffic": "in=30000,out=4000,rate=1"}, "a request has 30000 + 4000 tokens, and the model takes 32768"),
        ({"strategy": "TP=3"}, "does not fit 1xl40s"),
        ({"strategy": "TP=2, EP=4"}, "attention takes 2 devices, experts take 4"),
        ({"top": "0"}, "--top is 0"),
        ({"skew": "9"}, "--skew is 9"),
        ({"out": "no-such-folder/graph.yaml"}, "there is no folder"),
        ({"plot": "plan.txt"}, "unknown format"),
        ({"model": "x" * 5000}, "unknown model"),
        ({"hardware": "x" * 5000}, "no such cluster or device"),
        ({"traffic": "x=" * 2500}, "--traffic"),
    ],
)
def test_bad_input_is_one_line(given: dict[str, str], message: str) -> None:
    assert message in refusal(flowrt_here(*words(given.pop("model", "mixtral-8x7b"), **given)))


def test_a_model_in_transformers_is_one_line(tmp_path: Path) -> None:
    small_config("gpt_oss").save_pretrained(tmp_path)
    text = "config.json: runs by the module of transformers; what it costs is known only of the operators"
    assert text in refusal(flowrt_here(*words(str(tmp_path))))
