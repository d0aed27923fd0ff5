"""Operators against their roofline: what counts as read and computed, and one run of all of them. No time is asserted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from checkpoints import make_checkpoint

from flowrt.bench.limits import MachineLimits, better_of
from flowrt.bench.operator_cases import Case, Inside, Model, cases_of
from flowrt.bench.operators_command import table_of
from flowrt.bench.random_weights import CountingCheckpoint, RandomCheckpoint, model_like_qwen3
from flowrt.bench.roofline import OperatorTime, Options, _try, measure
from flowrt.errors import UserError
from flowrt.operators.families.registry import read_model_config

SIZES = {"hidden": 64, "width": 32, "experts": 8, "heads": 4, "kv-heads": 2, "head-dim": 16, "vocabulary": 128}


@pytest.fixture
def model() -> Model:
    config = model_like_qwen3(**{name.replace("-", "_"): size for name, size in SIZES.items()}, layers=2)
    return Model(config, RandomCheckpoint(), config.moe_layers)


def test_every_weight_counts_once_and_experts_only_where_rows_go(model: Model) -> None:
    with torch.inference_mode():
        cases = {case.name: case for case in cases_of(model, 1, 16)}
    expert = 3 * 64 * 32
    assert cases["experts"].num_bytes == 4 * expert * 4 + 2 * 64 * 4
    assert cases["experts"].num_flops == 4 * 2 * expert
    assert cases["head"].num_flops == 2 * 64 * 128
    assert cases["gate"].num_bytes == 8 * 64 * 4 + 64 * 4 + 4 * (8 + 4)
    qkv, output = (4 + 2 * 2) * 16 * 64, 64 * 64
    scores = 2 * 16 * 4 * 2 * 16  # 16 tokens, 4 heads, a key and a value of 16
    assert cases["attention"].num_flops == pytest.approx(2 * (qkv + output) + scores, rel=0.05)  # norms count as products
    whole, parts = cases["attention"].num_bytes, sum(part.num_bytes for part in cases["attention"].inside)
    assert whole < parts < 1.2 * whole  # what passes between the parts counts for each


def test_many_rows_touch_each_expert_once(model: Model) -> None:
    with torch.inference_mode():
        cases = {case.name: case for case in cases_of(model, 256, 16)}
    assert cases["experts"].num_bytes == 8 * 3 * 64 * 32 * 4 + 2 * 256 * 64 * 4
    assert "prompt" in cases
    assert cases["prompt"].inside[1].num_flops == 2 * (256 * 257 // 2) * 4 * 2 * 16


def test_the_parts_of_a_case_are_told_apart_by_the_blocks_it_was_made_with() -> None:
    seconds: dict[str, float] = {}

    def call() -> None:
        seconds["first"] = seconds.get("first", 0.0) + 1e-9

    inside = (Inside("a: first", "first", 1, 1), Inside("a: rest", None, 1, 1))
    found = _try(Case("a", 1, 1, 1, [call, call], seconds, inside), lambda: None)
    assert found["a: first"] == pytest.approx(1e-9)
    assert found["a: rest"] == pytest.approx(found["a"] - 1e-9)
    untold = _try(Case("a", 1, 1, 1, [lambda: None], {}, inside), lambda: None)
    assert set(untold) == {"a"}  # an operator that does not tell them is timed as a whole


def test_random_weights_have_the_size_of_trained_ones_and_are_not_alike() -> None:
    config = model_like_qwen3()
    checkpoint = RandomCheckpoint()
    one, other = (checkpoint.read_part(config, "gate", (32, 1024), layer=layer) for layer in (0, 1))
    assert one.std().item() == pytest.approx(1024**-0.5, rel=0.05)
    assert not torch.equal(one, other)
    large = checkpoint.read_part(config, "head", (3000, 1024))
    assert not torch.equal(large[:512], large[1024:1536])
    assert checkpoint.bytes_by_part == {"gate": 2 * 32 * 1024 * 4, "head": 3000 * 1024 * 4}


@pytest.mark.parametrize("architecture", ["qwen3_moe", "deepseek_v3"])
def test_all_operators_of_a_checkpoint_are_timed(architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flowrt.bench.roofline.CASE_SECONDS", 0.0)
    monkeypatch.setattr("flowrt.bench.roofline.MIN_TRIES", 1)
    monkeypatch.setattr("flowrt.bench.roofline.CACHE_BYTES", 1 << 12)
    directory = make_checkpoint(tmp_path / "model", architecture=architecture, tokenizer=False)
    before = torch.get_num_threads()
    try:
        times = list(measure(Options(model=directory, sizes={}, rows=(1, 64), context=16)))
    finally:
        torch.set_num_threads(before)
    names = {each.operator for each in times if each.rows == 64}
    assert names >= {"embedding", "norm", "attention", "attention: attend", "prompt", "gate", "dispatch", "experts", "combine", "head"}
    assert ("shared" in names) == ("dense" in names) == (architecture == "deepseek_v3")
    assert all(each.seconds > 0 and each.num_bytes > 0 and each.median_seconds >= each.seconds for each in times)
    checkpoint = CountingCheckpoint(directory)
    Model(read_model_config(directory), checkpoint, [1])
    assert checkpoint.bytes_by_part["expert_down"] > 0


def test_the_fraction_of_the_limit_is_least_time_over_time() -> None:
    limits = MachineLimits(1, 100.0, {"float32": 1000.0})
    assert (
        OperatorTime("head", 1, seconds=2.0, median_seconds=3.0, num_tries=5, num_bytes=100, num_flops=10).fraction(limits, "float32")
        == 0.5
    )
    faster = MachineLimits(1, 50.0, {"float32": 2000.0})
    assert better_of(limits, faster) == MachineLimits(1, 100.0, {"float32": 2000.0})


def test_the_table_has_a_line_per_operator_and_a_column_per_load() -> None:
    limits = MachineLimits(1, 100.0, {"float32": 1000.0})
    table = table_of([OperatorTime("head", rows, 2.0 * rows, 3.0, 5, 100, 10) for rows in (1, 4)], limits, "float32")
    assert [column.header for column in table.columns] == ["rows", "1", "4"]
    assert [list(column.cells) for column in table.columns] == [["head"], ["2000000 50%"], ["8000000 12%"]]


@pytest.mark.parametrize(
    ("changed", "match"),
    [
        ({"rows": (0,)}, "--rows is 0"),
        ({"sizes": {"top-k": 9, "experts": 8}}, "--top-k is 9"),
        ({"sizes": {"kv-heads": 3}}, "--kv-heads is 3"),
        ({"layers": 0}, "--layers is 0"),
    ],
)
def test_sizes_that_no_model_has_are_refused(changed: dict[str, object], match: str) -> None:
    with pytest.raises(UserError, match=match):
        Options(**{"sizes": {}, **changed}).check()  # type: ignore[arg-type]


def test_the_whole_command(tmp_path: Path) -> None:
    script = "import flowrt.bench.roofline as r; r.CASE_SECONDS = 0.01; from flowrt.cli.app import main; main()"
    words = ["bench", "operators", "--rows", "1", "--hidden", "64", "--width", "32", "--vocabulary", "128", "--layers", "1"]
    words += ["--threads", "1", "--json", str(tmp_path / "o.json"), "--plot", str(tmp_path / "o.svg")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, "-c", script, *words], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "GB/s read" in done.stdout
    details = json.loads((tmp_path / "o.json").read_text())["details"]
    assert {each["operator"] for each in details["times"]} >= {"experts", "head"}
    assert "per cent of the limit" in (tmp_path / "o.svg").read_text()
