"""`flowrt bench operators` from its options to its outputs: a table, JSON, a plot.

Not here: options and help (flowrt/cli/bench.py), measuring (roofline.py).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from flowrt.bench.limits import MachineLimits, better_of, measure_limits
from flowrt.bench.plots import check_plot, plot_operators
from flowrt.bench.report import Machine, Report, write_report
from flowrt.bench.roofline import OperatorTime, Options, measure


def run(options: Options, json: str | None = None, plot: str | None = None) -> None:
    options.check()
    check_plot(plot)
    machine = Machine.here()
    dtype = options.dtype
    limits = measure_limits(options.num_threads, (dtype,))
    out = sys.stderr if json == "-" else sys.stdout
    console = Console(file=out, width=None if out.isatty() else 120, highlight=False)
    times: list[OperatorTime] = []
    for each in measure(options):
        if not times or times[-1].rows != each.rows:
            print(f"flowrt: {each.rows} rows", file=sys.stderr, flush=True)
        times.append(each)
    limits = better_of(limits, measure_limits(options.num_threads, (dtype,)))  # load may have come, or gone
    machine = machine.afterwards()
    console.print(table_of(times, limits, dtype))
    console.print(f"us of one call in one layer, and per cent of the limit: {limits_text(limits, dtype)}")
    console.print(str(machine))
    what = {"model": options.model.name if options.model is not None else None, "sizes": options.sizes, "layers": options.layers}
    details = {**what, "dtype": dtype, "context": options.context, "limits": vars(limits)}
    report = Report(
        "operators", machine, [], details={**details, "times": [vars(each) | {"fraction": each.fraction(limits, dtype)} for each in times]}
    )
    if json is not None:
        write_report(json, report)
    if plot is not None:
        fractions = [(each.operator, each.rows, each.fraction(limits, dtype)) for each in times]
        plot_operators(fractions, f"{dtype}, {limits_text(limits, dtype)}", plot)


def limits_text(limits: MachineLimits, dtype: str) -> str:
    """The two limits in words."""
    rate = limits.flops_per_second[dtype] / 1e9
    threads = f"{limits.num_threads} thread{'s' if limits.num_threads > 1 else ''}"
    return f"{limits.read_bytes_per_second / 1e9:.1f} GB/s read, {rate:.0f} GFLOP/s, {threads}, measured now"


def table_of(times: Sequence[OperatorTime], limits: MachineLimits, dtype: str) -> Table:
    """A line per operator, a column per number of rows."""
    all_rows = list(dict.fromkeys(each.rows for each in times))
    table = Table(title=f"operators, {dtype}", title_justify="left", box=None, pad_edge=False)
    table.add_column("rows")
    for rows in all_rows:
        table.add_column(str(rows), justify="right", no_wrap=True)
    cells = {(each.operator, each.rows): f"{1e6 * each.seconds:.0f} {100 * each.fraction(limits, dtype):2.0f}%" for each in times}
    for name in dict.fromkeys(each.operator for each in times):
        table.add_row(name, *(cells.get((name, rows), "") for rows in all_rows))
    return table
