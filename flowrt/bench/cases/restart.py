"""From the death of a process to its return: with a standby process, with weights that the processes of the host share, and from files.

Three graphs that differ in `reliability.standby` and `share_weights` alone run at once; in turns one process of each is killed. The files
are in the page cache, since all graphs have read them.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path

from flowrt.api import RunningGraph, open_graph, read_graph
from flowrt.bench.measure.benchmark import Results, Trial, open_all
from flowrt.bench.measure.memory import resident_bytes, served_model
from flowrt.bench.report.figures import Figure, Target
from flowrt.bench.report.report import print_progress
from flowrt.errors import UserError
from flowrt.graph.model import Graph
from flowrt.graph.recovery import standby_names, survives
from flowrt.launcher import events
from flowrt.launcher.starts import standby_loads
from flowrt.launcher.transport_choice import pack
from flowrt.system.machine_limits import usable_cores

SETTINGS = {
    "a standby process": ("standby=1", "share_weights=true"),
    "weights in shared memory": ("standby=0", "share_weights=true"),
    "weights from files": ("standby=0", "share_weights=false"),
}
BUDGET = "reliability.restarts=1000", "reliability.restart_window_seconds=0.05"  # each restart is the first of its window: without delay
TARGET = Target(1.0)
RETURN_SECONDS = 300.0


class RestartSide:
    """One of the graphs, and the process of it that is killed."""

    def __init__(self, graph: Graph, victim: str) -> None:
        self.running: RunningGraph = open_graph(graph, on_event=self._on_event)
        self._victim = victim
        self._began = 0.0
        self._loaded: dict[str, float] = {}
        self._back = asyncio.Event()
        self._return_seconds = 0.0
        self._standby = "".join(standby_names(graph))  # one at most
        self._standby_ready = asyncio.Event()

    def _on_event(self, event: events.Event) -> None:
        match event:
            case events.WorkerStarted(name, _) if name == self._victim:
                self._began = time.perf_counter()
            case events.WorkerListening(name):
                self._loaded[name] = time.perf_counter() - self._began
                if name == self._standby:
                    self._standby_ready.set()
            case events.WorkerRestarted(name, _, seconds) if name == self._victim:
                self._return_seconds = seconds
                self._back.set()

    async def restart(self) -> dict[str, float]:
        """Kill the process. Returns the seconds until its next incarnation is connected, their part from the fork until its weights are
        loaded, and the memory of all servers after a request."""
        self._back.clear()
        async with asyncio.timeout(RETURN_SECONDS):
            if self._standby:
                await self._standby_ready.wait()
                self._standby_ready.clear()
            os.kill(self.running.pids[self._victim], signal.SIGKILL)
            await self._back.wait()
        await self.running.complete([5, 6, 7, 8], max_tokens=4)
        servers = [pid for name, pid in self.running.pids.items() if name.startswith("experts")]
        return {"return": self._return_seconds, "load": self._loaded[self._victim], "memory": sum(map(resident_bytes, servers)) / 1e9}


def read_graphs(graph_file: Path, model: Path | None, overrides: Sequence[str], victim: str = "experts.0") -> list[Graph]:
    """The graphs of SETTINGS. Raises UserError for a process that the run cannot lose, or that a standby process cannot stand in for."""
    graphs = [read_graph(graph_file, [*BUDGET, *overrides, *(f"reliability.{key}" for key in keys)], model) for keys in SETTINGS.values()]
    served_model(graphs[0])
    if victim not in graphs[0].process_names() or not survives(graphs[0], victim):
        raise UserError(f"{graph_file}: the run cannot lose {victim}; use --set deploy.experts.servers=2 --set deploy.experts.replicas=2")
    if victim not in standby_loads(graphs[0], pack(graphs[0]), usable_cores()):
        why = "it computes on another device than the CPU, shares no weights, or has another number of compute threads"
        raise UserError(f"{graph_file}: no standby process can replace {victim}: {why}")
    return graphs


async def measure(graphs: Sequence[Graph], victim: str = "experts.0") -> Results:
    names = list(SETTINGS)

    def figures(values: Sequence[Sequence[dict[str, float]]]) -> list[Figure]:
        def paired(key: str, name: str, unit: str, ours: int, target: Target | None = None) -> Figure:
            mine, theirs = ([value[key] for value in values[side]] for side in (ours, ours + 1))
            return Figure.paired(f"{name}, {names[ours]}", unit, mine, names[ours + 1], theirs, target)

        return [
            *(paired("return", f"death of {victim} until it is back", "s", side, TARGET) for side in (0, 1)),
            *(paired("load", "  of it: start until its weights are loaded", "s", side) for side in (0, 1)),
            paired("memory", "memory of all expert servers", "GB", 1),
        ]

    print_progress("loading three graphs")
    sides = [RestartSide(graph, victim) for graph in graphs]
    async with open_all(side.running for side in sides):
        yield Trial([side.restart for side in sides], figures)
