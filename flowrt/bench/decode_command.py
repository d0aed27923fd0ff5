"""`flowrt bench decode` from its options to its outputs: progress on standard error, tables, JSON, a plot, the exit code.

Not here: options and help (flowrt/cli/bench.py), measuring (decode.py), tables (decode_report.py).
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

from rich.console import Console

from flowrt.api import read_graph
from flowrt.bench.decode import Found, Options, measure
from flowrt.bench.decode_report import min_bytes_by_batch, print_found, report_of
from flowrt.bench.limits import MachineLimits, measure_limits_apart, usable_cores
from flowrt.bench.memory import checkpoint_elements
from flowrt.bench.pairs import MIN_PAIRS
from flowrt.bench.peers import new_event_loop
from flowrt.bench.plots import check_plot, plot_decode
from flowrt.bench.report import Machine, write_report
from flowrt.errors import UserError

UNEQUAL = 1


def run(options: Options, json: str | None = None, plot: str | None = None) -> int:
    """The exit code: 1 when float32 tokens differ from a peer's, else 0."""
    options.check()
    check_plot(plot)
    machine = Machine.here()
    out = sys.stderr if json == "-" else sys.stdout
    console = Console(file=out, width=None if out.isatty() else 120, highlight=False)
    founds: list[Found] = []
    limits: MachineLimits | None = None

    async def collect() -> None:
        nonlocal limits
        limits = await measure_limits_apart(usable_cores())
        elements = checkpoint_elements(options.model)
        async for found in measure(options, _say):
            founds.append(found)
            graph = read_graph(options.graph, [f"model.dtype={found.dtype}", *options.overrides], options.model)
            context = options.prompt_tokens + options.new_tokens // 2
            least = min_bytes_by_batch(graph, elements, options.batches, context)
            print_found(found, limits, least, console)
            console.print()

    try:
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            runner.run(collect())
    except BaseExceptionGroup as errors:
        mistakes = [error for error in errors.exceptions if isinstance(error, UserError)]
        raise mistakes[0] if mistakes else errors  # noqa: B904
    if options.num_pairs < MIN_PAIRS:
        console.print(f"note: fewer than {MIN_PAIRS} pairs: for trying out, not for claims")
    machine = machine.afterwards()
    console.print(str(machine))
    if json is not None or plot is not None:
        report = report_of(founds, machine, _details(options, limits))
        if json is not None:
            write_report(json, report)
        if plot is not None:
            plot_decode(report, plot)
    return UNEQUAL if any(_unequal(found) for found in founds) else 0


def _unequal(found: Found) -> bool:
    return found.dtype == "float32" and any(each.num_different for each in found.comparisons.values())


def _details(options: Options, limits: MachineLimits | None) -> dict[str, Any]:
    return {
        "model": options.model.name,
        "graph": options.graph.name,
        "overrides": list(options.overrides),
        "against": options.against.name if options.against is not None else None,
        "prompt_tokens": options.prompt_tokens,
        "new_tokens": options.new_tokens,
        "limits": vars(limits) if limits is not None else None,
    }


def _say(text: str) -> None:
    print(f"flowrt: {text}", file=sys.stderr, flush=True)
