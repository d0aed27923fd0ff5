"""How long a user waits for the first token: `flowrt bench start GRAPH`.

Here: whole runs of `flowrt run`, each a process of its own, from its start to the first answer on its standard output, and where the
time goes, read off the lines that a run prints as it starts. Not here: why a part takes long (docs/performance.md).
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from flowrt.bench.pairs import Target
from flowrt.bench.report import Figure
from flowrt.errors import UserError

START_TARGET = Target(5.0)  # seconds, of a graph of six processes
LONGEST_SECONDS = 600.0
_ANSWER = re.compile(r"\[\d+\]")
_NAMES = {
    "before": "parent: interpreter, imports, graph",
    "forked": "fork server: interpreter, torch, forks",
    "loaded": "workers: load and listen",
    "ready": "workers: connect",
    "first_token": "prompt to first token",
}


@dataclass(frozen=True)
class Start:
    """One run: seconds from its first instruction to its first token, and the parts that they are the sum of."""

    total_seconds: float
    part_seconds: dict[str, float]


def measure(graph: Path, num_runs: int, model: Path | None = None) -> tuple[list[Figure], list[Start]]:
    """`num_runs` starts after one that is not counted (it warms the page cache). Raises UserError when a run fails."""
    starts = [one_start(graph, model) for _ in range(num_runs + 1)][1:]
    figures = [Figure.alone("warm start to first token", "s", [start.total_seconds for start in starts], START_TARGET)]
    for key, name in _NAMES.items():
        figures.append(Figure.alone(f"  {name}", "s", [start.part_seconds[key] for start in starts]))
    return figures, starts


def one_start(graph: Path, model: Path | None = None) -> Start:
    """Run the graph's own prompts for one token each, as a user would, and take the times at which its lines come."""
    with tempfile.TemporaryDirectory(prefix="flowrt-bench-") as folder:
        record = Path(folder) / "run.json"
        command = [sys.executable, "-m", "flowrt", "run", str(graph), "--max-tokens", "1", "--json", str(record)]
        command += ["--model", str(model)] if model is not None else []
        begun = time.perf_counter()
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment, text=True
        )
        try:
            answers, progress = _Lines(child.stdout), _Lines(child.stderr)
            status = child.wait(LONGEST_SECONDS)
        finally:
            child.kill()
            child.wait()
        answers.join()
        progress.join()
        if status != 0:
            raise UserError(f"flowrt run {graph} ended with exit code {status}: {progress.last or answers.last}")
        in_launcher: float = json.loads(record.read_text(encoding="utf-8"))["summary"]["start_seconds"]
    forked = progress.last_seconds(" started, pid") - begun
    loaded = progress.last_seconds(" loaded, ") - begun
    ready = progress.last_seconds("ready after") - begun
    total = answers.first_seconds(_ANSWER) - begun
    before = ready - in_launcher
    parts = {"before": before, "forked": forked - before, "loaded": loaded - forked, "ready": ready - loaded, "first_token": total - ready}
    return Start(total, parts)


class _Lines:
    """The lines of a pipe with the times at which they came, read by a thread until its end."""

    def __init__(self, pipe: IO[str] | None) -> None:
        assert pipe is not None
        self._pipe = pipe
        self._lines: list[tuple[float, str]] = []
        self._thread = threading.Thread(target=self._read, name="lines", daemon=True)
        self._thread.start()

    @property
    def last(self) -> str:
        return self._lines[-1][1] if self._lines else ""

    def join(self) -> None:
        self._thread.join()

    def first_seconds(self, pattern: re.Pattern[str]) -> float:
        """Raises UserError when no line begins so."""
        for seconds, line in self._lines:
            if pattern.match(line):
                return seconds
        raise UserError("the run printed no answer; give a graph file with prompts")

    def last_seconds(self, text: str) -> float:
        found = [seconds for seconds, line in self._lines if text in line]
        if not found:
            raise UserError(f"the run did not say {text.strip()!r}; a graph whose workers are processes is needed")
        return found[-1]

    def _read(self) -> None:
        for line in self._pipe:
            self._lines.append((time.perf_counter(), line.rstrip("\n")))
        self._pipe.close()
