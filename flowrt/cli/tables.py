"""The tables at the end of a run: processes, traffic between them, and latencies."""

from __future__ import annotations

import os
import re

from rich import box
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from flowrt.cli.record import Durations, Figures
from flowrt.cli.report import RunReport
from flowrt.cli.text import OutputStream, moves_cursor
from flowrt.emulation import EmulationReport
from flowrt.observe import duration_text, size_text

NARROW = 72  # columns; in a terminal of fewer, a table leaves out a column that the record has
MAX_EDGES = 24
MIN_WIDTH = 60  # that tables fit in
PLAIN_WIDTH = 160  # of tables outside a terminal: wide enough that nothing is cut
MAX_PROCESSES = 48
UNKNOWN = "-"
_AFTER_COMMAS = re.compile(r",(?=\S)")  # a long list of expert ids breaks there, not within a number
_ENDED = {"stop": "finished", "length": "ended by length", "abort": "aborted", "error": "failed"}


def print_tables(report: RunReport, figures: Figures, console: Console) -> None:
    """Prints with frames and colour on a terminal, else as aligned plain text."""
    _print("processes", _processes(report, console), console)
    if report.edges:
        _print("between processes", _edges(report, console), console)
    print_latency(figures, console)
    for line in _sentences(report, figures):
        console.print(Text(line))


def print_latency(figures: Figures, console: Console) -> None:
    _print("latency", _latencies(figures, console), console)
    console.print()
    ended = ", ".join(f"{num} {_ENDED[reason]}" for reason, num in figures.num_finished.items() if num)
    console.print(Text(f"{figures.num_requests} request{'s' if figures.num_requests != 1 else ''}: {ended}"))
    if figures.seconds is not None and figures.tokens_per_second is not None:
        speed = f"{figures.tokens_per_second:.1f} tokens per second"
        console.print(Text(f"{figures.num_tokens} tokens in {duration_text(figures.seconds)}: {speed}"))


def _print(title: str, table: Table, console: Console) -> None:
    console.print()
    console.print(Text(title, "bold"))
    print_table(table, console)


def print_table(table: Table, console: Console) -> None:
    if console.is_terminal:
        console.print(table)
        return
    with console.capture() as capture:
        console.print(table)
    console.out("\n".join(line.rstrip() for line in capture.get().splitlines()), highlight=False)


def new_console(display: OutputStream) -> Console:
    """Makes a console with frames and a live view on a terminal that can move its cursor, plain text elsewhere; rich heeds NO_COLOR."""
    columns = os.environ.get("COLUMNS", "")
    width = max(MIN_WIDTH, int(columns)) if columns.isdecimal() else None
    if moves_cursor(display):
        return Console(file=display.as_file(), highlight=False, width=width)
    return Console(file=display.as_file(), force_terminal=False, no_color=True, highlight=False, width=width or PLAIN_WIDTH)


def new_table(console: Console, *columns: Column) -> Table:
    """A table with a line under its headings on a terminal, and aligned text elsewhere."""
    plain = not console.is_terminal
    return Table(
        *columns,
        header_style="" if plain else "dim",
        box=None if plain else box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        padding=(0, 2, 0, 0) if plain else (0, 1, 0, 0),  # the frame adds a space
    )


def _name(heading: str) -> Column:
    return Column(heading, no_wrap=True, overflow="ellipsis")


def _number(heading: str) -> Column:
    return Column(heading, justify="right", no_wrap=True)


def _processes(report: RunReport, console: Console) -> Table:
    holds, transport = Column("holds", overflow="fold", min_width=16), Column("transport", min_width=9)
    place = [_number("pid")] if console.width >= NARROW else []
    if place and any(process.host for process in report.processes):
        place.append(_name("host"))
    table = new_table(console, _name("process"), *place, holds, transport, _number("memory"), _number("busy"))
    for process in report.processes[:MAX_PROCESSES]:
        table.add_row(
            process.name,
            *[str(process.pid or UNKNOWN), process.host][: len(place)],
            _AFTER_COMMAS.sub(", ", process.holds),
            ", ".join(process.transports) or UNKNOWN,
            size_text(process.resident_bytes) if process.resident_bytes else UNKNOWN,
            UNKNOWN if process.busy_share is None else f"{100 * process.busy_share:.0f} %",
        )
    _add_rest(table, len(report.processes) - MAX_PROCESSES)
    return table


def _edges(report: RunReport, console: Console) -> Table:
    """The link profile is shown only where it is emulated: elsewhere it has no effect."""
    edges = report.edges
    link = [Column("link", overflow="fold", min_width=9)] if report.emulation is not None else []
    transport = [Column("transport", min_width=9)] if console.width >= NARROW or not link else []
    table = new_table(console, _name("from"), _name("to"), *transport, *link, _number("messages"), _number("bytes"))
    shown = edges if len(edges) <= MAX_EDGES else sorted(edges, key=lambda edge: -edge.payload_bytes)[:MAX_EDGES]
    for edge in shown:
        how = [*([edge.transport] if transport else []), *([edge.link or UNKNOWN] if link else [])]
        table.add_row(edge.source, edge.target, *how, str(edge.num_messages), size_text(edge.payload_bytes))
    _add_rest(table, len(edges) - MAX_EDGES)
    return table


def _latencies(figures: Figures, console: Console) -> Table:
    table = new_table(console, Column(no_wrap=True), *map(_number, ("mean", "p50", "p99")))
    for name, durations in _durations(figures):
        values = [UNKNOWN] * 3 if durations is None else map(duration_text, (durations.mean, durations.p50, durations.p99))
        table.add_row(name, *values)
    return table


def _durations(figures: Figures) -> tuple[tuple[str, Durations | None], ...]:
    return ("time to first token", figures.ttft_seconds), ("inter-token latency", figures.itl_seconds)


def _sentences(report: RunReport, figures: Figures) -> list[str]:
    lines = []
    if report.start_seconds is not None:
        lines.append(f"start: {duration_text(report.start_seconds)}")
    if report.num_prefix_hits:
        share = 100 * report.num_prefix_hits / report.num_prefix_queries
        lines.append(f"prefix cache: {share:.0f} % of {report.num_prefix_queries} tokens of prompts")
    if report.emulation is not None:
        lines += _emulation_sentences(report.emulation, figures)
    lines += [f"transport auto: {text}" for text in report.transport_reasons]
    if report.late_wakeups:
        lines.append(f"late wake-ups: {report.late_wakeups} (a message was found only by looking again; must be 0)")
    for text in dict.fromkeys(report.strict_blocks.values()):
        names = ", ".join(name for name, blocks in report.strict_blocks.items() if blocks == text)
        lines.append(f"strict numerics, {names}: {text}")
    return lines


def _emulation_sentences(emulation: EmulationReport, figures: Figures) -> list[str]:
    """The figures of the emulated hardware, and whether they are void."""
    dilation = emulation.dilation
    parts = [f"{name} {duration_text(durations.mean / dilation)}" for name, durations in _durations(figures) if durations is not None]
    if figures.tokens_per_second is not None:
        parts.append(f"{figures.tokens_per_second * dilation:.4g} tokens per second")
    void = " (VOID)" if emulation.void else ""
    waits = f"{emulation.num_computed} computations and {emulation.num_delivered} messages in modelled time"
    lines = [f"emulated at dilation {dilation:g}, {waits}"]
    if parts:
        lines.append(f"on the modelled hardware{void}: {', '.join(parts)}")
    return [*lines, *emulation.sentences]


def _add_rest(table: Table, num: int) -> None:
    if num > 0:
        table.add_row(Text(f"… {num} more, see --json", "dim"))
