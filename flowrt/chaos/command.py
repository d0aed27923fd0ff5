"""Runs `flowrt chaos` from its options to its outputs: progress on standard error, the table, JSON, a plot, the exit code."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

from flowrt.bench.peers.child import new_event_loop
from flowrt.bench.report.plots import check_plot
from flowrt.bench.report.report import Machine, new_console, print_progress
from flowrt.chaos.chaos_options import ChaosOptions
from flowrt.chaos.measure import ChaosResult, measure, prepare
from flowrt.chaos.plot import plot_chaos
from flowrt.chaos.report import print_report, report_of
from flowrt.errors import FAILURE, INTERRUPTED, SUCCESS, UserError
from flowrt.system.output_file import check_writable, json_text, write_file
from flowrt.system.signals import ending_signals, kept_signals


def run(graph: Path, options: ChaosOptions, json: str | None = None, plot: str | None = None) -> int:
    """Returns the exit code."""
    check_plot(plot)
    if json is not None:
        check_writable(json)
    prepared = prepare(graph, options)
    machine = Machine.here()
    is_interrupted = False

    async def collect() -> ChaosResult:
        task = cast("asyncio.Task[Any]", asyncio.current_task())

        def on_signal(number: int) -> None:
            """The report so far is still printed; a second signal ends the rest at once."""
            nonlocal is_interrupted
            if not is_interrupted:
                print_progress("interrupted")
            is_interrupted = True
            task.cancel()

        with ending_signals(on_signal):
            return await measure(prepared, print_progress)

    try:
        with kept_signals(), asyncio.Runner(loop_factory=new_event_loop) as runner:
            found = runner.run(collect())
    except BaseExceptionGroup as errors:
        mistakes = [error for error in errors.exceptions if isinstance(error, UserError)]
        raise mistakes[0] if mistakes else errors  # noqa: B904
    found.interrupted = is_interrupted
    report = report_of(found, machine.afterwards(), prepared.tolerates_errors)
    print_report(report, new_console(json))
    if json is not None:
        write_file(json, json_text(report.record()))
    if plot is not None:
        plot_chaos(report, plot)
    return INTERRUPTED if is_interrupted else SUCCESS if report.is_success else FAILURE
