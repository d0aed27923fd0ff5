"""Operators beside their roofline: what counts as read and computed, and one run of all of them. No time is asserted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from checkpoints import make_checkpoint

from flowrt.api import read_graph
from flowrt.bench.cases.case_options import OperatorOptions
from flowrt.bench.cases.operator_cases import CasePart, ModelOperators, OperatorCase, cases_of
from flowrt.bench.cases.operators import OperatorTime, compute_section, fit_cost, operator_times, time_case
from flowrt.bench.cases.random_weights import MODEL_LIKE_QWEN3, RandomCheckpoint
from flowrt.bench.measure.limits import better_of
from flowrt.costs.work import FiringLoad, MachineLimits, Work
from flowrt.graph.settings import ComputeCost

SIZES = {"hidden_size": 64, "expert_width": 32, "num_experts": 8, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "vocab_size": 128}


@pytest.fixture
def model() -> ModelOperators:
    config = replace(MODEL_LIKE_QWEN3, **SIZES, num_layers=2, moe_layers=(0, 1))
    return ModelOperators(config, RandomCheckpoint(), config.moe_layers)


def test_weights_count_once_and_experts_only_where_rows_are_routed(model: ModelOperators) -> None:
    with torch.inference_mode():
        cases = {case.name: case for case in cases_of(model, 1, (16, 32))}
    expert = 3 * 64 * 32
    assert cases["experts"].work.num_bytes == 4 * expert * 4 + 2 * 64 * 4
    assert cases["experts"].work.num_flops == 4 * 2 * expert
    assert cases["head"].work.num_flops == 2 * 64 * 128
    assert cases["gate"].work.num_bytes == 8 * 64 * 4 + 64 * 4 + 4 * (8 + 4)
    qkv, output = (4 + 2 * 2) * 16 * 64, 64 * 64
    scores = 2 * 16 * 4 * 2 * 16  # 16 tokens, 4 heads, a key and a value of 16
    assert cases["attention"].work.num_flops == pytest.approx(2 * (qkv + output) + scores, rel=0.05)  # norms count as products
    whole, parts = cases["attention"].work.num_bytes, sum(part.work.num_bytes for part in cases["attention"].inside)
    assert whole < parts < 1.2 * whole  # what passes between the parts counts for each


def test_many_rows_read_each_expert_once(model: ModelOperators) -> None:
    with torch.inference_mode():
        cases = {case.name: case for case in cases_of(model, 256, (16,))}
    assert cases["experts"].work.num_bytes == 8 * 3 * 64 * 32 * 4 + 2 * 256 * 64 * 4
    assert "prompt" in cases
    assert cases["prompt"].inside[1].work.num_flops == 2 * (256 * 257 // 2) * 4 * 2 * 16


def test_parts_of_a_case_are_timed_by_its_blocks() -> None:
    seconds: dict[str, float] = {}

    def call() -> None:
        seconds["first"] = seconds.get("first", 0.0) + 1e-9

    inside = (CasePart("a: first", "first", Work(1, 1)), CasePart("a: rest", None, Work(1, 1)))
    found = time_case(OperatorCase("a", 1, Work(1, 1), [call, call], seconds, inside), lambda: None)
    assert found["a: first"] == pytest.approx(1e-9)
    assert found["a: rest"] == pytest.approx(found["a"] - 1e-9)
    whole = time_case(OperatorCase("a", 1, Work(1, 1), [lambda: None], {}, inside), lambda: None)
    assert set(whole) == {"a"}  # an operator that does not report its parts is timed as a whole


def test_random_weights_have_the_size_of_trained_ones_and_differ() -> None:
    config = MODEL_LIKE_QWEN3
    checkpoint = RandomCheckpoint()
    one, other = (checkpoint.read_part(config, "gate", (32, 1024), layer=layer) for layer in (0, 1))
    assert one.std().item() == pytest.approx(1024**-0.5, rel=0.05)
    assert not torch.equal(one, other)
    large = checkpoint.read_part(config, "head", (3000, 1024))
    assert not torch.equal(large[:512], large[1024:1536])


@pytest.mark.parametrize("architecture", ["qwen3_moe", "deepseek_v3"])
def test_all_operators_of_a_checkpoint_are_timed(architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flowrt.bench.cases.operators.CASE_SECONDS", 0.0)
    monkeypatch.setattr("flowrt.bench.cases.operators.MIN_TRIES", 1)
    monkeypatch.setattr("flowrt.bench.cases.operators.CACHE_BYTES", 1 << 12)
    directory = make_checkpoint(tmp_path / "model", architecture=architecture, tokenizer=False)
    before = torch.get_num_threads()
    try:
        times = list(operator_times(directory, OperatorOptions(rows=(1, 64), context=(16,))))
    finally:
        torch.set_num_threads(before)
    names = {each.operator for each in times if each.rows == 64}
    assert names >= {"embedding", "norm", "attention", "attention: attend", "prompt", "gate", "dispatch", "experts", "combine", "head"}
    assert ("shared" in names) == ("dense" in names) == (architecture == "deepseek_v3")
    assert all(each.seconds > 0 and each.num_bytes > 0 and each.median_seconds >= each.seconds for each in times)


def test_fit_finds_the_cost_behind_the_times_and_no_term_is_below_zero() -> None:
    cost = ComputeCost(2e-5, 3e-6, 4e-5, 5e-8)
    loads = [FiringLoad(rows, experts, tokens) for rows, experts, tokens in [(1, 1, 9), (4, 3, 70), (8, 3, 9), (8, 8, 900), (64, 16, 5)]]
    fitted = fit_cost({load: cost.seconds(*load) for load in loads})
    assert fitted.cost == cost
    assert fitted.worst_error < 1e-6
    falling = fit_cost({FiringLoad(1): 5.0, FiringLoad(2): 4.0})  # a row would take less than no time
    assert falling.cost == ComputeCost(pytest.approx(4.39, abs=0.01))
    assert falling.worst_error == pytest.approx(0.12, abs=0.02)


def test_fitted_costs_are_a_section_that_a_graph_file_takes(tmp_path: Path) -> None:
    costs = {"attention": fit_cost({FiringLoad(rows, 0, 64 * rows): 1e-4 + 1e-6 * rows for rows in (1, 8)})}
    section = yaml.safe_load("\n".join(compute_section(costs)))
    model = make_checkpoint(tmp_path / "model", tokenizer=False)
    graph = {"flowrt": 1, "model": {"path": str(model)}, "emulate": {"dilation": 100, **section}}
    path = tmp_path / "graph.yaml"
    path.write_text(yaml.safe_dump(graph))
    emulation = read_graph(path).emulation
    assert emulation is not None
    assert emulation.compute == {"attention": ComputeCost(1e-4, 1e-6)}


def test_fraction_is_the_limit_over_the_time() -> None:
    limits = MachineLimits(1, 100.0, {"float32": 1000.0})
    time = OperatorTime("head", 1, seconds=2.0, median_seconds=3.0, num_tries=5, num_bytes=100, num_flops=10)
    assert time.fraction(limits, "float32") == 0.5
    faster = MachineLimits(1, 50.0, {"float32": 2000.0})
    assert better_of(limits, faster) == MachineLimits(1, 100.0, {"float32": 2000.0})


def test_operators_command(tmp_path: Path) -> None:
    script = (
        "import flowrt.bench.cases.operators as r; r.CASE_SECONDS = 0.01; r.CACHE_BYTES = 1 << 12;"
        "import flowrt.bench.measure.limits as m; m._READ_BYTES = 1 << 20; m._PRODUCTS = ((8, 8, 8),);"
        "from flowrt.cli.app import main; main()"
    )
    words = ["bench", "operators", "--rows", "1", "--hidden", "64", "--width", "32", "--vocabulary", "128", "--layers", "1"]
    words += ["--threads", "1", "--json", str(tmp_path / "o.json"), "--plot", str(tmp_path / "o.svg")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, "-c", script, *words], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "GB/s read" in done.stdout
    assert [line.split()[:2] for line in done.stdout.splitlines() if line.startswith("rows")] == [["rows", "1"]]
    details = json.loads((tmp_path / "o.json").read_text())["details"]
    assert {each["operator"] for each in details["times"]} >= {"experts", "head"}
    assert set(details["costs"]) == {"attention"}  # one number of rows tells nothing but attention's cost per token
    assert "per cent of the limit" in (tmp_path / "o.svg").read_text()
