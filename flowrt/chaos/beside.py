"""Faults beside an ordinary run: `flowrt run --chaos "kill:experts.1@2s"`.

Here: Beside, which the run gives its events and lines to, starts with its first request and ends with its last. Not here: what the run
does with its requests (flowrt/cli/run.py), the parts (plan.py, inject.py, watch.py).
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Any

from flowrt.api import RunningGraph
from flowrt.chaos.inject import Injector
from flowrt.chaos.plan import needs_obedience, parse_words
from flowrt.chaos.watch import Deed, Watch
from flowrt.observe import duration_text
from flowrt.seams import Clock

BACK_SECONDS = 15.0  # that a run waits for whom it has killed, when its answers are complete


class Beside:
    """Made before the graph is entered. Raises UserError, one line, for words that make no sense or name nobody."""

    def __init__(self, words: str, graph: RunningGraph, clock: Clock, say: Callable[[str], None]) -> None:
        self._clock = clock
        self._scenario = parse_words(words, graph.graph)
        self._begun: float | None = None
        self.watch = Watch(clock)
        self._injector = Injector(graph, self.watch, clock, say, obedient=needs_obedience(self._scenario))

    async def run(self, answered: asyncio.Event) -> None:
        """From the first request until all are `answered` and who was killed is back. Faults that would come later are left out."""
        self._begun = self._clock.now()
        async with asyncio.TaskGroup() as tasks:
            faults = tasks.create_task(self._injector.run(self._scenario, self._begun), name="faults")
            await answered.wait()
            faults.cancel()
        killed = [deed for deed in self.watch.deeds if deed.kind == "crash" and not deed.missed]
        watch = self.watch
        await watch.wait_until(lambda: all(watch.back_seconds(deed) < math.inf or watch.is_given_up(deed) for deed in killed), BACK_SECONDS)

    def sentences(self, num_requests: int, num_complete: int) -> list[str]:
        """For people: what befell whom, and what came of it."""
        lines = [self._sentence(deed) for deed in self.watch.deeds]
        if (left_out := len(self._scenario.faults) - len(self.watch.deeds)) > 0:
            lines.append(f"chaos: {left_out} of {len(self._scenario.faults)} faults left out: all answers had ended before their time")
        if num_complete < num_requests:
            return [*lines, f"chaos: {num_complete} of {num_requests} answers are complete"]
        return [*lines, f"chaos: {'the answer is' if num_requests == 1 else f'all {num_requests} answers are'} complete"]

    def as_json(self) -> list[dict[str, Any]]:
        return [
            {
                "fault": deed.text,
                "pid": deed.pid,
                "seconds": self._since(deed),
                "missed": deed.missed or None,
                "left_seconds": _known(self.watch.left_seconds(deed)),
                "lost_seconds": _known(self.watch.lost_seconds(deed)),
                "back_seconds": _known(self.watch.back_seconds(deed)),
            }
            for deed in self.watch.deeds
        ]

    def _since(self, deed: Deed) -> float:
        return deed.at - (self._begun if self._begun is not None else deed.at)

    def _sentence(self, deed: Deed) -> str:
        if deed.missed:
            return f"chaos: {deed.text}: {deed.missed}"
        words = f"chaos: {deed.text} (pid {deed.pid}) {duration_text(self._since(deed))} after the first request"
        lost, back = self.watch.lost_seconds(deed), self.watch.back_seconds(deed)
        if lost < math.inf:
            words += f"; missed after {duration_text(lost)}"
        if back < math.inf:
            words += f", back after {duration_text(back)}"
        elif deed.kind == "crash":
            words += ", not back"
        return words


def _known(seconds: float) -> float | None:
    return round(seconds, 5) if math.isfinite(seconds) else None
