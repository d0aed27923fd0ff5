"""The cost of strict numerics: two graphs that differ in numerics alone, and the check at the start. No time is asserted."""

from __future__ import annotations

from pathlib import Path

import pytest
from checkpoints import make_checkpoint

from flowrt.bench.cases.case_options import DecodeOptions
from flowrt.bench.cases.strict import NUM_PROOFS, measure, read_graphs
from flowrt.bench.measure.benchmark import run_benchmark
from flowrt.errors import UserError


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("strict-cost"), seed=6, layers=1, tokenizer=False)


def test_graphs_differ_in_numerics_alone(model: Path, tmp_path: Path) -> None:
    strict, fast = read_graphs(model, None, "bfloat16", DecodeOptions(batch=(1, 32), prompt_tokens=64, new_tokens=32))
    assert (strict.numerics, fast.numerics) == ("strict", "fast")
    assert strict.replace(numerics="fast") == fast
    assert set(fast.threads.values()) == {1}  # what strict makes of auto
    assert (strict.limits.max_num_seqs, strict.limits.kv_pages) == (32, 32 * 6)
    with pytest.raises(UserError, match=r"roles have numerics of their own \(attention strict and prefill fast\); remove them"):
        read_graphs(model, None, "bfloat16", DecodeOptions(overrides=("deploy.prefill={workers: 1, numerics: fast}",)))
    own = tmp_path / "own.yaml"
    own.write_text(f"flowrt: 1\nmodel: {{path: {model}}}\ndeploy: {{experts: {{servers: 3}}}}\n")
    mine, _ = read_graphs(model, own, "float32", DecodeOptions(batch=(8,), overrides=("deploy.experts.servers=4",)))
    assert len(mine.process_names()) == 5


def test_report_has_both_speeds_blocks_and_the_check_at_the_start(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = tmp_path / "one.yaml"
    one.write_text(f"flowrt: 1\nmodel: {{path: {model}}}\ndeploy: {{processes: one}}\n")
    options = DecodeOptions(dtype=("float32",), batch=(2,), prompt_tokens=6, new_tokens=32)
    report = run_benchmark("strict", measure(model, one, options), num_pairs=1)
    assert [(figure.name, figure.peer, figure.target) for figure in report.figures] == [
        ("prefill 2 float32", "fast", None),
        ("decode 2 float32", "fast", None),
    ]
    found = report.details["float32"]
    assert found["tokens"]["fast, batch 2"]["num_compared"] == 4
    assert all(seconds > 0 for seconds in found["proof_seconds"])
    assert len(found["proof_seconds"]) == NUM_PROOFS
    assert found["blocks"]["attention.0"].startswith("blocks of ")
    assert "experts" in found["blocks"]["attention.0"]
    text = capsys.readouterr().out
    assert "float32, attention.0: blocks of " in text
    assert f"median of {NUM_PROOFS}" in text
