"""The picture of a trace in docs/slow.md: `python docs/pictures/trace.py`, which writes trace.svg beside this file.

It simulates one request on emulated hardware in virtual time, so the picture is the same on every machine, writes the trace file, and draws
the first layers of a step from what it reads back.
"""

from __future__ import annotations

import sys
from itertools import pairwise
from pathlib import Path

import matplotlib

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from traces.perfetto_reader import ReadSlice, ReadTrace, check_flows, read_trace  # noqa: E402

from flowrt.api import read_graph  # noqa: E402
from flowrt.sampling_params import SamplingParams  # noqa: E402
from flowrt.simulation.case import Case, SimulatedRequest  # noqa: E402
from flowrt.simulation.cases import run_case  # noqa: E402
from flowrt.simulation.network_conditions import CALM  # noqa: E402
from flowrt.simulation.simulated_trace import SimulatedTrace  # noqa: E402
from flowrt.trace.perfetto_file import perfetto_bytes  # noqa: E402
from flowrt.trace.summary import summarize, summary_lines  # noqa: E402
from flowrt.trace.timeline import timelines_of  # noqa: E402

DILATION, STEP, LAYERS = 1000, 3, (0, 1)
GRAPH = {
    "flowrt": 1,
    "model": {"path": str(ROOT / "examples" / "tiny-moe")},
    "deploy": {"attention": {"groups": 1}, "experts": {"servers": 2}, "links": {"attention-experts": {"link": "roce-200g"}}},
    "emulate": {"dilation": DILATION, "compute": {"attention": {"fixed_seconds": 40e-6}, "experts": {"fixed_seconds": 30e-6}}},
}
COLORS = {"node": "#4c78a8", "send": "#f58518", "receive": "#54a24b"}


def simulated_trace() -> ReadTrace:
    requests = tuple(SimulatedRequest((5 + number, 6, 7), SamplingParams(max_tokens=6, ignore_eos=True), 0.0) for number in range(4))
    case = Case(read_graph(GRAPH), requests, conditions=CALM, trace=SimulatedTrace())
    run_case(case)
    assert case.trace is not None
    traces = case.trace.traces()
    print("\n".join(summary_lines(summarize(traces))))
    return read_trace(perfetto_bytes(timelines_of(traces, case.graph)))


def is_shown(each: ReadSlice) -> bool:
    return each.category != "call" and each.values.get("step") == STEP and each.values.get("layer") in LAYERS


def draw(trace: ReadTrace) -> None:
    matplotlib.use("agg")
    matplotlib.rcParams["svg.hashsalt"] = "flowrt"
    from matplotlib import pyplot

    tracks = {key: [each for each in slices if is_shown(each)] for key, slices in trace.tracks.items() if key[1] != "commit"}
    begin = min(each.start for slices in tracks.values() for each in slices)
    names = sorted(tracks, key=lambda key: (key[0], ("receive", "compute", "send").index(key[1])))
    place = {id(each): row for row, key in enumerate(names) for each in tracks[key]}
    figure, axes = pyplot.subplots(figsize=(11, 3.6), layout="constrained")

    def micros(time: int | None) -> float:
        return ((time or 0) - begin) / 1e3 / DILATION

    for row, key in enumerate(names):
        for each in tracks[key]:
            width = max(micros(each.end) - micros(each.start), 0.4)
            axes.barh(row, width, left=micros(each.start), height=0.7, color=COLORS[each.category])
            if each.category == "node" and width > 5:
                label = f"{each.name.rpartition('.')[2] if each.name.startswith('attention') else 'experts'} {each.values['layer']}"
                axes.text(micros(each.start) + width / 2, row, label, ha="center", va="center", fontsize=7, color="white")
    for flow in check_flows(trace).values():
        shown = [each for each in flow if id(each) in place]
        for one, other in pairwise(shown):
            arrow = {"arrowstyle": "->", "color": "#888888", "linewidth": 0.7, "shrinkA": 0, "shrinkB": 0}
            axes.annotate("", (micros(other.start), place[id(other)]), (micros(one.end), place[id(one)]), arrowprops=arrow)
    axes.set_yticks(range(len(names)), [f"{process.split()[0]} {stream}" for process, stream in names], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("microseconds on the modelled hardware")
    figure.savefig(Path(__file__).with_name("trace.svg"))


if __name__ == "__main__":
    draw(simulated_trace())
