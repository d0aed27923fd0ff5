"""What detector, failover and hedging cost without failures: one graph with and without them, in turns.

Both graphs are loaded, and the idle one still sends its heartbeats, of some 15 us each: this small part of the cost falls on both sides.
"""

from __future__ import annotations

from pathlib import Path

from flowrt.api import open_graph
from flowrt.bench.cases.case_options import DecodeOptions
from flowrt.bench.cases.decode import measure_setting, read_served_graph
from flowrt.bench.measure.benchmark import Results, open_all
from flowrt.bench.measure.decoding import GraphSide
from flowrt.bench.report.figures import Target
from flowrt.bench.report.report import print_progress
from flowrt.errors import UserError
from flowrt.graph.model import Graph

KEYS = {"detector": ("true", "false"), "recovery": ("fine", "off"), "hedge": ("true", "false")}  # key -> on, off
NAMES = "with reliability", "without"
TARGET = Target(0.97, at_most=False)  # of the throughput without


def read_graphs(graph_file: Path, model: Path | None, options: DecodeOptions) -> tuple[Graph, Graph]:
    """(with, without): they differ in `KEYS` alone. Raises UserError for what cannot be measured."""
    switched = [[*options.overrides, *(f"reliability.{key}={values[side]}" for key, values in KEYS.items())] for side in (0, 1)]
    on, off = (read_served_graph(graph_file, model, options, overrides) for overrides in switched)
    if on.processes == "one":
        raise UserError(f"{graph_file}: all workers share one process, so none is watched; use --set deploy.processes=many")
    return on, off


async def measure(graphs: tuple[Graph, Graph], options: DecodeOptions) -> Results:
    """The throughput of `read_graphs` in turns, and whether their tokens agree."""
    print_progress("loading two graphs")
    async with open_all(map(open_graph, graphs)) as running:
        async for result in measure_setting(list(map(GraphSide, running, NAMES)), options, "throughput", TARGET):
            yield result
