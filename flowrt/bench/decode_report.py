"""What `flowrt bench decode` found, for people: tables within 80 columns, and for programs.

Here: `print_found`, `print_speeds`, `report_of`. Not here: measuring (decode.py), the statistics (pairs.py), other benchmarks' table
(report.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from flowrt.bench.decode import Found
from flowrt.bench.limits import MachineLimits
from flowrt.bench.report import Figure, Machine, Report, amount
from flowrt.bench.step_split import StepSplit, min_bytes_of
from flowrt.graph.model import Graph


def print_found(found: Found, limits: MachineLimits, min_bytes: dict[int, float], console: Console) -> None:
    """One dtype: speeds and verdicts, whether the tokens agree, memory, and where a decode step's time goes."""
    print_speeds(found, console)
    if found.memory is not None:
        console.print(f"memory: {found.memory}", highlight=False)
    for batch, splits in found.splits.items():
        if splits:
            console.print(_split(found.dtype, batch, splits, min_bytes[batch] / limits.read_bytes_per_second))
    console.print(
        f"least: weights, keys and values read once at {limits.read_bytes_per_second / 1e9:.1f} GB/s, as measured with"
        f" {limits.num_threads} threads. operators: with the hand-over to their thread. queued: ready, without a core.",
        highlight=False,
    )


def print_speeds(found: Found, console: Console, ours: str = "flowrt") -> None:
    """Speeds and verdicts, and whether the tokens agree."""
    console.print(_speeds(found, ours))
    for peer, comparison in found.comparisons.items():
        console.print(f"tokens against {peer}: {comparison}", highlight=False)


def _speeds(found: Found, ours: str) -> Table:
    table = _table(f"{found.dtype}, tokens/s", ("phase, batch", ours, "peer", "ratio (95 % interval)", "target", "verdict"))
    for figure in found.figures:
        assert figure.theirs is not None
        cells = (figure.name, amount(figure.ours.median), f"{amount(figure.theirs.median)} {figure.peer}", str(figure.ratio))
        table.add_row(*cells, str(figure.target or ""), figure.verdict or "")
    return table


def _split(dtype: str, batch: int, splits: Sequence[StepSplit], min_seconds: float) -> Table:
    step = splits[0].step
    title = f"decode {batch}, {dtype}: a step takes {1e3 * step:.1f} ms, at least {1e3 * min_seconds:.1f}; of it, in ms"
    table = _table(title, ("process", "operators", "Python", "waiting", "queued", "cpu loop", "cpu others"))
    for each in splits:
        parts = (each.operators, each.python, each.waiting, each.queued, each.loop_cpu, each.other_cpu)
        table.add_row(each.process, *(f"{1e3 * seconds:.1f}" for seconds in parts))
    return table


def _table(title: str, headings: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for heading in headings:
        table.add_column(heading, overflow="fold")
    return table


def report_of(founds: Sequence[Found], machine: Machine, details: dict[str, Any], benchmark: str = "decode") -> Report:
    """All of it as one record; figures carry their dtype in the name."""
    figures = [
        Figure(f"{figure.name} {found.dtype}", figure.unit, figure.ours, figure.peer, figure.theirs, figure.ratio, figure.target)
        for found in founds
        for figure in found.figures
    ]
    for found in founds:
        memory = found.memory
        details[found.dtype] = {
            "tokens": {peer: {**vars(each), "text": str(each)} for peer, each in found.comparisons.items()},
            "tried_tokens_per_second": found.tried,
            "splits_seconds": {batch: [each.as_json() for each in splits] for batch, splits in found.splits.items()},
            "memory": {**vars(memory), "bound_bytes": memory.bound_bytes, "met": memory.met} if memory is not None else None,
        }
    return Report(benchmark, machine, figures, details=details)


def min_bytes_by_batch(graph: Graph, elements: tuple[int, int], batches: Sequence[int], context: int) -> dict[int, float]:
    """What a decode step must read, by batch; `elements`: of experts, of everything else."""
    return {batch: min_bytes_of(graph, *elements, batch, context) for batch in batches}
