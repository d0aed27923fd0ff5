"""The cost of detector, failover and hedging: two graphs that differ in nothing else run in turns; bad input starts nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flowrt.bench.cases.case_options import DecodeOptions
from flowrt.bench.cases.reliability import KEYS, measure, read_graphs
from flowrt.bench.measure.benchmark import run_benchmark
from flowrt.errors import UserError

QUICKSTART = Path(__file__).resolve().parents[2] / "examples" / "quickstart.yaml"
SMALL = ("deploy.attention.groups=1", "deploy.experts.servers=2", "numerics=strict")


def options(batch: int = 8, **fields: Any) -> DecodeOptions:
    return DecodeOptions(**{"batch": (batch,), "prompt_tokens": 16, "new_tokens": 64, **fields})


def test_graphs_differ_in_reliability_alone() -> None:
    on, off = read_graphs(QUICKSTART, None, options(overrides=("reliability.hedge=false",)))
    assert [getattr(on.reliability, key) for key in KEYS] == [True, "fine", True]
    assert [getattr(off.reliability, key) for key in KEYS] == [False, "off", False]
    assert off.replace(reliability=on.reliability) == on


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (options(200), "limits.max_num_seqs is 16, and a batch of 200 needs 100"),
        (options(overrides=("deploy.processes=one",)), "all workers share one process"),
    ],
)
def test_graphs_that_cannot_be_measured_are_refused(options: DecodeOptions, text: str) -> None:
    with pytest.raises(UserError, match=text):
        read_graphs(QUICKSTART, None, options)


def test_both_graphs_run_in_turns_and_give_equal_tokens() -> None:
    chosen = options(2, overrides=SMALL, prompt_tokens=4, new_tokens=16)
    report = run_benchmark("reliability", measure(read_graphs(QUICKSTART, None, chosen), chosen), num_pairs=2)
    (figure,) = report.figures
    assert figure.ratio is not None
    assert figure.ratio.count == 2
    assert figure.verdict == "undecided"  # two pairs bound nothing
    assert report.notes == [
        "tokens, float32, strict, batch 2, against without: all 6 sequences equal"
    ]  # with those of the round that is not counted
