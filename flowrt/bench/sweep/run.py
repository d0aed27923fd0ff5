"""Runs the variants of a sweep file: in virtual time, or between real processes in alternating pairs."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from msgspec.structs import asdict

from flowrt.api import RunningGraph, open_graph
from flowrt.bench.cases.small_model import write_small_model
from flowrt.bench.measure.benchmark import Results, Trial, open_all
from flowrt.bench.measure.modelled import modelled_run, simulated_run, stop_process
from flowrt.bench.measure.modelled_traffic import simulated_traffic
from flowrt.bench.report.figures import Figure, Spread
from flowrt.bench.report.report import print_progress
from flowrt.bench.sweep.metrics import METRICS, MeasuredVariant
from flowrt.bench.sweep.sweep_file import ComparedFigure, DecodeSection, Names, Sweep
from flowrt.document import with_values
from flowrt.emulation import emulation_report
from flowrt.errors import UserError, nearest
from flowrt.graph.file import build_graph, known_schemes
from flowrt.graph.model import Graph
from flowrt.graph.recovery import pipelines
from flowrt.launcher.model_facts import facts_of
from flowrt.planner.traffic import Traffic, parse_traffic

Measured = Mapping[Names, Sequence[MeasuredVariant]]  # by variant, one of each pair


@dataclass(frozen=True)
class Variant:
    """One variant and what it runs: traffic, or decoding of `batch` sequences."""

    names: Names
    graph: Graph
    load: Traffic | DecodeSection
    batch: int = 0

    def simulate(self) -> MeasuredVariant:
        """In virtual time."""
        if isinstance(self.load, Traffic):
            return MeasuredVariant(self.graph, simulated_traffic(self.graph, self.load))
        decode = self.load
        run = simulated_run(self.graph, self.batch, decode.new_tokens, decode.stop, decode.stop_seconds, decode.apart_seconds)
        return MeasuredVariant(self.graph, run, self.batch)

    async def measure(self, running: RunningGraph) -> MeasuredVariant:
        """Between real processes, of a variant that decodes."""
        decode = self.load
        assert isinstance(decode, DecodeSection)
        stop = partial(stop_process, running, decode.stop) if decode.stop else None
        run = await modelled_run(running, self.batch, decode.new_tokens, stop, decode.stop_seconds, decode.apart_seconds)
        return MeasuredVariant(self.graph, run, self.batch)

    async def lateness(self, running: RunningGraph, dilation: float) -> str:
        """How the processes were slower than their model, but for the one that stops; "" when they were not."""
        decode = self.load
        assert isinstance(decode, DecodeSection)
        counters = [found.emulation for name, found in (await running.statistics()).items() if name != decode.stop]
        report = emulation_report(dilation, [each for each in counters if each is not None])
        return f"{', '.join(self.names)}: {'; '.join(report.sentences)}" if report.void else ""


def read_variant(sweep: Sweep, names: Names, models: Path, dilation: float) -> Variant:
    """The variant, with its small model in the folder `models`. Raises UserError."""
    document, sections = sweep.document_of(names), sweep.sections_of(names)
    if (sections.decode is None) == (sections.traffic is None):
        document.fail((), "a variant has one of decode: and traffic:; write what it runs")
    # As in virtual time: no part is computed twice.
    values: dict[str, Any] = {"flowrt": 1, "emulate.dilation": dilation, "reliability.hedge": False}
    if (shape := sections.small_model) is not None:
        model = models / "-".join(map(str, asdict(shape).values()))
        if not model.exists():
            write_small_model(model, **asdict(shape))
        values["model.path"] = str(model)
    given = with_values(document.below("graph"), [(key, value, document.where(("graph",))) for key, value in values.items()])
    folder = Path(document.name).absolute().parent
    graph = build_graph(given, folder, None, facts_of, known_schemes())
    if (section := sections.traffic) is not None:
        try:
            load = section.load if "=" in section.load else str(folder / section.load)
            return Variant(names, graph, parse_traffic(load, section.requests).scaled(section.factor))
        except UserError as error:
            raise UserError(f"{document.where(('traffic', 'load'))}: {error}") from None
    decode = sections.decode
    assert decode is not None
    if decode.stop and decode.stop not in graph.process_names():
        document.fail(("decode", "stop"), f"there is no process {decode.stop!r}; {nearest(decode.stop, graph.process_names())}")
    return Variant(names, graph, decode, decode.batch or graph.group_limits().max_num_seqs * len(pipelines(graph)))


def measure_sweep(sweep: Sweep, dilation: float) -> Results:
    """All figures of the file. `dilation`: of real processes; virtual time ignores it. A variant whose processes were slower than its model
    adds a note; one that it stops does not count. Raises UserError."""
    if sweep.is_real:
        return _measured(sweep, dilation)
    os.environ["OMP_NUM_THREADS"] = "1"  # before a worker imports torch: its small products wait for no other thread
    return _given(_simulated(sweep))  # now: a simulation has an event loop of its own


async def _given(figures: Sequence[Figure]) -> Results:
    for figure in figures:
        yield figure


def _simulated(sweep: Sweep) -> list[Figure]:
    found: dict[Names, Sequence[MeasuredVariant]] = {}
    with TemporaryDirectory(prefix="flowrt-bench-") as folder:
        for names in _variants_of(sweep.figures):
            print_progress(f"{', '.join(names)}, in virtual time")
            found[names] = [read_variant(sweep, names, Path(folder), dilation=1.0).simulate()]
        return [exact(figure_of(each, found)) for each in sweep.figures]


async def _measured(sweep: Sweep, dilation: float) -> Results:
    with TemporaryDirectory(prefix="flowrt-bench-") as folder:
        for figures in _compared_together(sweep.figures):
            variants = [read_variant(sweep, names, Path(folder), dilation) for names in _variants_of(figures)]
            if any(isinstance(each.load, Traffic) for each in variants):
                sweep.document.fail((), "traffic runs in virtual time; leave out --processes")
            async with aclosing(_compare(variants, figures, dilation)) as results:
                async for result in results:
                    yield result


async def _compare(variants: Sequence[Variant], figures: Sequence[ComparedFigure], dilation: float) -> Results:
    """The figures of variants that are open at the same time, and notes on those that were slower than their model."""
    print_progress(f"loading {len(variants)} graphs")
    async with open_all(open_graph(each.graph) for each in variants) as running:
        sides = [partial(variant.measure, each) for variant, each in zip(variants, running, strict=True)]
        names = [each.names for each in variants]
        yield Trial(sides, lambda values: [figure_of(each, dict(zip(names, values, strict=True))) for each in figures])
        for variant, each in zip(variants, running, strict=True):
            if note := await variant.lateness(each, dilation):
                yield note


def figure_of(figure: ComparedFigure, measured: Measured) -> Figure:
    """The figure of these runs."""
    section, metric = figure.section, METRICS[figure.metric]

    def values(names: Names) -> list[float]:
        found = [replace(each, at=section.at, below_tokens=section.below_tokens) for each in measured[names]]
        return [metric.value(each) * metric.factor for each in found]

    ours = values(figure.of)
    if figure.against is None:
        return Figure.alone(figure.label, metric.unit, ours, section.target, **figure.about)
    return Figure.paired(figure.label, metric.unit, ours, figure.peer, values(figure.against), section.target, **figure.about)


def exact(figure: Figure) -> Figure:
    """The figure of runs in virtual time, of which each repetition would be equal."""

    def certain(spread: Spread | None) -> Any:
        return spread and replace(spread, low=spread.median, high=spread.median)

    return replace(figure, ours=certain(figure.ours), theirs=certain(figure.theirs), ratio=certain(figure.ratio))


def _variants_of(figures: Sequence[ComparedFigure]) -> list[Names]:
    return list(dict.fromkeys(names for each in figures for names in (each.of, each.against) if names is not None))


def _compared_together(figures: Sequence[ComparedFigure]) -> Iterator[list[ComparedFigure]]:
    """The figures in groups that share no variant: each group is measured in turns of its own, and only its graphs are open."""
    left = list(figures)
    while left:
        group, variants = [left.pop(0)], set[Names]()
        while len(variants) < len(found := set(_variants_of(group))):
            variants = found
            group += [each for each in left if variants & set(_variants_of([each]))]
            left = [each for each in left if each not in group]
        yield group
