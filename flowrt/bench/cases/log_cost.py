"""What a request log costs, and how long a resume takes.

Cost: one graph with and without a log, in turns. Resume: a graph opens a log as a death of the launcher leaves it, and runs until each open
request has its next token.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing
from pathlib import Path

from flowrt.actors.outputs import TokenEvent
from flowrt.api import open_graph, read_graph
from flowrt.bench.cases.case_options import DecodeOptions
from flowrt.bench.cases.decode import measure_batch
from flowrt.bench.measure.benchmark import Result, Trial
from flowrt.bench.measure.decoding import Prompts, prompts_of
from flowrt.bench.measure.graph_side import GraphSide, check_limits
from flowrt.bench.measure.memory import served_model
from flowrt.bench.report.figures import Figure, Target
from flowrt.bench.report.report import print_progress
from flowrt.gateway.log_contents import read_log
from flowrt.graph.model import Graph
from flowrt.graph.numerics import numerics_text
from flowrt.operators.families.registry import read_model_config
from flowrt.system.log_files import open_log_folder

NAMES = "with a request log", "without"
TARGET = Target(0.97, at_most=False)  # of the throughput without
RESUME_TARGET = Target(2.0)  # seconds from the ready graph to the next token of each request, replay included


def read_graphs(graph_file: Path, model: Path | None, options: DecodeOptions, folder: Path, synced: bool) -> tuple[Graph, Graph]:
    """(with, without) a log in `folder`. Raises UserError for what cannot be measured."""
    keys = [f"reliability.request_log={folder / 'log'}", f"reliability.request_log_sync={'true' if synced else 'false'}"]
    logged, plain = (read_graph(graph_file, [*options.overrides, *more], model) for more in (keys, []))
    served_model(logged)
    check_limits(logged, options.batch, options.prompt_tokens, options.new_tokens)
    return logged, plain


async def measure(graph_file: Path, model: Path | None, options: DecodeOptions, synced: bool) -> AsyncIterator[Result]:
    with tempfile.TemporaryDirectory(prefix="flowrt-bench-") as name:
        folder = Path(name)
        graphs = read_graphs(graph_file, model, options, folder, synced)
        of_model = served_model(graphs[0])
        prompts = prompts_of(options.batch[0], options.prompt_tokens, read_model_config(Path(of_model.path)).vocab_size)
        left = folder / "left"
        print_progress("loading two graphs")
        async with AsyncExitStack() as stack:
            sides = [GraphSide(await stack.enter_async_context(open_graph(graph)), NAMES[side]) for side, graph in enumerate(graphs)]
            label = f"{of_model.dtype}, {numerics_text(graphs[0])}"
            async for result in measure_batch(sides, prompts, label, options, {}, {"throughput": TARGET}):
                yield result
            await _leave_log(sides[0], prompts, options.new_tokens, folder / "log", left)
        print_progress(f"resuming {len(prompts)} requests")
        resumed = read_graph(graph_file, [*options.overrides, f"reliability.request_log={folder / 'resumed'}"], model)

        async def resume() -> dict[str, float]:
            shutil.rmtree(folder / "resumed", ignore_errors=True)
            shutil.copytree(left, folder / "resumed")
            return await _resume(resumed, folder / "resumed")

        def figures(values: list[list[dict[str, float]]]) -> list[Figure]:
            about = f"{len(prompts)} open requests"
            return [
                Figure.alone(f"start of the graph to the next token of {about}", "s", [each["all"] for each in values[0]]),
                Figure.alone("  of it: ready to the next token", "s", [each["tokens"] for each in values[0]], RESUME_TARGET),
            ]

        yield Trial([resume], figures)


async def _leave_log(side: GraphSide, prompts: Prompts, new_tokens: int, log: Path, left: Path) -> None:
    """Copy the log while each request is open and has a token: so a death would leave it."""

    async def copy() -> None:
        shutil.copytree(log, left)

    await side.run(prompts, new_tokens, on_prefilled=copy)


async def _resume(graph: Graph, log: Path) -> dict[str, float]:
    """Seconds until each open request has a token that was not in the log."""
    opened = open_log_folder(log)
    num_known = {number: len(request.output) for number, request in read_log(opened).requests.items()}
    opened.close()
    began = time.perf_counter()
    async with open_graph(graph, resume=True) as running:
        ready = time.perf_counter()

        async def wait_next(index: int) -> None:
            async with aclosing(running.follow(index)) as events:
                async for event in events:
                    if isinstance(event, TokenEvent) and event.index >= num_known[index]:
                        return

        await asyncio.gather(*map(wait_next, running.resumed))
        ended = time.perf_counter()
    return {"all": ended - began, "tokens": ended - ready}
