"""From the death of an expert server to its return: its weights from memory that the processes of the host share, beside from files.

Two graphs that differ in `reliability.share_weights` alone run at once; in turns one server of each is killed. The files are in the page
cache, since both graphs have read them.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

from flowrt.api import RunningGraph, open_graph, read_graph
from flowrt.bench.measure.benchmark import Result, Trial
from flowrt.bench.measure.memory import resident_bytes, served_model
from flowrt.bench.report.figures import Figure, Target
from flowrt.bench.report.report import print_progress
from flowrt.errors import UserError
from flowrt.graph.model import Graph
from flowrt.graph.recovery import survives
from flowrt.launcher import events

NAMES = "weights in shared memory", "weights from files"
BUDGET = "reliability.restarts=1000", "reliability.restart_window_seconds=0.05"  # each restart is the first of its window: without delay
TARGET = Target(1.0)
RETURN_SECONDS = 300.0


class RestartSide:
    """One of the graphs, and the server of it that is killed."""

    def __init__(self, graph: Graph, victim: str) -> None:
        self.running: RunningGraph = open_graph(graph, on_event=self._on_event)
        self._victim = victim
        self._began = 0.0
        self._loaded: dict[str, float] = {}
        self._back = asyncio.Event()
        self._return_seconds = 0.0

    def _on_event(self, event: events.Event) -> None:
        match event:
            case events.WorkerStarted(name, _):
                self._began = time.perf_counter() if name == self._victim else self._began
            case events.WorkerListening(name):
                self._loaded[name] = time.perf_counter() - self._began
            case events.WorkerRestarted(name, _, seconds) if name == self._victim:
                self._return_seconds = seconds
                self._back.set()

    async def restart(self) -> dict[str, float]:
        """Kill the server. Returns the seconds until its next incarnation is connected, their part from the fork until its weights are
        loaded, and the memory of all servers after a request."""
        self._back.clear()
        os.kill(self.running.pids[self._victim], signal.SIGKILL)
        async with asyncio.timeout(RETURN_SECONDS):
            await self._back.wait()
        await self.running.complete([5, 6, 7, 8], max_tokens=4)
        servers = [pid for name, pid in self.running.pids.items() if name.startswith("experts")]
        return {"return": self._return_seconds, "load": self._loaded[self._victim], "memory": sum(map(resident_bytes, servers)) / 1e9}


def read_graphs(graph_file: Path, model: Path | None, overrides: Sequence[str]) -> tuple[Graph, Graph]:
    """(shared, from files). Raises UserError for a graph without expert servers that the run can lose."""
    shared, files = (
        read_graph(graph_file, [*BUDGET, *overrides, f"reliability.share_weights={value}"], model) for value in ("true", "false")
    )
    served_model(shared)
    if "experts.0" not in shared.process_names() or not survives(shared, "experts.0"):
        raise UserError(f"{graph_file}: the run cannot lose experts.0; use --set deploy.experts.servers=2 --set deploy.experts.replicas=2")
    return shared, files


async def measure(graphs: tuple[Graph, Graph]) -> AsyncIterator[Result]:
    def figures(values: Sequence[Sequence[dict[str, float]]]) -> list[Figure]:
        def paired(key: str, name: str, unit: str, target: Target | None = None) -> Figure:
            ours, theirs = ([value[key] for value in side] for side in values)
            return Figure.paired(name, unit, ours, NAMES[1], theirs, target)

        return [
            paired("return", f"death of a server until it is back, {NAMES[0]}", "s", TARGET),
            paired("load", "  of it: fork until its weights are loaded", "s"),
            paired("memory", "memory of all expert servers", "GB"),
        ]

    print_progress("loading two graphs")
    async with AsyncExitStack() as stack:
        sides = [RestartSide(graph, "experts.0") for graph in graphs]
        for side in sides:
            await stack.enter_async_context(side.running)
        yield Trial([side.restart for side in sides], figures)
