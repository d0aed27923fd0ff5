"""What a request log costs, and how long a resume takes.

Cost: one graph with and without a log, in turns. Resume: a graph opens a log as a death of the launcher leaves it, and runs until each open
request has its next token.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import time
from contextlib import aclosing
from pathlib import Path

from flowrt.actors.outputs import TokenEvent
from flowrt.api import open_graph, read_graph
from flowrt.bench.cases.case_options import DecodeOptions
from flowrt.bench.cases.decode import measure_setting, prompts_for, read_served_graph
from flowrt.bench.measure.benchmark import Results, Trial, open_all
from flowrt.bench.measure.decoding import GraphSide
from flowrt.bench.report.figures import Figure, Target
from flowrt.bench.report.report import print_progress
from flowrt.gateway.log_contents import read_log
from flowrt.graph.model import Graph
from flowrt.system.log_files import open_log_folder

NAMES = "with a request log", "without"
TARGET = Target(0.97, at_most=False)  # of the throughput without
RESUME_TARGET = Target(2.0)  # seconds from the ready graph to the next token of each request, replay included


def read_graphs(graph_file: Path, model: Path | None, options: DecodeOptions, folder: Path, synced: bool) -> tuple[Graph, Graph]:
    """(with, without) a log in `folder`. Raises UserError for what cannot be measured."""
    keys = [f"reliability.request_log={folder / 'log'}", f"reliability.request_log_sync={'true' if synced else 'false'}"]
    logged, plain = (read_served_graph(graph_file, model, options, [*options.overrides, *more]) for more in (keys, []))
    return logged, plain


async def measure(graph_file: Path, model: Path | None, options: DecodeOptions, synced: bool) -> Results:
    with tempfile.TemporaryDirectory(prefix="flowrt-bench-") as name:
        folder = Path(name)
        graphs = read_graphs(graph_file, model, options, folder, synced)
        prompts = prompts_for(graphs[0], options)
        left = folder / "left"
        print_progress("loading two graphs")
        async with open_all(map(open_graph, graphs)) as running:
            sides = list(map(GraphSide, running, NAMES))
            async for result in measure_setting(sides, options, "throughput", TARGET):
                yield result

            async def leave_log() -> None:
                """As a death would leave it: each request is open and has a token."""
                shutil.copytree(folder / "log", left)

            await sides[0].run(prompts, options.new_tokens, on_prefilled=leave_log)
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
