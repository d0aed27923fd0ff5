"""From `flowrt run` to its first token: whole runs, each a process of its own, and the parts of that time from the lines they print."""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
import tempfile
import time
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from flowrt.bench.measure.benchmark import Result, Trial
from flowrt.bench.report.figures import Figure, Target
from flowrt.bench.report.report import ReportSection
from flowrt.errors import UserError

START_TARGET = Target(5.0)  # seconds, of a graph of six processes
_ANSWER = re.compile(r"\[\d+\]")
PARTS = {
    "before": "launcher: interpreter, imports, graph",
    "forked": "fork server: interpreter, torch, forks",
    "loaded": "workers: load and listen",
    "ready": "workers: connect",
    "first_token": "prompt to first token",
}


@dataclass(frozen=True)
class StartTimes:
    """Seconds from the first instruction to the first token, and the parts that they are the sum of."""

    total_seconds: float
    part_seconds: dict[str, float]


async def measure(graph: Path, model: Path | None = None) -> AsyncIterator[Result]:
    """Raises UserError when a run fails."""

    def figures(values: Sequence[Sequence[StartTimes]]) -> list[Figure]:
        (starts,) = values
        total = Figure.alone("warm start to first token", "s", [start.total_seconds for start in starts], START_TARGET)
        return [total, *(Figure.alone(f"  {PARTS[key]}", "s", [start.part_seconds[key] for start in starts]) for key in PARTS)]

    trial = Trial([lambda: measure_start(graph, model)], figures)
    yield trial
    yield ReportSection("runs", [{"total_seconds": start.total_seconds, **start.part_seconds} for start in trial.values[0]])


async def measure_start(graph: Path, model: Path | None = None) -> StartTimes:
    """Runs the graph's own prompts for one token each, as a user would."""
    with tempfile.TemporaryDirectory(prefix="flowrt-bench-") as folder:
        record = Path(folder) / "run.json"
        command = [sys.executable, "-m", "flowrt", "run", str(graph), "--max-tokens", "1", "--json", str(record)]
        command += ["--model", str(model)] if model is not None else []
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        begun = time.perf_counter()
        child = await asyncio.create_subprocess_exec(*command, stdin=DEVNULL, stdout=PIPE, stderr=PIPE, env=environment)
        try:
            answers, progress, status = await asyncio.gather(_timed_lines(child.stdout), _timed_lines(child.stderr), child.wait())
        finally:
            with suppress(ProcessLookupError):
                child.kill()
        if status != 0:
            last = (progress or answers or [(0.0, "it wrote nothing")])[-1][1]
            raise UserError(f"flowrt run {graph} ended with exit code {status}: {last}")
        in_launcher: float = json.loads(record.read_text(encoding="utf-8"))["summary"]["start_seconds"]
    first = next((seconds for seconds, line in answers if _ANSWER.match(line)), None)
    if first is None:
        raise UserError(f"flowrt run {graph} printed no answer; give a graph file with prompts")
    forked, loaded, ready = (_last_seconds(progress, text) - begun for text in (" started, pid", " loaded, ", "ready after"))
    before, total = ready - in_launcher, first - begun
    parts = {"before": before, "forked": forked - before, "loaded": loaded - forked, "ready": ready - loaded, "first_token": total - ready}
    return StartTimes(total, parts)


async def _timed_lines(stream: asyncio.StreamReader | None) -> list[tuple[float, str]]:
    if stream is None:
        return []
    return [(time.perf_counter(), line.decode(errors="replace").rstrip("\n")) async for line in stream]


def _last_seconds(lines: Sequence[tuple[float, str]], text: str) -> float:
    found = [seconds for seconds, line in lines if text in line]
    if not found:
        raise UserError(f"flowrt run did not print {text.strip()!r}; give a graph whose workers are processes")
    return found[-1]
