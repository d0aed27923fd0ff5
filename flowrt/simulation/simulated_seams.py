"""The simulated forms of two seams: a clock that may run wrong, and computing that takes virtual time.

Here: SimulatedClock, ComputeCost, SimulatedCompute. Not here: the other seams, which are plain functions of a world (world.py).
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from flowrt.seams import Running
from flowrt.simulation.loop import VirtualLoop

T = TypeVar("T")


@dataclass(frozen=True)
class ComputeCost:
    """Virtual seconds a call takes, drawn between these. After each call one label in `short_one_in` passes for short: its next call
    takes no time and gives way to nobody. 0: none ever does."""

    least_seconds: float = 50e-6
    most_seconds: float = 2e-3
    short_one_in: int = 3


class SimulatedClock:
    """The loop's time plus this node's own offset: monotonic clocks of different processes have nothing in common. `skew` makes it go
    at another rate from then on; it never goes back."""

    def __init__(self, loop: VirtualLoop, offset_seconds: float) -> None:
        self._loop = loop
        self._since, self._shown, self._rate = loop.time(), loop.time() + offset_seconds, 1.0

    def now(self) -> float:
        return self._shown + self._rate * (self._loop.time() - self._since)

    def skew(self, rate: float) -> None:
        self._since, self._shown, self._rate = self._loop.time(), self.now(), rate

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds / self._rate)


class SimulatedCompute:
    """Makes the call on the loop, and lets virtual time pass before or after it: nothing says when a thread looks at its input.

    The time passes on a node of its own, `thread_of` the process's: a blocked loop does not stop its thread, nor a hung thread its
    loop. The largest of `slow_factors` multiplies what calls take from now on.
    """

    def __init__(self, loop: VirtualLoop, node: str, chance: random.Random, cost: ComputeCost) -> None:
        self._loop = loop
        self._thread = thread_of(node)
        self.slow_factors: list[float] = []
        self._random = chance
        self._cost = cost
        self._running: Running | None = None
        self._closed = False
        self._short: dict[str, bool] = {}  # label -> whether its next call passes for short

    @property
    def running(self) -> Running | None:
        return self._running

    def is_short(self, label: str) -> bool:
        return self._running is None and self._short.get(label, False)

    def run_inline(self, label: str, call: Callable[[], T]) -> T:
        self._begin(label, 60.0)
        try:
            return call()
        finally:
            self._end(label)

    async def run(self, label: str, call: Callable[[], T], bound_seconds: float = 60.0) -> T:
        short = self.is_short(label)
        self._begin(label, bound_seconds)
        try:
            if short:
                return call()
            seconds = max(self.slow_factors, default=1.0) * self._random.uniform(self._cost.least_seconds, self._cost.most_seconds)
            late = self._random.random() < 0.5
            if late:
                await self._pass(seconds)
            result = call()
            if not late:
                await self._pass(seconds)
            return result
        finally:
            self._end(label)

    def _begin(self, label: str, bound_seconds: float) -> None:
        if self._running is not None:
            raise RuntimeError(f"{label} while {self._running.label} runs: a worker computes one call at a time")
        if self._closed:
            raise RuntimeError(f"{label} after the end of this worker's computing")
        self._running = Running(label, self._loop.time(), bound_seconds)

    def _end(self, label: str) -> None:
        self._running = None
        one_in = self._cost.short_one_in
        self._short[label] = one_in > 0 and self._random.randrange(one_in) == 0

    async def aclose(self) -> None:
        self._closed = True

    async def _pass(self, seconds: float) -> None:
        done: asyncio.Future[None] = self._loop.create_future()
        timer = self._loop.call_at_node(self._loop.time() + seconds, self._thread, _set, done)
        try:
            await asyncio.shield(done)
        except asyncio.CancelledError:
            await asyncio.wait([done])  # as with a thread, which cannot be stopped
            raise
        finally:
            timer.cancel()


def _set(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def thread_of(node: str) -> str:
    """The node on which the compute thread of a process runs."""
    return f"{node}+thread"
