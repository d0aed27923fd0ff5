"""The report of a benchmark: figures, notes and the machine they hold for, as a table and as JSON."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Self

from rich.console import Console, RenderableType
from rich.table import Column, Table

from flowrt.bench.report.figures import MIN_PAIRS, Figure, format_amount
from flowrt.system.machine_limits import usable_cores

PACKAGES = ("flowrt", "torch", "pyzmq", "uvloop", "ucxx", "ray", "xoscar")


@dataclass(frozen=True)
class Machine:
    """What the figures hold for. `load_*`: the system's one-minute load average."""

    cpu: str
    cores: int
    system: str
    versions: dict[str, str]
    load_before: float
    load_after: float = 0.0

    @classmethod
    def here(cls) -> Self:
        versions = {"python": platform.python_version()}
        for name in PACKAGES:
            with suppress(PackageNotFoundError):
                versions[name] = version(name)
        return cls(_cpu_model(), usable_cores(), f"{platform.system()} {platform.release()}", versions, _load())

    def afterwards(self) -> Self:
        return replace(self, load_after=_load())

    def __str__(self) -> str:
        versions = ", ".join(f"{name} {number}" for name, number in self.versions.items())
        load = f"load {self.load_before:.1f} before, {self.load_after:.1f} after"
        return f"{self.cores} cores of {self.cpu}, {self.system}; {load}; {versions}"


@dataclass(frozen=True)
class ReportSection:
    """A part of a report that is not a figure: `record` under `key` of the JSON's details, and what is printed."""

    key: str
    record: Any
    printed: Sequence[RenderableType] = ()


@dataclass(frozen=True)
class BenchmarkReport:
    """What one command measured. `notes` name what was left out, with the reason. `command`: how the title begins."""

    benchmark: str
    machine: Machine
    figures: Sequence[Figure]
    notes: Sequence[str] = ()
    sections: Sequence[ReportSection] = ()
    about: Mapping[str, Any] = field(default_factory=dict)
    command: str = "flowrt bench"

    @property
    def title(self) -> str:
        return f"{self.command} {self.benchmark}"

    @property
    def details(self) -> dict[str, Any]:
        return {**self.about, **{section.key: section.record for section in self.sections}}

    def record(self) -> dict[str, Any]:
        """The report for `json_text`."""
        return {
            "benchmark": self.benchmark,
            "machine": self.machine,
            "figures": [figure.as_json() for figure in self.figures],
            "notes": self.notes,
            "details": self.details,
        }


def print_report(report: BenchmarkReport, console: Console) -> None:
    """The table, the notes and the machine."""
    listed = [figure for figure in report.figures if figure.listed]
    if listed:
        rows = [
            (
                figure.name,
                f"{format_amount(figure.ours.median)} {figure.unit}" if figure.ratio is not None else figure.ours.text(figure.unit),
                f"{format_amount(figure.theirs.median)} {figure.unit}".rstrip() + f", {figure.peer}" if figure.theirs is not None else "",
                figure.ratio.text() if figure.ratio is not None else "",
                str(figure.target or ""),
                figure.verdict or "",
            )
            for figure in listed
        ]
        console.print(new_table(report.title, "figure", "flowrt", "peer", "ratio (95 %)", "target", "verdict", rows=rows))
    for section in report.sections:
        for each in section.printed:
            console.print(each, markup=False)
    notes = list(report.notes)
    ratios = [figure.ratio for figure in report.figures if figure.ratio is not None]
    if any(ratio.low < ratio.high and ratio.count < MIN_PAIRS for ratio in ratios):
        notes.append(f"fewer than {MIN_PAIRS} pairs: for trying out, not for claims")
    print_notes(console, notes, report.machine)


def print_notes(console: Console, notes: Sequence[str], machine: Machine) -> None:
    for line in (*(f"note: {note}" for note in notes), str(machine)):
        console.print(line, markup=False)


def new_table(title: str, *headings: str, rows: Sequence[Sequence[str]] = ()) -> Table:
    columns = (Column(heading, overflow="fold") for heading in headings)
    table = Table(*columns, title=title, title_justify="left", box=None, pad_edge=False)
    for row in rows:
        table.add_row(*row)
    return table


def new_console(json: str | None) -> Console:
    """Standard output, or standard error when the JSON goes to standard output."""
    out = sys.stderr if json == "-" else sys.stdout
    return Console(file=out, width=None if out.isatty() else 160, highlight=False)


def print_progress(text: str) -> None:
    """Progress, on standard error."""
    print(f"flowrt: {text}", file=sys.stderr, flush=True)


def _load() -> float:
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0


def _cpu_model() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
