"""Pictures of what a benchmark found, for the documentation and for whoever tunes. Needs matplotlib.

Here: `plot_decode`, `plot_operators`, `plot_transports`, and what other pictures need (`new_picture`, `save_picture`). Not here: measuring,
tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flowrt.bench.report import Report
from flowrt.errors import UserError

FORMATS = (".svg", ".png", ".pdf")
COPIES = 2  # of a round trip: one each way is the least
LIMIT = "memcpy"
_COLOURS = {"met": "#2a7f62", "not met": "#b5443a", "not resolved": "#c9a227", None: "#5b7083"}


def plot_decode(report: Report, path: str) -> None:
    """The ratio of each figure with its interval, and its target as a mark. Raises UserError when the file cannot be written."""
    pyplot = _pyplot()
    figures = [figure for figure in report.figures if figure.ratio is not None]
    picture, axes = pyplot.subplots(figsize=(8, 0.6 + 0.38 * len(figures)), layout="constrained")
    for place, figure in enumerate(figures):
        ratio = figure.ratio
        assert ratio is not None
        axes.barh(place, ratio.median, color=_COLOURS[figure.verdict], height=0.6)
        if ratio.low > float("-inf"):
            axes.plot([ratio.low, ratio.high], [place, place], color="black", linewidth=1.2)
        if figure.target is not None:
            axes.plot([figure.target.bound] * 2, [place - 0.42, place + 0.42], color="black", linewidth=2.0)
    axes.axvline(1.0, color="grey", linewidth=0.8, linestyle=":")
    axes.set_yticks(range(len(figures)), [f"{figure.name}, to {figure.peer}" for figure in figures])
    axes.invert_yaxis()
    axes.set_xlabel("tokens/s, ratio to the peer (line: 95 % interval; thick mark: target)")
    save_picture(picture, path)


def plot_operators(fractions: Sequence[tuple[str, int, float]], limits: str, path: str) -> None:
    """A bar per operator and number of rows, of (operator, rows, fraction of the limit). Raises UserError as `plot_decode`."""
    pyplot = _pyplot()
    names = list(dict.fromkeys(operator for operator, _, _ in fractions))
    loads = list(dict.fromkeys(rows for _, rows, _ in fractions))
    height = 0.8 / len(loads)
    picture, axes = pyplot.subplots(figsize=(8, 1.2 + 0.13 * len(loads) * len(names)), layout="constrained")
    colours = pyplot.get_cmap("viridis")
    for number, rows in enumerate(loads):
        found = [(operator, fraction) for operator, load, fraction in fractions if load == rows]
        places = [names.index(operator) + (number - (len(loads) - 1) / 2) * height for operator, _ in found]
        colour = colours(number / max(1, len(loads) - 1))
        axes.barh(places, [100 * fraction for _, fraction in found], height=height, color=colour, label=f"{rows} rows")
    axes.axvline(100.0, color="black", linewidth=0.8)
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_xlabel("per cent of the limit")
    axes.set_title(limits, fontsize="small")
    axes.legend(fontsize="small", loc="lower right")
    save_picture(picture, path)


def plot_transports(report: Report, path: str) -> None:
    """Latency and bandwidth of round trips over size, one core's copying as the limit. Raises UserError as `plot_decode`."""
    pyplot = _pyplot()
    picture, (left, right) = pyplot.subplots(1, 2, figsize=(12, 5), layout="constrained")
    curves = curves_of(report)
    limit = dict(curves.pop(LIMIT, []))
    for name, points in curves.items():
        ours = any(figure.about.get("scheme") == name for figure in report.figures)
        style: dict[str, Any] = {"label": name, "marker": "o", "markersize": 3, "linestyle": "-" if ours else "--"}
        left.plot([size for size, _ in points], [microseconds for _, microseconds in points], **style)
        right.plot([size for size, _ in points], [COPIES * size / (1e3 * microseconds) for size, microseconds in points], **style)
    if limit:
        style = {"label": "memcpy, one core", "color": "black", "linestyle": ":"}
        left.plot(list(limit), [COPIES * size / (1e3 * rate) for size, rate in limit.items()], **style)
        right.plot(list(limit), list(limit.values()), **style)
    for axes, title, unit in ((left, "round trip", "us"), (right, "bandwidth, both ways", "GB/s")):
        axes.set(xscale="log", yscale="log", xlabel="bytes", ylabel=unit, title=title)
        axes.grid(visible=True, which="major", alpha=0.3)
    left.legend(fontsize="small")
    picture.suptitle(str(report.machine), fontsize="x-small")
    save_picture(picture, path)
    pyplot.close(picture)


def curves_of(report: Report) -> dict[str, list[tuple[int, float]]]:
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


def new_picture(inches: tuple[float, float]) -> tuple[Any, Any]:
    """(picture, its one diagram), for whoever draws elsewhere."""
    picture, axes = _pyplot().subplots(figsize=inches, layout="constrained")
    return picture, axes


def save_picture(picture: Any, path: str) -> None:
    """Raises UserError when the file cannot be written."""
    try:
        picture.savefig(path)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error).splitlines()[0]
        raise UserError(f"--plot {path}: cannot be written ({reason}); give a .svg, .png or .pdf in a folder that is there") from error


def _pyplot() -> Any:
    """matplotlib without a window, and SVG files that are the same each time."""
    try:
        import matplotlib
    except ImportError:
        raise UserError("--plot needs matplotlib; pip install matplotlib") from None
    matplotlib.use("agg")
    matplotlib.rcParams["svg.hashsalt"] = "flowrt"
    from matplotlib import pyplot

    return pyplot


def check_plot(path: str | None) -> None:
    """Raises UserError at once for what would fail after an hour."""
    if path is None:
        return
    _pyplot()
    if Path(path).suffix not in FORMATS:
        raise UserError(f"--plot {path}: draws {', '.join(FORMATS)}; end its name with one of these")
    if not Path(path).absolute().parent.is_dir():
        raise UserError(f"--plot {path}: its folder does not exist")
