"""Pictures of what a benchmark found. Needs matplotlib."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flowrt.bench.report.figures import Figure
from flowrt.bench.report.report import BenchmarkReport
from flowrt.errors import UserError
from flowrt.system.output_file import LostOutputError, check_writable

FORMATS = (".svg", ".png", ".pdf")
COPIES_PER_ROUND_TRIP = 2  # at least one each way
LIMIT = "memcpy"
_COLOURS = {"met": "#2a7f62", "not met": "#b5443a", "undecided": "#c9a227", None: "#5b7083"}
_STRADDLES = "undecided: the interval straddles the target"
_VERDICTS = {"met": "target met", "not met": "target not met", "undecided": _STRADDLES, None: "no target"}


def plot_ratios(report: BenchmarkReport, path: str) -> None:
    """The ratio of each figure with its interval, and its target as a mark. Raises UserError when the file cannot be written."""
    ratios = [(figure, figure.ratio) for figure in ordered(report.figures) if figure.ratio is not None]
    labels = [f"{figure.name}, to {figure.peer}" for figure, _ in ratios]
    picture, axes = new_picture((max(8.0, 5 + 0.075 * max(map(len, labels), default=0)), 1.8 + 0.38 * len(ratios)))
    marked: dict[str, Any] = {}  # legend text -> a line or bar of its kind
    for place, (figure, ratio) in enumerate(ratios):
        marked[_VERDICTS[figure.verdict]] = axes.barh(place, ratio.median, color=_COLOURS[figure.verdict], height=0.6)
        if ratio.low > float("-inf"):
            (marked["95 % interval"],) = axes.plot([ratio.low, ratio.high], [place, place], color="black", linewidth=1.2)
        if figure.target is not None:
            (marked["target"],) = axes.plot([figure.target.bound] * 2, [place - 0.42, place + 0.42], color="black", linewidth=3.0)
    marked["as fast as the peer"] = axes.axvline(1.0, color="grey", linewidth=0.8, linestyle=":")
    axes.set_yticks(range(len(ratios)), labels)
    axes.invert_yaxis()
    units = {figure.unit for figure, _ in ratios}
    unit = f"{units.pop()} of " if len(units) == 1 else ""
    axes.set_xlabel(f"{unit}flowrt / {unit}the peer")
    axes.legend(marked.values(), marked.keys(), fontsize="small", loc="lower center", bbox_to_anchor=(0.3, 1.0), ncols=3, frameon=False)
    save_report_picture(picture, report, path)


def plot_curves(report: BenchmarkReport, path: str) -> None:
    """The ratio, or else the value, of each figure that is about a point `x` of a line `curve`. Raises UserError as `plot_ratios`."""
    lines: dict[str, list[tuple[Any, float]]] = {}
    for figure in report.figures:
        if "curve" in figure.about:
            lines.setdefault(figure.about["curve"], []).append((figure.about["x"], (figure.ratio or figure.ours).median))
    picture, axes = new_picture((7.5, 4.5))
    for name, points in lines.items():
        axes.plot(*zip(*points, strict=True), marker="o", label=name)
    if any(figure.ratio is not None for figure in report.figures if "curve" in figure.about):
        axes.axhline(1.0, color="grey", linewidth=0.8, linestyle=":", label="1: no difference")
    axes.set(**report.details["axes"])
    axes.set_ylim(bottom=0)
    if any(lines):
        picture.legend(*axes.get_legend_handles_labels(), fontsize="small", loc="outside right center")
    save_report_picture(picture, report, path)


def ordered(figures: Sequence[Figure]) -> list[Figure]:
    """The figures in order of their kinds, and those of a kind by the numbers in their names: batch 1 before 8 before 32."""

    def split(figure: Figure) -> tuple[str, list[int]]:
        words = figure.name.split()
        return " ".join(word for word in words if not word.isdecimal()), [int(word) for word in words if word.isdecimal()]

    kinds = list(dict.fromkeys(split(figure)[0] for figure in figures))
    return sorted(figures, key=lambda figure: (kinds.index(split(figure)[0]), split(figure)[1]))


def plot_operators(report: BenchmarkReport, path: str) -> None:
    """A bar for the fraction of the limit of each operator and number of rows. Raises UserError as `plot_ratios`."""
    times = report.details["times"]
    names = list(dict.fromkeys(each["operator"] for each in times))
    loads = sorted({each["rows"] for each in times})
    height = 0.8 / len(loads)
    picture, axes = new_picture((9, 1.8 + 0.13 * len(loads) * len(names)))
    colours = _pyplot().get_cmap("viridis")
    for number, rows in enumerate(loads):
        found = [each for each in times if each["rows"] == rows]
        places = [names.index(each["operator"]) + (number - (len(loads) - 1) / 2) * height for each in found]
        colour = colours(number / max(1, len(loads) - 1))
        axes.barh(places, [100 * each["fraction"] for each in found], height=height, color=colour, label=str(rows))
    axes.axvline(100.0, color="black", linewidth=0.8)
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_xlabel(f"per cent of the limit ({report.details['limits_text']})")
    picture.legend(title="rows", fontsize="small", loc="outside right center")
    save_report_picture(picture, report, path)


def plot_transports(report: BenchmarkReport, path: str) -> None:
    """Latency and bandwidth of round trips over size, one core's copying as the limit. Raises UserError as `plot_ratios`."""
    picture, (left, right) = new_picture((12, 5), 2)
    curves = curves_of(report)
    limit = dict(curves.pop(LIMIT, []))
    for name, points in curves.items():
        ours = any(figure.about.get("scheme") == name for figure in report.figures)
        style = {"label": name, "linestyle": "-"} if ours else {"label": f"{name} (peer)", "linestyle": "--"}
        sizes, microseconds = zip(*points, strict=True)
        rates = [COPIES_PER_ROUND_TRIP * size / (1e3 * each) for size, each in points]
        for axes, values in ((left, microseconds), (right, rates)):
            axes.plot(sizes, values, marker="o", markersize=3, **style)
    if limit:
        style = {"label": "memcpy, one core", "color": "black", "linestyle": ":"}
        left.plot(list(limit), [COPIES_PER_ROUND_TRIP * size / (1e3 * rate) for size, rate in limit.items()], **style)
        right.plot(list(limit), list(limit.values()), **style)
    for axes, title, unit in ((left, "round trip", "microseconds"), (right, "bandwidth, both ways", "GB/s")):
        axes.set(xscale="log", yscale="log", xlabel="bytes", ylabel=unit, title=title)
        axes.grid(visible=True, which="major", alpha=0.3)
    picture.legend(*left.get_legend_handles_labels(), fontsize="small", loc="outside right center")
    save_report_picture(picture, report, path)


