"""The cost of HTTP: streams and calls of one running graph in turns."""

from __future__ import annotations

from pathlib import Path

from flowrt.bench.cases.api_cost import measure
from flowrt.bench.cases.case_options import DecodeOptions
from flowrt.bench.measure.benchmark import run_benchmark

QUICKSTART = Path(__file__).resolve().parents[2] / "examples" / "quickstart.yaml"


def test_streams_and_calls_run_in_turns() -> None:
    small = ("deploy.attention.groups=1", "deploy.experts.servers=2")
    options = DecodeOptions(batch=(2,), prompt_tokens=4, new_tokens=24, overrides=small)
    speed, *times = run_benchmark("api", measure(QUICKSTART, None, options), num_pairs=1).figures
    assert speed.ratio is not None
    assert speed.ratio.count == 1
    assert [each.name.partition(", ")[2] for each in times][::3] == ["front ends", "client of HTTP, not counted"]
    assert times[-1].ours.median > 0
