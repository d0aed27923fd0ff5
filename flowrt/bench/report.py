"""What a benchmark found: figures with their intervals and verdicts, the machine they hold for, as a table and as JSON.

Here: Spread, Figure, Machine, Report, `print_report`, `write_report`. Not here: statistics (pairs.py), measuring (one module per
benchmark). Called by flowrt/cli/bench.py.
"""

from __future__ import annotations

import json
import math
import os
import platform
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Self

from rich.console import Console
from rich.table import Table

from flowrt.bench.pairs import MIN_PAIRS, Ratio, Target, Verdict, judge, median_interval, median_ratio, verdict
from flowrt.errors import UserError

PACKAGES = ("flowrt", "torch", "pyzmq", "uvloop", "ucxx", "ray", "xoscar")


@dataclass(frozen=True)
class Spread:
    """The median of repeated measurements and its 95 % interval, in the figure's unit."""

    median: float
    low: float
    high: float
    num_values: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Self:
        return cls(statistics.median(values), *median_interval(values), len(values))


@dataclass(frozen=True)
class Figure:
    """One published number: `ours` in `unit`, `theirs` of `peer` where it was measured against one in alternating pairs.

    `target` is for the ratio if there is a peer, else for `ours`. `about` says by word what a program would else read out of the name.
    """

    name: str
    unit: str
    ours: Spread
    peer: str | None = None
    theirs: Spread | None = None
    ratio: Ratio | None = None
    target: Target | None = None
    about: Mapping[str, Any] = field(default_factory=dict)
    listed: bool = True  # in the table; else only where there is room for all

    @classmethod
    def paired(
        cls, name: str, unit: str, ours: Sequence[float], peer: str, theirs: Sequence[float], target: Target | None = None, **about: Any
    ) -> Self:
        return cls(name, unit, Spread.of(ours), peer, Spread.of(theirs), median_ratio(ours, theirs), target, about)

    @classmethod
    def alone(cls, name: str, unit: str, values: Sequence[float], target: Target | None = None, **about: Any) -> Self:
        return cls(name, unit, Spread.of(values), target=target, about=about)

    @property
    def verdict(self) -> Verdict | None:
        """None without a target."""
        if self.target is None:
            return None
        return verdict(self.ratio, self.target) if self.ratio is not None else judge(self.ours.low, self.ours.high, self.target)

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "unit": self.unit,
            "ours": _plain(self.ours),
            "peer": self.peer,
            "theirs": _plain(self.theirs),
            "ratio": _plain(self.ratio),
            "target": _plain(self.target),
            "verdict": self.verdict,
            **({"about": dict(self.about)} if self.about else {}),
        }


@dataclass(frozen=True)
class Machine:
    """What the figures hold for. `load` is the system's one-minute load average, before and after."""

    cpu: str
    cores: int
    system: str
    versions: dict[str, str]
    load_before: float
    load_after: float = 0.0

    @classmethod
    def here(cls) -> Self:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        versions = {"python": platform.python_version()}
        for name in PACKAGES:
            try:
                versions[name] = version(name)
            except PackageNotFoundError:
                continue
        return cls(_cpu_model(), cores, f"{platform.system()} {platform.release()}", versions, _load())

    def afterwards(self) -> Self:
        return replace(self, load_after=_load())

    def __str__(self) -> str:
        versions = ", ".join(f"{name} {number}" for name, number in self.versions.items())
        return (
            f"{self.cores} cores of {self.cpu}, {self.system}; load {self.load_before:.1f} before, {self.load_after:.1f} after; {versions}"
        )


@dataclass(frozen=True)
class Report:
    """What one command measured. `notes` say what was left out, and why."""

    benchmark: str
    machine: Machine
    figures: Sequence[Figure]
    notes: Sequence[str] = ()
    details: dict[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        return {
            "benchmark": self.benchmark,
            "machine": _plain(self.machine),
            "figures": [figure.as_json() for figure in self.figures],
            "notes": list(self.notes),
            "details": self.details,
        }


def print_report(report: Report, console: Console) -> None:
    """The table, the notes, the machine's line."""
    table = Table(title=f"flowrt bench {report.benchmark}", title_justify="left", box=None, pad_edge=False)
    for heading in ("figure", "flowrt", "peer", "ratio (95 % interval)", "target", "verdict"):
        table.add_column(heading, overflow="fold")
    for figure in report.figures:
        peer = f"{amount(figure.theirs.median)} {figure.unit} {figure.peer}" if figure.theirs is not None else ""
        ours = f"{amount(figure.ours.median)} {figure.unit}"
        if figure.ratio is None and math.isfinite(figure.ours.low):
            ours += f" ({amount(figure.ours.low)} to {amount(figure.ours.high)})"
        cells = (figure.name, ours, peer, str(figure.ratio or ""), str(figure.target or ""), figure.verdict or "")
        table.add_row(*cells)
    console.print(table)
    few = [figure for figure in report.figures if figure.ratio is not None and figure.ratio.num_pairs < MIN_PAIRS]
    for note in (*report.notes, *([f"fewer than {MIN_PAIRS} pairs: for trying out, not for claims"] if few else [])):
        console.print(f"note: {note}")
    console.print(str(report.machine))


def write_report(path: str, report: Report) -> None:
    """As JSON; "-" is standard output. Raises UserError when it cannot be written."""
    text = json.dumps(report.as_json(), indent=2) + "\n"
    if path == "-":
        print(text, end="")
        return
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"--json {path}: cannot be written ({error.strerror}); give a path in a folder that is there") from error


def _plain(value: Any) -> dict[str, Any] | None:
    """A frozen record as a dict; infinities, which JSON does not know, as null."""
    if value is None:
        return None
    return {name: None if item in (float("inf"), float("-inf")) else item for name, item in vars(value).items()}


def amount(value: float) -> str:
    """Three figures, as a table has them."""
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _load() -> float:
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
