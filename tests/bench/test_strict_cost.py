"""The cost of strict numerics: two graphs that differ in numerics alone, and what is told of them. No time is asserted."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest
from checkpoints import make_checkpoint
from rich.console import Console

from flowrt.bench.decode import Found
from flowrt.bench.decoding import Comparison
from flowrt.bench.report import Figure
from flowrt.bench.strict import Options, StrictFound, graphs_of, measure
from flowrt.bench.strict_command import print_strict


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("strict-cost"), seed=6, layers=1, tokenizer=False)


def test_the_graphs_differ_in_numerics_alone(model: Path, tmp_path: Path) -> None:
    strict, fast = graphs_of(Options(model=model, batches=(1, 32), prompt_tokens=64, new_tokens=32), "bfloat16")
    assert (strict.numerics, fast.numerics) == ("strict", "fast")
    assert replace(strict, numerics="fast") == fast
    assert set(fast.threads.values()) == {1}  # what strict makes of auto
    assert (strict.limits.max_num_seqs, strict.limits.kv_pages) == (32, 32 * 6)
    own = tmp_path / "own.yaml"
    own.write_text(f"flowrt: 1\nmodel: {{path: {model}}}\ndeploy: {{experts: {{servers: 3}}}}\n")
    mine, _ = graphs_of(Options(model=model, graph=own, overrides=("deploy.experts.servers=4",)), "float32")
    assert len(mine.process_names()) == 5


async def test_both_are_measured_and_the_blocks_are_told(model: Path, tmp_path: Path) -> None:
    one = tmp_path / "one.yaml"
    one.write_text(f"flowrt: 1\nmodel: {{path: {model}}}\ndeploy: {{processes: one}}\n")
    options = Options(model=model, graph=one, dtypes=("float32",), batches=(2,), prompt_tokens=6, new_tokens=24, num_pairs=1)
    (found,) = [each async for each in measure(options, lambda text: None)]
    assert [(figure.name, figure.peer, figure.target) for figure in found.pairs.figures] == [
        ("prefill 2", "fast", None),
        ("decode 2", "fast", None),
    ]
    assert found.pairs.comparisons["fast, batch 2"].num_compared == 4
    assert all(seconds > 0 for seconds in found.proof_seconds)
    assert len(found.proof_seconds) == 3
    assert found.blocks["attention.0"].startswith("blocks of ")
    assert "experts" in found.blocks["attention.0"]


def test_the_table_says_blocks_and_the_check_at_the_start() -> None:
    figures = [Figure.paired("decode 1", "tokens/s", [5.0] * 6, "fast", [10.0] * 6)]
    pairs = Found("float32", figures, {"fast, batch 1": Comparison(7, 0)})
    blocks = {
        "attention.0": "blocks of 4, 8 to 128 rows: gate",
        "experts.0": "blocks of 16 rows: experts",
        "experts.1": "blocks of 16 rows: experts",
    }
    out = io.StringIO()
    print_strict(StrictFound("float32", pairs, 1, blocks, [0.5, 0.25, 0.75]), Console(file=out, width=120, highlight=False))
    text = out.getvalue()
    assert "0.50 (0.50 to 0.50)" in text
    assert "experts.0, experts.1: blocks of 16 rows: experts" in text
    assert "all 7 sequences equal" in text
    assert "0.50 s with 1 threads, median of 3" in text
