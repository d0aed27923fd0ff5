"""The pictures of the benchmarks, drawn in a process of its own: matplotlib keeps the files of its fonts open."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest

from flowrt.bench.report.figures import Figure, Target
from flowrt.bench.report.plots import check_plot, curves_of, ordered
from flowrt.bench.report.report import BenchmarkReport, Machine, ReportSection
from flowrt.errors import UserError

MACHINE = Machine("a processor", 2, "Linux 6", {}, 0.5, 0.75)


def ratios() -> BenchmarkReport:
    figures = [
        Figure.paired("decode 8 float32", "tokens/s", [3.0] * 6, "grouped_mm", [2.0] * 6, Target(1.5, at_most=False)),
        Figure.paired("prefill 8 float32", "tokens/s", [3.0], "eager", [2.0]),
        Figure.paired("prefill 1 float32", "tokens/s", [3.0], "eager", [2.0], Target(1.0)),  # one pair decides nothing
    ]
    return BenchmarkReport("decode", MACHINE, figures)


def sizes() -> BenchmarkReport:
    figures = []
    for size in (64, 1 << 20):
        figures.append(Figure.paired(f"shm {size}", "us", [2.0 * size] * 6, "a peer", [4.0 * size] * 6, scheme="shm", bytes=size))
        figures.append(Figure.alone(f"memcpy {size}", "GB/s", [10.0] * 6, scheme="memcpy", bytes=size))
    figures.append(Figure.alone("without a size", "us", [1.0] * 6))
    return BenchmarkReport("transports", MACHINE, figures)


def test_curves_are_those_of_transports_peers_and_the_limit() -> None:
    assert curves_of(sizes()) == {
        "shm": [(64, 128.0), (1 << 20, float(2 << 20))],
        "a peer": [(64, 256.0), (1 << 20, float(4 << 20))],
        "memcpy": [(64, 10.0), (1 << 20, 10.0)],
    }


def fractions() -> BenchmarkReport:
    times = [{"operator": name, "rows": rows, "fraction": 0.5} for name in ("gate", "head") for rows in (8, 1)]
    sections = [ReportSection("times", times), ReportSection("limits_text", "18 GB/s")]
    return BenchmarkReport("operators", MACHINE, [], sections=sections)


def curves() -> BenchmarkReport:
    points = [(servers, f"{groups} groups") for groups in (2, 8) for servers in (16, 64)]
    figures = [Figure.paired("step", "us", [9.0], "direct", [10.0], x=servers, curve=groups) for servers, groups in points]
    axes = {"xlabel": "expert servers", "ylabel": "decode step"}
    report = BenchmarkReport("trampoline", MACHINE, [*figures, Figure.alone("no curve", "", [1.0])], about={"axes": axes})
    return replace(report, command="flowrt bench sweep")


def loads() -> list[dict[str, object]]:
    times = {f"{word}_{name}_ms": 3.0 for word in ("mean", "median", "std", "p99") for name in ("ttft", "itl")}
    return [{"request_rate": rate, "request_throughput": 3.5, "model_id": "a model", **times} for rate in ("inf", 1.0, 2.0)]


REPORTS = {"plot_ratios": "ratios", "plot_operators": "fractions", "plot_curves": "curves", "plot_transports": "sizes"}
DRAW = """
import json, sys, test_plots as t
from flowrt.bench.load.measure import plot_rates
from flowrt.bench.report import plots
save, saved, legends_of = plots.save_picture, [], {}

def keep(picture, path):
    save(picture, path)
    saved.append(picture)

plots.save_picture = keep
for draw, report in t.REPORTS.items():
    getattr(plots, draw)(getattr(t, report)(), f"{sys.argv[1]}/{draw}.svg")
    picture = saved.pop()
    picture.draw_without_rendering()
    legends = [*picture.legends, *filter(None, (axes.get_legend() for axes in picture.axes))]
    over = [legend.get_window_extent().overlaps(axes.get_window_extent()) for legend in legends for axes in picture.axes]
    legends_of[draw] = len(legends), sum(map(bool, over))
plot_rates(t.loads(), f"{sys.argv[1]}/plot_rates.svg")
print(json.dumps(legends_of))
"""


class Drawn(NamedTuple):
    folder: Path  # of the pictures, by the name of the function that draws each
    legends: dict[str, tuple[int, int]]  # of each picture: their number, and in how many places one lies over a diagram


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Drawn:
    """All pictures, from one process."""
    folder, folders = tmp_path_factory.mktemp("drawn"), os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
    environment = {**os.environ, "PYTHONPATH": folders}
    done = subprocess.run([sys.executable, "-c", DRAW, folder], env=environment, check=True, text=True, stdout=subprocess.PIPE)
    return Drawn(folder, json.loads(done.stdout))


def test_figures_are_ordered_by_batch_within_their_kind() -> None:
    names = ["decode 8 float32", "prefill 32 float32", "decode 32 float32", "prefill 1 float32", "decode 1 float32"]
    expected = ["decode 1 float32", "decode 8 float32", "decode 32 float32", "prefill 1 float32", "prefill 32 float32"]
    assert [figure.name for figure in ordered([Figure.alone(name, "tokens/s", [1.0]) for name in names])] == expected


@pytest.mark.parametrize(
    ("draw", "texts"),
    [
        ("plot_ratios", ["flowrt bench decode", "decode 8 float32, to grouped_mm", "prefill 8 float32, to eager"]),
        ("plot_ratios", ["target met", "no target"]),
        ("plot_operators", ["flowrt bench operators", "per cent of the limit (18 GB/s)", "rows"]),
        ("plot_curves", ["flowrt bench sweep trampoline", "expert servers", "2 groups", "8 groups"]),
        ("plot_transports", ["flowrt bench transports", "round trip", "memcpy, one core", "a peer (peer)"]),
    ],
)
def test_pictures_are_drawn(draw: str, texts: list[str], drawn: Drawn) -> None:
    text = (drawn.folder / f"{draw}.svg").read_text()
    assert all(each in text for each in [*texts, "2 cores of a processor"])


def test_times_are_drawn_over_the_request_rate(drawn: Drawn) -> None:
    text = (drawn.folder / "plot_rates.svg").read_text()
    assert all(each in text for each in ("flowrt bench serve: a model", "time to first token", "inter-token latency", "p99", "median"))
    assert "std" not in text


@pytest.mark.parametrize("draw", REPORTS)
def test_legends_cover_no_diagram(draw: str, drawn: Drawn) -> None:
    num_legends, num_covering = drawn.legends[draw]
    assert num_legends > 0
    assert num_covering == 0


def test_a_missing_folder_is_a_user_error() -> None:
    with pytest.raises(UserError, match="there is no folder"):
        check_plot("no/such.svg")
