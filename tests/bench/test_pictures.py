"""That the pictures of `flowrt bench decode` and `operators` can be drawn, in a process of its own: matplotlib keeps its fonts open."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from flowrt.bench.pairs import Target
from flowrt.bench.report import Figure, Machine, Report


def decode_report() -> Report:
    figures = [
        Figure.paired("decode 8 float32", "tokens/s", [3.0] * 6, "grouped_mm", [2.0] * 6, Target(1.5, at_most=False)),
        Figure.paired("prefill 8 float32", "tokens/s", [3.0], "eager", [2.0]),
    ]
    return Report("decode", Machine("a processor", 2, "Linux 6", {}, 0.5), figures)


def draw(call: str, path: Path) -> str:
    script = f"import sys, test_pictures as t, flowrt.bench.plots as plots; plots.{call}"
    folders = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
    subprocess.run([sys.executable, "-c", script, str(path)], env={**os.environ, "PYTHONPATH": folders}, check=True)
    return path.read_text()


def test_ratios_and_targets_are_drawn(tmp_path: Path) -> None:
    text = draw("plot_decode(t.decode_report(), sys.argv[1])", tmp_path / "decode.svg")
    assert "decode 8 float32, to grouped_mm" in text
    assert "prefill 8 float32, to eager" in text
