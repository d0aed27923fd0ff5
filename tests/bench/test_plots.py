"""What the picture of `flowrt bench transports` shows, and that it can be drawn."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from flowrt.bench.plots import check_plot, curves_of
from flowrt.bench.report import Figure, Machine, Report
from flowrt.errors import UserError


def report() -> Report:
    figures = []
    for size in (64, 1 << 20):
        figures.append(Figure.paired(f"shm {size}", "us", [2.0 * size] * 6, "a peer", [4.0 * size] * 6, scheme="shm", bytes=size))
        figures.append(Figure.alone(f"memcpy {size}", "GB/s", [10.0] * 6, scheme="memcpy", bytes=size))
    figures.append(Figure.alone("without a size", "us", [1.0] * 6))
    return Report("transports", Machine("a processor", 2, "Linux 6", {}, 0.5, 0.75), figures)


def test_the_curves_are_ours_the_peers_and_the_limit() -> None:
    assert curves_of(report()) == {
        "shm": [(64, 128.0), (1 << 20, float(2 << 20))],
        "a peer": [(64, 256.0), (1 << 20, float(4 << 20))],
        "memcpy": [(64, 10.0), (1 << 20, 10.0)],
    }


def test_the_picture_is_written(tmp_path: Path) -> None:
    """In a process of its own: matplotlib keeps the files of its fonts open."""
    script = "import sys, test_plots; from flowrt.bench.plots import plot_transports; plot_transports(test_plots.report(), sys.argv[1])"
    folders = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
    subprocess.run([sys.executable, "-c", script, str(tmp_path / "t.svg")], env={**os.environ, "PYTHONPATH": folders}, check=True)
    text = (tmp_path / "t.svg").read_text()
    assert "round trip" in text
    assert "memcpy, one core" in text


def test_a_folder_that_is_not_there_is_the_users_to_mend() -> None:
    with pytest.raises(UserError, match="folder does not exist"):
        check_plot("no/such.svg")
