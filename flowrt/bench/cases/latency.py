"""Inter-token latency of sequences that run, alone or while long prompts arrive: one graph beside others, in turns.

`measure` compares a graph with itself under other settings, for what keeps pauses out of steps (docs/slow.md). `flowrt bench kv-transfer`
uses the same load for prefill workers. Prompts arrive one at a time: the next one when the latest has its first token, so that one is
always being computed and none waits for another.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path

from flowrt.api import RunningGraph, open_graph, read_graph
from flowrt.bench.cases.case_options import LatencyOptions
from flowrt.bench.measure.benchmark import Results, Trial, open_all
from flowrt.bench.measure.decoding import check_limits, follow_tokens
from flowrt.bench.measure.memory import served_model, vocab_size
from flowrt.bench.report.figures import Figure, Target, nearest_rank
from flowrt.bench.report.report import print_progress
from flowrt.errors import UserError
from flowrt.graph.model import Graph
from flowrt.sampling_params import SamplingParams

SHARES = {"p50": 0.5, "p99": 0.99, "longest": 1.0}
ARRIVED_TOKENS = 2  # new tokens of a prompt that arrives: with a prefill worker, its KV is transferred


@dataclass(frozen=True)
class StreamTimes:
    """Holds seconds: between tokens of the sequences, while all run; and to the first tokens of the prompts that arrived meanwhile."""

    between_tokens: list[float] = field(default_factory=list)
    first_tokens: list[float] = field(default_factory=list)


class StreamLoad:
    """Sends the same requests to each graph: `options.streams` sequences, and prompts that arrive while these run."""

    def __init__(self, options: LatencyOptions, vocab_size: int) -> None:
        self._options, self._vocab_size, self._draw = options, vocab_size, random.Random(0)

    async def run(self, graph: RunningGraph) -> StreamTimes:
        """Raises UserError when a request fails."""
        options, found = self._options, StreamTimes()
        times: list[list[float]] = [[] for _ in range(options.streams)]
        began, ended = asyncio.Event(), asyncio.Event()

        async def stream(number: int) -> None:
            async for now in self._tokens(graph, options.prompt_tokens, options.new_tokens):
                times[number].append(now)
                if all(times):
                    began.set()
            ended.set()

        async def arrive() -> None:
            await began.wait()
            while not ended.is_set():
                begin = time.perf_counter()
                tokens = [now async for now in self._tokens(graph, options.arriving_tokens, ARRIVED_TOKENS)]
                found.first_tokens.append(tokens[0] - begin)

        async with asyncio.TaskGroup() as tasks:
            for number in range(options.streams):
                tasks.create_task(stream(number))
            if options.arriving_tokens:
                tasks.create_task(arrive())
        first, last = max(each[0] for each in times), min(each[-1] for each in times)
        for each in times:
            found.between_tokens.extend(after - before for before, after in pairwise(now for now in each if first <= now <= last))
        if not found.between_tokens:
            raise UserError(f"{options.new_tokens} new tokens are too few: no two came while all sequences ran; use more")
        return found

    async def _tokens(self, graph: RunningGraph, num_tokens: int, new_tokens: int) -> AsyncIterator[float]:
        """Yield the times of the tokens of a new prompt."""
        prompt = self._draw.choices(range(3, self._vocab_size), k=num_tokens)
        index = await graph.submit(prompt, SamplingParams(max_tokens=new_tokens, ignore_eos=True))
        async for _ in follow_tokens(graph, index):
            yield time.perf_counter()


def latency_figures(names: Sequence[str], target: Target | None, values: Sequence[Sequence[StreamTimes]]) -> list[Figure]:
    """The latencies of the first side beside those of the other one whose 99th percentile is the best in the median."""
    tails = [[nearest_rank(each.between_tokens, 0.99) for each in side] for side in values]
    best = min(range(1, len(values)), key=lambda side: nearest_rank(tails[side], 0.5))
    pair = values[0], values[best]
    figures = []
    for text, share in SHARES.items():
        ours, theirs = ([nearest_rank(each.between_tokens, share) * 1e3 for each in side] for side in pair)
        claim = target if text == "p99" else None
        figures.append(Figure.paired(f"inter-token latency, {text}, {names[0]}", "ms", ours, names[best], theirs, claim))
    if all(each.first_tokens for side in pair for each in side):
        ours, theirs = ([nearest_rank(each.first_tokens, 0.5) * 1e3 for each in side] for side in pair)
        figures.append(Figure.paired("first token of a prompt that arrives, median", "ms", ours, names[best], theirs))
    return figures


async def measure_streams(graphs: Mapping[str, Graph], options: LatencyOptions, target: Target | None = None) -> Results:
    """The first graph beside the best of the others. All are loaded at once and work in turns."""
    print_progress(f"loading {len(graphs)} graphs")
    async with open_all(map(open_graph, graphs.values())) as running:
        sides = [partial(StreamLoad(options, vocab_size(each.graph)).run, each) for each in running]
        yield Trial(sides, partial(latency_figures, list(graphs), target))


async def measure_first(graphs: Mapping[str, Graph], options: LatencyOptions) -> Results:
    """The first request of a graph that was just started, beside that of the others. Each measurement starts the graph anew."""

    async def first_seconds(graph: Graph) -> float:
        prompt = random.Random(0).choices(range(3, vocab_size(graph)), k=options.prompt_tokens)
        async with open_graph(graph) as running:
            begin = time.perf_counter()
            completion = await running.complete(prompt, max_tokens=1, ignore_eos=True)
            if completion.finish_reason != "length":
                raise UserError(f"a request ended with {completion.finish_reason}: {completion.error}")
            return 1e3 * (time.perf_counter() - begin)

    ours, theirs = graphs
    sides = [partial(first_seconds, graph) for graph in graphs.values()]
    yield Trial.paired(f"first token of the first request, {ours}", "ms", sides[0], theirs, sides[1])


def read_graphs(graph_file: Path, model: Path | None, options: LatencyOptions) -> dict[str, Graph]:
    """The graph with `options.overrides`, and with `options.against` instead. Raises UserError for what cannot be measured."""
    names = " ".join(options.overrides) or "as in the file", " ".join(options.against) or "as in the file"
    if names[0] == names[1]:
        raise UserError("both graphs are the same; give the settings to measure with --set, and those to compare with --against-set")
    graphs = {name: read_graph(graph_file, each, model) for name, each in zip(names, (options.overrides, options.against), strict=True)}
    for graph in graphs.values():
        served_model(graph)
        check_limits(graph, (options.streams,), options.prompt_tokens, options.new_tokens)
    return graphs


def measure(graphs: Mapping[str, Graph], options: LatencyOptions) -> Results:
    return measure_first(graphs, options) if options.first else measure_streams(graphs, options)
