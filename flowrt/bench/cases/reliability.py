"""What detector, failover and hedging cost without failures: one graph with and without them, in turns.

Both graphs are loaded, and the idle one still sends its heartbeats, of some 15 us each: this small part of the cost falls on both sides.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

from flowrt.api import open_graph, read_graph
from flowrt.bench.cases.case_options import DecodeOptions
from flowrt.bench.cases.decode import measure_batch
from flowrt.bench.measure.benchmark import Result
from flowrt.bench.measure.decoding import prompts_of
from flowrt.bench.measure.graph_side import GraphSide, check_limits
from flowrt.bench.measure.memory import served_model
from flowrt.bench.report.figures import Target
from flowrt.bench.report.report import print_progress
from flowrt.errors import UserError
from flowrt.graph.model import Graph
from flowrt.graph.numerics import numerics_text
from flowrt.operators.families.registry import read_model_config

KEYS = {"detector": ("true", "false"), "recovery": ("fine", "off"), "hedge": ("true", "false")}  # key -> on, off
NAMES = "with reliability", "without"
TARGET = Target(0.97, at_most=False)  # of the throughput without


def read_graphs(graph_file: Path, model: Path | None, options: DecodeOptions) -> tuple[Graph, Graph]:
    """(with, without): they differ in `KEYS` alone. Raises UserError for what cannot be measured."""
    switched = [[*options.overrides, *(f"reliability.{key}={values[side]}" for key, values in KEYS.items())] for side in (0, 1)]
    on, off = (read_graph(graph_file, overrides, model) for overrides in switched)
    served_model(on)
    if on.processes == "one":
        raise UserError(f"{graph_file}: all workers share one process, so none is watched; use --set deploy.processes=many")
    check_limits(on, options.batch, options.prompt_tokens, options.new_tokens)
    return on, off


async def measure(graphs: tuple[Graph, Graph], options: DecodeOptions) -> AsyncIterator[Result]:
    """The throughput of `read_graphs` in turns, and whether their tokens agree."""
    (batch,) = options.batch
    model = served_model(graphs[0])
    prompts = prompts_of(batch, options.prompt_tokens, read_model_config(Path(model.path)).vocab_size)
    print_progress("loading two graphs")
    async with AsyncExitStack() as stack:
        sides = [GraphSide(await stack.enter_async_context(open_graph(graph)), NAMES[side]) for side, graph in enumerate(graphs)]
        label = f"{model.dtype}, {numerics_text(graphs[0])}"
        async for result in measure_batch(sides, prompts, label, options, {}, {"throughput": TARGET}):
            yield result
