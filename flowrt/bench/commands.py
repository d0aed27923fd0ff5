"""The commands: run a benchmark with progress on standard error, print its table, write its JSON.

Not here: options and help (flowrt/cli/bench.py), measuring (a module per benchmark), the layout of a report (report.py).
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path

from rich.console import Console

from flowrt.bench import detector as detector_benchmark
from flowrt.bench import hop as hop_benchmark
from flowrt.bench import links as links_benchmark
from flowrt.bench import m2n as m2n_benchmark
from flowrt.bench import reliability as reliability_benchmark
from flowrt.bench import start as start_benchmark
from flowrt.bench import transports as transports_benchmark
from flowrt.bench.peers import new_event_loop
from flowrt.bench.plots import check_plot, plot_transports
from flowrt.bench.report import Figure, Machine, Report, print_report, write_report
from flowrt.errors import UserError


def hop(num_pairs: int, json: str | None, within_only: bool = False) -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # nothing here is computed; no pool of threads should stand by
    _measure_and_tell("hop", hop_benchmark.measure(num_pairs, between=not within_only), json)


def transports(num_pairs: int, json: str | None, plot: str | None) -> None:
    """The plot goes beside the JSON unless a place is named."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    need_xxhash()
    picture = plot or (str(Path(json).with_suffix(".svg")) if json is not None and json != "-" else None)
    check_plot(picture)
    report = _measure_and_tell("transports", transports_benchmark.measure(num_pairs), json)
    if picture is not None:
        plot_transports(report, picture)
        _say(f"plot: {picture}")


def m2n(num_senders: int, num_receivers: int, num_bytes: int, num_pairs: int, transport: str, json: str | None) -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    need_xxhash()
    _measure_and_tell(
        f"m2n, {num_senders} to {num_receivers}, {num_bytes} bytes",
        m2n_benchmark.measure(num_senders, num_receivers, num_bytes, num_pairs, transport),
        json,
    )


def links(profile: str, dilation: float | None, num_rounds: int, transport: str, json: str | None) -> None:
    _measure_and_tell(f"links, {profile}", links_benchmark.measure(profile, dilation, num_rounds, transport), json)


def detector(num_tries: int, seconds: float, num_workers: int | None, json: str | None) -> None:
    _measure_and_tell("detector", detector_benchmark.measure(num_tries, seconds, num_workers, _say), json)


def reliability(options: reliability_benchmark.Options, json: str | None) -> None:
    graphs = reliability_benchmark.graphs_of(options)
    _measure_and_tell(f"reliability, {options.graph.name}", reliability_benchmark.measure(options, graphs, _say), json)


def need_xxhash() -> None:
    """Raises UserError, rather than a worker's failure later."""
    if importlib.util.find_spec("xxhash") is None:
        raise UserError("this benchmark checks every byte with xxhash; install it: pip install 'flowrt[bench]'")


def start(graph: Path, num_runs: int, json: str | None, model: Path | None = None) -> None:
    machine = Machine.here()
    figures, starts = start_benchmark.measure(graph, num_runs, model)
    details = {"graph": graph.name, "runs": [{"total_seconds": each.total_seconds, **each.part_seconds} for each in starts]}
    tell(Report("start", machine.afterwards(), figures, details=details), json)


def _measure_and_tell(name: str, results: AsyncIterator[Figure | str], json: str | None) -> Report:
    machine = Machine.here()
    figures: list[Figure] = []
    notes: list[str] = []

    async def collect() -> None:
        async for result in results:
            if isinstance(result, str):
                notes.append(result)
            else:
                figures.append(result)
                _say(f"{result.name}: {result.ours.median:.4g} {result.unit}" + (f", ratio {result.ratio}" if result.ratio else ""))

    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(collect())
    report = Report(name, machine.afterwards(), figures, notes)
    tell(report, json)
    return report


def tell(report: Report, json: str | None) -> None:
    """The table goes to standard output, or to standard error when that is where the JSON goes."""
    out = sys.stderr if json == "-" else sys.stdout
    print_report(report, Console(file=out, width=None if out.isatty() else 160))
    if json is not None:
        write_report(json, report)


def _say(text: str) -> None:
    print(f"flowrt: {text}", file=sys.stderr, flush=True)
