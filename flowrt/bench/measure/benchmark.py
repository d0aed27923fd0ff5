"""`run_benchmark`: measures the sides of each trial in turns, then prints and writes the report."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from flowrt.bench.peers.child import new_event_loop
from flowrt.bench.report.figures import MAX_PAIRS, MIN_PAIRS, Figure, Target
from flowrt.bench.report.report import BenchmarkReport, Machine, ReportSection, new_console, print_progress, print_report
from flowrt.system.output_file import json_text, write_file

BLOCK_SECONDS = 0.05  # of one measurement of something short: long beside a wake-up, short beside the drift of a machine's load

V = TypeVar("V")
C = TypeVar("C")
Measure = Callable[[], Awaitable[V]]


@dataclass(frozen=True)
class Trial(Generic[V]):
    """Sides that are measured in turns, and the figures that `values[side][pair]` give."""

    sides: Sequence[Measure[V]]
    figures: Callable[[list[list[V]]], Sequence[Figure]]
    values: list[list[V]] = field(default_factory=list)  # filled by `measure_trial`

    @classmethod
    def paired(
        cls, name: str, unit: str, ours: Measure[float], peer: str, theirs: Measure[float], target: Target | None = None
    ) -> Trial[float]:
        """One figure: the ratio of `ours` to `theirs`."""
        return Trial((ours, theirs), lambda values: [Figure.paired(name, unit, values[0], peer, values[1], target)])


Result = Trial[Any] | Figure | ReportSection | str
Results = AsyncGenerator[Result, None]


def run_benchmark(
    name: str,
    results: Results,
    num_pairs: int,
    json: str | None = None,
    details: Mapping[str, Any] | None = None,
    command: str = BenchmarkReport.command,
) -> BenchmarkReport:
    """Measures every trial of `results` while the iterator waits, with what it opened still open. A text is a note of the report."""
    machine = Machine.here()
    figures: list[Figure] = []
    sections: list[ReportSection] = []
    notes: list[str] = []

    async def collect() -> None:
        async with aclosing(results):  # an error of a trial closes what the iterator has opened, while the loop runs
            async for result in results:
                if isinstance(result, str):
                    notes.append(result)
                    print_progress(result)
                elif isinstance(result, ReportSection):
                    sections.append(result)
                else:
                    new = [result] if isinstance(result, Figure) else await measure_trial(result, num_pairs)
                    figures.extend(new)
                    print_figures(new)

    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(collect())
    report = BenchmarkReport(name, machine.afterwards(), figures, notes, sections, details or {}, command)
    print_report(report, new_console(json))
    if json is not None:
        write_file(json, json_text(report.record()))
    return report


def print_figures(figures: Iterable[Figure]) -> None:
    """Prints them as progress: what an interrupted benchmark has until then."""
    for each in figures:
        print_progress(f"{each.name}: {each.ours.text(each.unit)}" + (f", {each.ratio.text()} of {each.peer}" if each.ratio else ""))


async def measure_trial(trial: Trial[V], num_pairs: int) -> Sequence[Figure]:
    """The figures of `num_pairs` pairs after one round that is not counted; of MAX_PAIRS when a verdict of a claim is still open."""
    for side in trial.sides:
        await side()
    trial.values[:] = [[] for _ in trial.sides]
    await _take_turns(trial, range(num_pairs))
    figures = trial.figures(trial.values)
    if MIN_PAIRS <= num_pairs < MAX_PAIRS and any(figure.verdict == "undecided" for figure in figures):
        print_figures(figures)
        print_progress(f"{figures[0].name}: undecided after {num_pairs} pairs, measuring {MAX_PAIRS}")
        await _take_turns(trial, range(num_pairs, MAX_PAIRS))
        figures = trial.figures(trial.values)
    return figures


async def _take_turns(trial: Trial[Any], pairs: range) -> None:
    for pair in pairs:
        for side in turn_order(pair, len(trial.sides)):
            trial.values[side].append(await trial.sides[side]())


def turn_order(pair: int, num_sides: int = 2) -> list[int]:
    """The order of the sides in a pair; each goes first equally often."""
    first = pair % num_sides
    return [*range(first, num_sides), *range(first)]


@asynccontextmanager
async def open_all(contexts: Iterable[AbstractAsyncContextManager[C]]) -> AsyncIterator[list[C]]:
    """Opens one after the other, so that all are open while their sides work in turns."""
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(each) for each in contexts]


async def seconds_per_call(call: Callable[[], Awaitable[object]]) -> float:
    """The mean over BLOCK_SECONDS of calls, at least one."""
    start, num_calls = time.perf_counter(), 0
    while (seconds := time.perf_counter() - start) < BLOCK_SECONDS or not num_calls:
        await call()
        num_calls += 1
    return seconds / num_calls
