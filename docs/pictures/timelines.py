"""The timelines in docs/slow.md and docs/exchange.md: `PYTHONPATH=tests python docs/pictures/timelines.py`, which writes them beside
this file.

Each panel is a run on emulated hardware in virtual time, drawn from its trace file, so it is the same on every machine. With `--processes`
the patterns run between real processes instead, on hardware that is emulated in real time, and are drawn into one picture.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, takewhile
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import matplotlib
from traces.perfetto_reader import ReadSlice, ReadTrace, check_flows, read_trace

import flowrt
from flowrt.api import read_graph
from flowrt.bench.cases.small_model import TOP_K, write_small_model
from flowrt.sampling_params import SamplingParams
from flowrt.simulation.case import Case, SimulatedRequest
from flowrt.simulation.cases import run_case
from flowrt.simulation.network_conditions import CALM
from flowrt.simulation.simulated_trace import SimulatedTrace
from flowrt.trace.perfetto_file import perfetto_bytes
from flowrt.trace.timeline import timelines_of


def one_link(exchange_seconds: float) -> dict[str, Any]:
    """`deploy.links` of emulated links on which every message takes the same time, whatever its size, and occupies them for half of it."""
    half = exchange_seconds / 2
    return {"attention-experts": {"link": {"latency_seconds": half, "message_seconds": half, "bandwidth_bytes_per_second": 1e15}}}


def one_row(attention_seconds: float, experts_seconds: float) -> dict[str, Any]:
    """`emulate` of computing that costs so much for each row of a micro-batch in each layer, and nothing per call."""
    return {"compute": {"attention": {"row_seconds": attention_seconds}, "experts": {"row_seconds": experts_seconds / TOP_K}}}


DILATION, STEP, NUM_LAYERS, NUM_EXPERTS = 1000, 4, 6, 8
STREAMS = ("receive", "compute", "send")
COLORS = ("#4c78a8", "#f58518", "#54a24b", "#e45756", "#72b7b2", "#b279a2")
MESSAGE_COLORS = {"send": "#f58518", "receive": "#54a24b"}
EXCHANGE = one_link(28e-6)
FIXED = {"compute": {"attention": {"fixed_seconds": 40e-6}, "experts": {"fixed_seconds": 30e-6}}}
PARAMS = SamplingParams(max_tokens=2 * STEP, ignore_eos=True)
EVEN, SLOW_ATTENTION = one_row(100e-6, 100e-6), one_row(300e-6, 100e-6)


@dataclass(frozen=True)
class Panel:
    """One run. `streams`: those shown of each process; `span`: the microseconds shown from the begin of step STEP of attention.0."""

    title: str
    attention: Mapping[str, Any]
    experts: Mapping[str, Any]
    emulate: Mapping[str, Any]
    num_requests: int
    span: float
    link: Mapping[str, Any] | None = None
    streams: Sequence[str] = ("compute",)


def pictures() -> Iterator[tuple[str, Sequence[Panel]]]:
    one, several = {"servers": 1}, {"servers": 1, "batches": {"min_tags": 2, "max_wait_seconds": 1.0}}
    ub = {"attention-experts": {"link": "roce-200g"}}
    yield "trace", [Panel("", {"groups": 1}, {"servers": 2}, FIXED, 4, 340, ub, STREAMS)]
    yield (
        "micro-batches",
        [
            Panel("micro_batches: 1", {"groups": 1}, one, EVEN, 1, 1600),
            Panel("micro_batches: 3", {"groups": 1, "micro_batches": 3}, one, EVEN, 3, 1600),
        ],
    )
    yield (
        "domains",
        [
            Panel("one group, micro_batches: 2", {"groups": 1, "micro_batches": 2}, one, SLOW_ATTENTION, 2, 2400),
            Panel("three domains, micro_batches: 2", {"groups": 3, "domains": 3, "micro_batches": 2}, one, SLOW_ATTENTION, 6, 2400),
        ],
    )
    yield (
        "dispatch",
        [
            Panel("per client", {"groups": 2}, one, EVEN, 5, 2400),
            Panel("counts of all clients", {"groups": 2}, several, EVEN, 5, 2400),
        ],
    )
    yield "colocated", [Panel("servers: colocated", {"groups": 2}, {"servers": "colocated"}, EVEN, 2, 1600)]
    yield "trampoline", [Panel("trampoline: always", {"groups": 1}, {"servers": 3, "trampoline": "always"}, FIXED, 4, 220, ub, STREAMS)]


def keys_of(panel: Panel, model: Path) -> dict[str, Any]:
    """The graph file of a panel."""
    return {
        "flowrt": 1,
        "model": {"path": str(model)},
        "deploy": {"attention": panel.attention, "experts": panel.experts, "links": panel.link or EXCHANGE},
        "emulate": {"dilation": DILATION, **panel.emulate},
        "reliability": {"hedge": False},
    }


def prompts_of(panel: Panel) -> list[tuple[int, ...]]:
    return [(5 + number, 6, 7) for number in range(panel.num_requests)]


async def real_trace(panel: Panel, model: Path) -> ReadTrace:
    """The trace of a run between real processes."""
    with TemporaryDirectory() as directory:
        file = Path(directory) / "run.pftrace"
        async with flowrt.open(keys_of(panel, model), trace=file) as running:
            await asyncio.gather(*(running.complete(list(prompt), PARAMS) for prompt in prompts_of(panel)))
        return read_trace(file.read_bytes())


def simulated_trace(panel: Panel, model: Path) -> ReadTrace:
    requests = tuple(SimulatedRequest(prompt, PARAMS, 0.0) for prompt in prompts_of(panel))
    case = Case(read_graph(keys_of(panel, model)), requests, conditions=CALM, trace=SimulatedTrace())
    run_case(case)
    assert case.trace is not None
    return read_trace(perfetto_bytes(timelines_of(case.trace.traces(), case.graph)))


def draw(axes: Any, panel: Panel, trace: ReadTrace) -> None:
    """A row per stream. Calls have the colour of their group and micro-batch, and the number of their layer."""
    rows = sorted((key for key in trace.tracks if key[1] in panel.streams), key=lambda key: (key[0], STREAMS.index(key[1])))
    shown = {key: list(_with_tags(trace.tracks[key])) for key in rows}
    begin = min(each.start for slices in shown.values() for each in slices if each.values.get("step") == STEP)

    def micros(time: int | None) -> float:
        return ((time or 0) - begin) / 1e3 / DILATION

    def is_shown(each: ReadSlice) -> bool:
        return micros(each.end) > 0 and micros(each.start) < panel.span

    origins = sorted({_origin(each) for slices in shown.values() for each in slices})
    place: dict[int, int] = {}
    for row, key in enumerate(rows):
        for each in filter(is_shown, shown[key]):
            place[id(each)] = row
            width = max(micros(each.end) - micros(each.start), panel.span / 1000)
            color = MESSAGE_COLORS.get(each.category) or COLORS[origins.index(_origin(each)) % len(COLORS)]
            axes.barh(row, width, left=micros(each.start), height=0.7, color=color)
            if each.category == "call" and width > panel.span / 60:
                middle = micros(each.start) + width / 2
                axes.text(middle, row, each.values.get("layer"), ha="center", va="center", fontsize=7, color="white", clip_on=True)
    for flow in check_flows(trace).values() if len(panel.streams) > 1 else ():
        for one, other in pairwise(each for each in flow if id(each) in place):
            arrow = {"arrowstyle": "->", "color": "#888888", "linewidth": 0.7, "shrinkA": 0, "shrinkB": 0}
            axes.annotate("", (micros(other.start), place[id(other)]), (micros(one.end), place[id(one)]), arrowprops=arrow, zorder=0)
    names = [process.split()[0] if panel.streams == ("compute",) else f"{process.split()[0]} {stream}" for process, stream in rows]
    axes.set_yticks(range(len(rows)), names, fontsize=8)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlim(0, panel.span)
    axes.set_title(panel.title, fontsize=9)


def _with_tags(slices: Sequence[ReadSlice]) -> Iterator[ReadSlice]:
    """Messages as they are; calls with the tag of their node `attention` or `experts`, or else of their last node."""
    for number, each in enumerate(slices):
        if each.category == "call":
            nodes = list(takewhile(lambda later: later.depth > 0, slices[number + 1 :]))
            for node in sorted(nodes, key=lambda node: node.name.endswith((".attention", ".experts"))):
                each.values.update(_first_tag(node.values))
        if each.category != "node":
            yield each


def _first_tag(values: Mapping[str, int | str]) -> Mapping[str, int | str]:
    if "tags" not in values:
        return values
    source, _, micro_batch, step, layer = str(values["tags"]).partition(";")[0].split()
    return {"source": source, "micro_batch": int(micro_batch), "step": int(step), "layer": int(layer)}


def _origin(each: ReadSlice) -> tuple[str, int]:
    return str(each.values.get("source", "")), int(each.values.get("micro_batch", 0))


def main() -> None:
    matplotlib.use("agg")
    matplotlib.rcParams["svg.hashsalt"] = "flowrt"
    from matplotlib import pyplot

    is_real = "--processes" in sys.argv[1:]
    drawn: Iterable[tuple[str, Sequence[Panel]]]
    drawn = [("processes", [panel for _, panels in pictures() for panel in panels if panel.title])] if is_real else pictures()
    with TemporaryDirectory() as directory:
        model = write_small_model(Path(directory), NUM_LAYERS, NUM_EXPERTS)
        for name, panels in drawn:
            traces = [asyncio.run(real_trace(panel, model)) if is_real else simulated_trace(panel, model) for panel in panels]
            num_rows = [sum(stream in panel.streams for _, stream in trace.tracks) for panel, trace in zip(panels, traces, strict=True)]
            height = 0.6 + sum(0.3 * rows + 0.45 for rows in num_rows)
            figure, all_axes = pyplot.subplots(
                len(panels), figsize=(11, height), layout="constrained", height_ratios=num_rows, squeeze=False
            )
            for axes, panel, trace in zip(all_axes[:, 0], panels, traces, strict=True):
                draw(axes, panel, trace)
            figure.supxlabel("microseconds on the modelled hardware", fontsize=8)
            figure.savefig(Path(__file__).with_name(f"{name}.svg"), metadata={"Date": None})


if __name__ == "__main__":
    main()
