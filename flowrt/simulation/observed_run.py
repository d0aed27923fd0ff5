"""A run on simulated processes, whose workers the checks observe."""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import replace
from importlib import import_module
from typing import Any

from flowrt.graph.model import GATEWAY, Graph
from flowrt.launcher.launcher import WORKER, LaunchOptions
from flowrt.launcher.run import Run
from flowrt.seams import Seams
from flowrt.simulation.case import Case
from flowrt.simulation.errors import InvariantError
from flowrt.simulation.faults import Faults
from flowrt.simulation.inside import WorkerInternals, credit_faults
from flowrt.simulation.processes import SimulatedBackend
from flowrt.simulation.world import World
from flowrt.system.process_backend import BackendOwner
from flowrt.transports.contract import Channel

_latest_run: ContextVar[ObservedRun] = ContextVar("_latest_run")


class ObservedRun(Run):
    """`insides`: of the latest incarnation of each worker. `parts`: keyword arguments of Run."""

    def __init__(self, world: World, case: Case, graph: Graph, seams: Seams, **parts: Any) -> None:
        _latest_run.set(self)
        self.world, self.case = world, case
        self.insides: dict[str, WorkerInternals] = {}
        options = LaunchOptions(
            on_line=lambda name, line: None,
            worker=case.worker,
            unavailable_reason=lambda scheme: None,  # the network stands in for all of them
        )
        super().__init__(graph, replace(seams, open_backend=self._open_backend), options, **parts)
        self.faults = Faults(world, case.scenario, self.living_inside, case.processes.segfault_one_in, graph)

    def new_inside(self) -> WorkerInternals:
        """For a worker that begins."""
        return WorkerInternals(on_name=self.on_worker)

    def on_worker(self, inside: WorkerInternals) -> None:
        """A worker of the graph is about to load, or to take the name of one."""
        self.insides[inside.name] = inside

    def living_inside(self, name: str) -> WorkerInternals | None:
        process, inside = self.world.processes.get(name), self.insides.get(name)
        if process is None or inside is None:  # without a process: a worker inside the launching one
            return inside
        return inside if inside.node == process.node and not process.exit.done() else None

    def living_insides(self) -> list[WorkerInternals]:
        return [inside for name in self.insides if (inside := self.living_inside(name)) is not None]

    def check_leftovers(self) -> None:
        """Check that nothing is left when all has ended and no message is in flight."""
        for inside in self.living_insides():
            self.world.num_faults.update(inside.branches())
        if (left := self.left_behind()) is not None:
            raise InvariantError(*left)

    def left_behind(self) -> tuple[str, str] | None:
        """What is left (I8), or a credit that is lost (I4), when all has ended: the invariant and the text. It may still go while messages
        of a link that was slow are on their way."""
        insides = self.living_insides()
        names = {*self.graph.process_names(), GATEWAY}
        if foreign := [
            *(f"process {each.name}" for each in insides if each.name not in names),
            *(each for inside in insides for each in inside.foreign(self.graph)),
        ]:
            return "I8", "left of earlier versions of the graph: " + "; ".join(foreign)
        if left := [*(text for inside in insides for text in inside.leftovers()), *self.leftovers()]:
            return "I8", "left when all had ended: " + "; ".join(left)
        return ("I4", "; ".join(wrong)) if (wrong := credit_faults(insides)) else None

    async def _open_backend(
        self, run_id: str, owner: BackendOwner, preload: Sequence[str], num_processes: int, seconds: float
    ) -> SimulatedBackend:
        return await SimulatedBackend.open(self.world, owner, self.case.processes)


async def run_worker(control: Channel, seams: Seams) -> None:
    """The entry of each worker: runs the real worker and observes its internal state."""
    run = _latest_run.get()
    await import_module(WORKER.partition(":")[0]).serve(control, seams, run.new_inside())  # imported when used: it brings torch
