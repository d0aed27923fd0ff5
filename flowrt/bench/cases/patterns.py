"""Measures variants of an emulated graph against each other: between processes in alternating pairs, or in virtual time."""

from __future__ import annotations

import math
import os
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from flowrt.api import open_graph, read_graph
from flowrt.bench.cases.small_model import TOP_K, write_small_model
from flowrt.bench.measure.benchmark import Result, Trial
from flowrt.bench.measure.modelled import ModelledRun, modelled_run, simulated_run, stop_process
from flowrt.bench.report.figures import Figure, Spread
from flowrt.bench.report.report import print_progress
from flowrt.emulation import emulation_report
from flowrt.graph.model import Graph

VIRTUAL_DILATION = 100.0  # anything: waiting takes no time there
Runs = Sequence[Sequence[ModelledRun]]  # by variant, then by pair


@dataclass(frozen=True)
class Variant:
    """One graph, as the keys of a graph file without its model, and the batch that it decodes, while the process `stopped` stands still
    for `stop_seconds` of modelled time. All variants of a comparison have one model. `apart_seconds`: from the first request of a group to
    that of the next, so that groups do not take their steps at the same time."""

    name: str
    keys: Mapping[str, Any]
    batch: int
    stopped: str = ""
    stop_seconds: float = math.inf
    apart_seconds: float = 0.0


def one_link(exchange_seconds: float) -> dict[str, Any]:
    """`deploy.links` of emulated links on which every message takes the same time, whatever its size, and occupies them for half of it.

    Without a latency a message between real processes would always be late: its receiver learns when it has passed the sender's NIC.
    """
    half = exchange_seconds / 2
    link = {"latency_seconds": half, "message_seconds": half, "bandwidth_bytes_per_second": 1e15}
    return {"attention-experts": {"link": link}}


def one_row(attention_seconds: float, experts_seconds: float) -> dict[str, Any]:
    """`emulate` of computing that costs so much for each row of a micro-batch in each layer, and nothing per call."""
    return {"compute": {"attention": {"row_seconds": attention_seconds}, "experts": {"row_seconds": experts_seconds / TOP_K}}}


@dataclass(frozen=True)
class Comparison:
    """Variants that are measured together, and the figures that their runs give."""

    variants: Sequence[Variant]
    figures: Callable[[Runs], Sequence[Figure]]
    num_layers: int = 8
    num_experts: int = 8
    new_tokens: int = 8
    top_k: int = TOP_K


def measure(comparisons: Sequence[Comparison], virtual: bool, dilation: float) -> AsyncIterator[Result]:
    """The figures of all comparisons. `dilation`: between processes; in virtual time it changes nothing. A variant that was slower than its
    model adds a note; the process that it stops does not count."""
    if virtual:  # now: a simulation has an event loop of its own
        os.environ["OMP_NUM_THREADS"] = "1"  # before a worker imports torch: its small products wait for no other thread
        return given([figure for each in comparisons for figure in _simulated(each)])
    return _measured(comparisons, dilation)


async def given(figures: Sequence[Figure]) -> AsyncIterator[Result]:
    for figure in figures:
        yield figure


def _simulated(comparison: Comparison) -> Sequence[Figure]:
    runs = []
    with _graphs_of(comparison, VIRTUAL_DILATION) as graphs:
        for variant, graph in zip(comparison.variants, graphs, strict=True):
            print_progress(f"{variant.name}, in virtual time")
            runs.append(
                [simulated_run(graph, variant.batch, comparison.new_tokens, variant.stopped, variant.stop_seconds, variant.apart_seconds)]
            )
    return [exact(figure) for figure in comparison.figures(runs)]


async def _measured(comparisons: Sequence[Comparison], dilation: float) -> AsyncIterator[Result]:
    for comparison in comparisons:
        async with AsyncExitStack() as stack:
            graphs = stack.enter_context(_graphs_of(comparison, dilation))
            print_progress(f"loading {len(graphs)} graphs")
            running = [await stack.enter_async_context(open_graph(graph)) for graph in graphs]
            sides = [
                partial(
                    modelled_run,
                    each,
                    variant.batch,
                    comparison.new_tokens,
                    partial(stop_process, each, variant.stopped) if variant.stopped else None,
                    variant.stop_seconds,
                    variant.apart_seconds,
                )
                for each, variant in zip(running, comparison.variants, strict=True)
            ]
            yield Trial(sides, comparison.figures)
            for variant, each in zip(comparison.variants, running, strict=True):
                counters = {name: found.emulation for name, found in (await each.statistics()).items() if name != variant.stopped}
                report = emulation_report(dilation, [emulation for emulation in counters.values() if emulation is not None])
                if report.void:
                    yield f"{variant.name}: {'; '.join(report.sentences)}"


@contextmanager
def _graphs_of(comparison: Comparison, dilation: float) -> Iterator[list[Graph]]:
    """The graphs of the variants, with their model in a folder that exists meanwhile."""
    with TemporaryDirectory(prefix="flowrt-bench-") as folder:
        model = write_small_model(Path(folder), comparison.num_layers, comparison.num_experts, comparison.top_k)
        keys = {"flowrt": 1, "model": {"path": str(model)}}
        overrides = [f"emulate.dilation={dilation}", "reliability.hedge=false"]  # as in virtual time: no part is computed twice
        yield [read_graph({**keys, **each.keys}, overrides) for each in comparison.variants]


def exact(figure: Figure) -> Figure:
    """The figure of runs in virtual time, of which each repetition would be equal."""

    def certain(spread: Spread | None) -> Any:
        return spread and replace(spread, low=spread.median, high=spread.median)

    return replace(figure, ours=certain(figure.ours), theirs=certain(figure.theirs), ratio=certain(figure.ratio))
