"""Runs `flowrt chaos` from its options to its outputs: progress on standard error, the table, JSON, a plot, the exit code."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from pathlib import Path
from typing import Any, cast

from rich.console import Console

from flowrt.bench.peers.child import new_event_loop
from flowrt.bench.report.plots import check_plot
from flowrt.bench.report.report import Machine
from flowrt.chaos.measure import ChaosOptions, ChaosResult, measure, prepared
from flowrt.chaos.plot import plot_chaos
from flowrt.chaos.report import print_report, report_of
from flowrt.errors import UserError

RIGHT, WRONG, INTERRUPTED = 0, 1, 130
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def run(options: ChaosOptions, json_file: str | None = None, plot: str | None = None) -> int:
    """Returns the exit code: 1 when an answer differs from the one without faults, or a request failed; 130 when interrupted."""
    check_plot(plot)
    _, scenario, _ = prepared(options)
    machine = Machine.here()
    out = sys.stderr if json_file == "-" else sys.stdout
    console = Console(file=out, width=None if out.isatty() else 140, highlight=False)

    interrupts: list[signal.Signals] = []

    async def collect() -> ChaosResult:
        loop, task = asyncio.get_running_loop(), cast("asyncio.Task[Any]", asyncio.current_task())

        def on_signal(number: signal.Signals) -> None:
            """The report so far is still printed; a second signal ends the rest at once."""
            if not interrupts:
                _say("interrupted")
            interrupts.append(number)
            task.cancel()

        numbers = [each for each in _ENDING if each is not signal.SIGHUP or signal.getsignal(each) is not signal.SIG_IGN]  # nohup
        for each in numbers:
            loop.add_signal_handler(each, on_signal, each)
        try:
            return await measure(options, _say)
        finally:
            for each in numbers:
                loop.remove_signal_handler(each)

    try:
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            found = runner.run(collect())
    except BaseExceptionGroup as errors:
        mistakes = [error for error in errors.exceptions if isinstance(error, UserError)]
        raise mistakes[0] if mistakes else errors  # noqa: B904
    found.interrupted = bool(interrupts)
    tolerates = scenario is not None and scenario.expect == "tokens_or_error"
    report = report_of(found, machine.afterwards(), tolerates)
    print_report(report, console)
    if json_file is not None:
        _write(json_file, json.dumps(report.as_json(), indent=1) + "\n")
    if plot is not None:
        plot_chaos(report, plot)
    return INTERRUPTED if interrupts else RIGHT if report.answers_right else WRONG


def _write(name: str, text: str) -> None:
    if name == "-":
        print(text, end="")
        return
    try:
        Path(name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"--json {name}: cannot be written ({error.strerror}); give a path in an existing folder") from error


def _say(text: str) -> None:
    print(f"flowrt: {text}", file=sys.stderr, flush=True)
