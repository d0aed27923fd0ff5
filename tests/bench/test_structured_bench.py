"""The cost of structured output: one running graph decodes with a grammar for every sequence and without. No time is asserted."""

from __future__ import annotations

from pathlib import Path

import pytest

from flowrt.bench.cases.case_options import DecodeOptions
from flowrt.bench.cases.structured import measure
from flowrt.bench.measure.benchmark import run_benchmark

pytest.importorskip("llguidance")
QUICKSTART = Path(__file__).resolve().parents[2] / "examples" / "quickstart.yaml"


def test_no_constrained_output_ends_before_the_others() -> None:
    options = DecodeOptions(batch=(2,), prompt_tokens=4, new_tokens=32, overrides=("deploy.processes=one",))
    report = run_benchmark("structured", measure(QUICKSTART, None, options), num_pairs=1)
    (figure,) = report.figures
    assert (figure.name, figure.peer) == ("decode 2 float32, fast", "without")
    assert figure.ratio is not None
