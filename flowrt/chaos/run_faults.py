"""Injects faults into an ordinary run: `flowrt run --chaos "kill:experts.1@2s"`."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Any

from flowrt.api import RunningGraph
from flowrt.chaos.inject import Injector
from flowrt.chaos.observer import InjectedFault, RunObserver
from flowrt.chaos.plan import needs_fault_worker, parse_faults
from flowrt.observe import duration_text
from flowrt.seams import Clock

BACK_SECONDS = 15.0  # for killed processes to return when all answers are complete


class RunFaults:
    """The faults of a run. Create it before the graph is entered, and pass events and lines to `observer`. Raises UserError for faults that
    cannot be parsed."""

    def __init__(self, faults: str, graph: RunningGraph, clock: Clock, log: Callable[[str], None]) -> None:
        self._clock = clock
        self._scenario = parse_faults(faults, graph.graph)
        self._begun = 0.0
        self.observer = RunObserver(clock)
        self._injector = Injector(graph, self.observer, clock, log, takes_orders=needs_fault_worker(self._scenario))

    async def run(self, completed: asyncio.Event) -> None:
        """Inject from the first request until all are `completed` and killed processes are back. Later faults are left out."""
        self._begun = self._clock.now()
        async with asyncio.TaskGroup() as tasks:
            injecting = tasks.create_task(self._injector.run(self._scenario, self._begun), name="faults")
            await completed.wait()
            injecting.cancel()
        killed = [injected for injected in self.observer.injected_faults if injected.kind == "crash" and not injected.missed]
        await self.observer.wait_until(lambda: all(map(self.observer.is_back_or_given_up, killed)), BACK_SECONDS)

    def sentences(self, num_requests: int, num_complete: int) -> list[str]:
        """A line per fault with its effect, and one about the answers."""
        lines = [self._sentence(injected) for injected in self.observer.injected_faults]
        if (left_out := len(self._scenario.faults) - len(self.observer.injected_faults)) > 0:
            lines.append(f"chaos: {left_out} of {len(self._scenario.faults)} faults left out: all answers had ended before their time")
        if num_complete < num_requests:
            return [*lines, f"chaos: {num_complete} of {num_requests} answers are complete"]
        return [*lines, f"chaos: {'the answer is' if num_requests == 1 else f'all {num_requests} answers are'} complete"]

    @property
    def all_injected(self) -> bool:
        faults = self.observer.injected_faults
        return len(faults) == len(self._scenario.faults) and not any(injected.missed for injected in faults)

    def as_json(self) -> list[dict[str, Any]]:
        return self.observer.as_json(self._begun)

    def _sentence(self, injected: InjectedFault) -> str:
        if injected.missed:
            return f"chaos: {injected.text}: {injected.missed}"
        text = f"chaos: {injected.text} (pid {injected.pid}) {duration_text(injected.at - self._begun)} after the first request"
        lost, back = self.observer.lost_seconds(injected), self.observer.back_seconds(injected)
        if lost < math.inf:
            text += f"; detected after {duration_text(lost)}"
        if back < math.inf:
            text += f", back after {duration_text(back)}"
        elif injected.kind == "crash":
            text += ", not back"
        return text
