"""From `flowrt run` to its first token: whole runs, each a process of its own, and the parts of that time from the lines they print."""

from __future__ import annotations

import asyncio
import json
import re
import tempfile
import time
from asyncio.subprocess import PIPE, STDOUT
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from flowrt.bench.measure.benchmark import Results, Trial
from flowrt.bench.peers.process import start_flowrt
from flowrt.bench.report.figures import Figure, Target
from flowrt.bench.report.report import ReportSection
from flowrt.errors import UserError

_FIRST_TOKEN = re.compile(r"\[\d+\]")
TOTAL = "total_seconds"
TARGETS = {TOTAL: Target(5.0)}  # seconds, of a graph of six processes
PARTS = {
    TOTAL: "warm start to first token",
    "before": "  launcher: interpreter, imports, graph",
    "forked": "  fork server: interpreter, torch, forks",
    "loaded": "  workers: load and listen",
    "ready": "  workers: connect",
    "first_token": "  prompt to first token",
}


async def measure(graph: Path, model: Path | None = None) -> Results:
    """Raises UserError when a run fails."""

    def figures(values: Sequence[Sequence[dict[str, float]]]) -> list[Figure]:
        (starts,) = values
        return [Figure.alone(name, "s", [start[key] for start in starts], TARGETS.get(key)) for key, name in PARTS.items()]

    trial = Trial([lambda: measure_start(graph, model)], figures)
    yield trial
    yield ReportSection("runs", trial.values[0])


async def measure_start(graph: Path, model: Path | None = None) -> dict[str, float]:
    """Runs the graph's own prompts for one token each, as a user would.

    Returns the seconds from the first instruction to the first token, and the parts that they are the sum of, by the keys of PARTS.
    """
    with tempfile.TemporaryDirectory(prefix="flowrt-bench-") as folder:
        record = Path(folder) / "run.json"
        arguments = ["run", str(graph), "--max-tokens", "1", "--json", str(record)]
        arguments += ["--model", str(model)] if model is not None else []
        begun = time.perf_counter()
        child = await start_flowrt(*arguments, stdout=PIPE, stderr=STDOUT)
        try:
            lines, status = await asyncio.gather(_timed_lines(child.stdout), child.wait())
        finally:
            with suppress(ProcessLookupError):
                child.kill()
        if status != 0:
            last = lines[-1][1] if lines else "it wrote nothing"
            raise UserError(f"flowrt run {graph} ended with exit code {status}: {last}")
        in_launcher: float = json.loads(record.read_text(encoding="utf-8"))["summary"]["start_seconds"]
    first = next((seconds for seconds, line in lines if _FIRST_TOKEN.match(line)), None)
    if first is None:
        raise UserError(f"flowrt run {graph} printed no answer; give a graph file with prompts")
    forked, loaded, ready = (_last_seconds(lines, text) - begun for text in (" started, pid", " loaded, ", "ready after"))
    before, total = ready - in_launcher, first - begun
    ends = dict(zip(list(PARTS)[1:], (before, forked, loaded, ready, total), strict=True))
    parts = {key: end - begin for (key, end), begin in zip(ends.items(), (0.0, *ends.values()), strict=False)}
    return {TOTAL: total, **parts}


async def _timed_lines(stream: asyncio.StreamReader | None) -> list[tuple[float, str]]:
    if stream is None:
        return []
    return [(time.perf_counter(), line.decode(errors="replace").rstrip("\n")) async for line in stream]


def _last_seconds(lines: Sequence[tuple[float, str]], text: str) -> float:
    found = [seconds for seconds, line in lines if text in line]
    if not found:
        raise UserError(f"flowrt run did not print {text.strip()!r}; give a graph whose workers are processes")
    return found[-1]
