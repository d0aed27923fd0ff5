"""Injects faults into an ordinary run: `flowrt run --chaos "kill:experts.1@2s"`."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Any

from flowrt.api import RunningGraph
from flowrt.chaos.inject import Injector
from flowrt.chaos.plan import needs_fault_worker, parse_faults
from flowrt.chaos.watch import InjectedFault, Watch
from flowrt.observe import duration_text
from flowrt.seams import Clock

BACK_SECONDS = 15.0  # for killed processes to return when all answers are complete


class RunFaults:
    """Made before the graph is entered. The run gives it its events and lines. Raises UserError for faults that cannot be parsed."""

    def __init__(self, words: str, graph: RunningGraph, clock: Clock, say: Callable[[str], None]) -> None:
        self._clock = clock
        self._scenario = parse_faults(words, graph.graph)
        self._begun: float | None = None
        self.watch = Watch(clock)
        self._injector = Injector(graph, self.watch, clock, say, takes_orders=needs_fault_worker(self._scenario))

    async def run(self, answered: asyncio.Event) -> None:
        """Inject from the first request until all are `answered` and killed processes are back. Later faults are left out."""
        self._begun = self._clock.now()
        async with asyncio.TaskGroup() as tasks:
            faults = tasks.create_task(self._injector.run(self._scenario, self._begun), name="faults")
            await answered.wait()
            faults.cancel()
        killed = [injected for injected in self.watch.injected_faults if injected.kind == "crash" and not injected.missed]
        watch = self.watch
        await watch.wait_until(
            lambda: all(watch.back_seconds(injected) < math.inf or watch.is_given_up(injected) for injected in killed), BACK_SECONDS
        )

    def sentences(self, num_requests: int, num_complete: int) -> list[str]:
        """A line per fault with its effect, and one about the answers."""
        lines = [self._sentence(injected) for injected in self.watch.injected_faults]
        if (left_out := len(self._scenario.faults) - len(self.watch.injected_faults)) > 0:
            lines.append(f"chaos: {left_out} of {len(self._scenario.faults)} faults left out: all answers had ended before their time")
        if num_complete < num_requests:
            return [*lines, f"chaos: {num_complete} of {num_requests} answers are complete"]
        return [*lines, f"chaos: {'the answer is' if num_requests == 1 else f'all {num_requests} answers are'} complete"]

    def as_json(self) -> list[dict[str, Any]]:
        return [
            {
                "fault": injected.text,
                "pid": injected.pid,
                "seconds": self._since(injected),
                "missed": injected.missed or None,
                "left_seconds": _known(self.watch.left_seconds(injected)),
                "lost_seconds": _known(self.watch.lost_seconds(injected)),
                "back_seconds": _known(self.watch.back_seconds(injected)),
            }
            for injected in self.watch.injected_faults
        ]

    def _since(self, injected: InjectedFault) -> float:
        return injected.at - (self._begun if self._begun is not None else injected.at)

    def _sentence(self, injected: InjectedFault) -> str:
        if injected.missed:
            return f"chaos: {injected.text}: {injected.missed}"
        words = f"chaos: {injected.text} (pid {injected.pid}) {duration_text(self._since(injected))} after the first request"
        lost, back = self.watch.lost_seconds(injected), self.watch.back_seconds(injected)
        if lost < math.inf:
            words += f"; missed after {duration_text(lost)}"
        if back < math.inf:
            words += f", back after {duration_text(back)}"
        elif injected.kind == "crash":
            words += ", not back"
        return words


def _known(seconds: float) -> float | None:
    return round(seconds, 5) if math.isfinite(seconds) else None