def curves_of(report: BenchmarkReport) -> dict[str, list[tuple[int, float]]]:
    """name -> (bytes, median) by size: round trips of each transport and each peer in microseconds, and `LIMIT` in GB/s."""
    curves: dict[str, dict[int, float]] = {}
    for figure in report.figures:
        if "bytes" not in figure.about or "scheme" not in figure.about:
            continue
        size = figure.about["bytes"]
        curves.setdefault(figure.about["scheme"], {})[size] = figure.ours.median
        if figure.peer is not None and figure.theirs is not None:
            curves.setdefault(figure.peer, {})[size] = figure.theirs.median
    return {name: sorted(points.items()) for name, points in curves.items()}


def new_picture(inches: tuple[float, float], num_diagrams: int = 1) -> tuple[Any, Any]:
    """(picture, its diagram or diagrams)."""
    picture, axes = _pyplot().subplots(1, num_diagrams, figsize=inches, layout="constrained")
    return picture, axes


def save_report_picture(picture: Any, report: BenchmarkReport, path: str) -> None:
    """Save with the benchmark as the title and the machine below."""
    picture.suptitle(report.title)
    width = int(picture.get_figwidth() * 20)  # characters of this size
    picture.supxlabel("\n".join(textwrap.wrap(str(report.machine), width)), fontsize="x-small")
    save_picture(picture, path)


def save_picture(picture: Any, path: str) -> None:
    """Raises LostOutputError when the file cannot be written."""
    try:
        picture.savefig(path)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error).splitlines()[0]
        raise LostOutputError(f"--plot {path}: cannot be written ({reason}); give a .svg, .png or .pdf in an existing folder") from error


def _pyplot() -> Any:
    """matplotlib without a window, with reproducible SVG files."""
    try:
        import matplotlib
    except ImportError:
        raise UserError("--plot needs matplotlib; pip install matplotlib") from None
    matplotlib.use("agg")
    matplotlib.rcParams["svg.hashsalt"] = "flowrt"
    from matplotlib import pyplot

    return pyplot


def check_plot(path: str | None) -> None:
    """Raises UserError before an hour of measuring for a plot that cannot be written after it."""
    if path is None:
        return
    if Path(path).suffix not in FORMATS:
        raise UserError(f"--plot {path}: unknown format; end its name with {', '.join(FORMATS)}")
    check_writable(path, "--plot")
    _pyplot()
