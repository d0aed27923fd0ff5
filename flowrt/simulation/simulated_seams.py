"""Implements two simulated seams: a clock that may be skewed, and a compute thread that takes virtual time."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from flowrt.seams import BOUND_SECONDS, STILL_SECONDS, Running
from flowrt.simulation.loop import VirtualLoop
from flowrt.simulation.network_conditions import is_hit
from flowrt.simulation.waitables import VirtualHandle, set_result

T = TypeVar("T")
RESOLUTION_SECONDS = 1e-9  # of timers


@dataclass(frozen=True)
class ComputeDelays:
    """Virtual compute time of a call, drawn between `min_seconds` and `max_seconds`.

    After each call one label in `short_one_in` counts as short: its next call takes no time and does not yield. One worker in
    `beside_one_in` computes beside its loop: handles that a call passes on before its end reach the loop at random times. 0: never.
    """

    min_seconds: float = 50e-6
    max_seconds: float = 2e-3
    short_one_in: int = 3
    beside_one_in: int = 2


class SimulatedClock:
    """The loop's time plus this node's own offset: monotonic clocks of different processes are unrelated. `skew` changes the rate
    from then on; the clock never goes back."""

    def __init__(self, loop: VirtualLoop, offset_seconds: float) -> None:
        self._loop = loop
        self._rates = [(loop.time(), loop.time() + offset_seconds, 1.0)]  # the loop's time, the clock's, and the rate from then on

    def now(self) -> float:
        return self.shown_at(self._loop.time())

    def shown_at(self, time: float) -> float:
        """What this clock showed at `time` of the loop."""
        since, shown, rate = next((each for each in reversed(self._rates) if each[0] <= time), self._rates[0])
        return shown + rate * (time - since)

    def skew(self, rate: float) -> None:
        self._rates.append((self._loop.time(), self.now(), rate))

    async def sleep(self, seconds: float) -> None:
        # A shorter sleep may be lost in the rounding of the clocks, so that one who sleeps until a moment would never see it.
        await asyncio.sleep(max(seconds / self._rates[-1][2], RESOLUTION_SECONDS) if seconds > 0 else 0.0)


class SimulatedCompute:
    """Runs each call on the loop, and lets virtual time pass before and after it, because a thread may read its input at any time.
    Handles that the call passes to the loop arrive during the time after it.

    The time passes on a separate node, `thread_of` the process's node: a blocked loop does not stop its thread, and a hung thread does
    not stop its loop. The largest of `slow_factors` multiplies the duration of calls from now on.
    """

    def __init__(self, loop: VirtualLoop, node: str, chance: random.Random, cost: ComputeDelays, clock: SimulatedClock) -> None:
        self._loop = loop
        self._clock = clock
        self._thread = thread_of(node)
        self.beside_loop = is_hit(chance, cost.beside_one_in)
        self.slow_factors: list[float] = []
        self._random = chance
        self._cost = cost
        self._running: Running | None = None
        self._computed_seconds = clock.now()
        self._closed = False
        self.is_inline = False  # whether the running call blocks the loop
        self.never_ends = False  # the running call hangs, or has ended its process
        self._short: dict[str, bool] = {}  # label -> whether its next call passes for short

    @property
    def running(self) -> Running | None:
        """The running call. Its processor time grows until its thread is parked."""
        running = self._running
        if running is None or running.bound_seconds != BOUND_SECONDS:
            return running
        self._computed_seconds = max(self._computed_seconds, self._clock.shown_at(self._loop.last_run_time(self._thread)))
        return Running(running.label, running.since_seconds, running.bound_seconds, self._computed_seconds, STILL_SECONDS)

    @property
    def slowness(self) -> float:
        return max(self.slow_factors, default=1.0)

    def is_short(self, label: str) -> bool:
        return self._running is None and self._short.get(label, False)

    def run_inline(self, label: str, call: Callable[[], T]) -> T:
        self._begin(label, BOUND_SECONDS)
        self.is_inline = True
        try:
            return call()
        except Exception:
            if self.never_ends:
                raise asyncio.CancelledError from None  # nothing of this callback follows
            raise
        finally:
            self.is_inline = False
            self._end(label)

    async def run(self, label: str, call: Callable[[], T], bound_seconds: float | None = None) -> T:
        short = self.is_short(label)
        self._begin(label, BOUND_SECONDS if bound_seconds is None else bound_seconds)
        try:
            return call() if short else await self._run_long(call)
        except Exception:
            if self.never_ends:
                await self._loop.create_future()
            raise
        finally:
            self._end(label)

    async def _run_long(self, call: Callable[[], T]) -> T:
        seconds = self.slowness * self._random.uniform(self._cost.min_seconds, self._cost.max_seconds)
        before = seconds * self._random.choice((0.0, 1.0, self._random.random()))
        if before:
            await self._pass(before, [])
        handles: list[VirtualHandle] = []
        try:
            with self._loop.on_a_thread() as handles:
                return call()
        finally:
            if handles or before < seconds:
                await self._pass(seconds - before, handles)

    def _begin(self, label: str, bound_seconds: float) -> None:
        if self._running is not None:
            raise RuntimeError(f"{label} while {self._running.label} runs: a worker computes one call at a time")
        if self._closed:
            raise RuntimeError(f"{label} after the end of this worker's computing")
        self._running = Running(label, self._clock.now(), bound_seconds)

    def _end(self, label: str) -> None:
        self._running = None
        self._short[label] = is_hit(self._random, self._cost.short_one_in)

    async def aclose(self) -> None:
        self._closed = True

    async def _pass(self, seconds: float, handles: Sequence[VirtualHandle]) -> None:
        """Let time pass on the thread. Meanwhile its handles reach the loop in order, at random times."""
        loop, now = self._loop, self._loop.time()
        done: asyncio.Future[None] = loop.create_future()
        moments = sorted(seconds * self._random.random() for _ in handles)
        for moment, handle in zip(moments, handles, strict=True):
            loop.call_at_node(now + moment, self._thread, loop.accept, handle)
        timer = loop.call_at_node(now + seconds, self._thread, set_result, done, None)
        try:
            await asyncio.shield(done)
        except asyncio.CancelledError:
            await asyncio.wait([done])  # as with a thread, which cannot be stopped
            raise
        finally:
            timer.cancel()


def thread_of(node: str) -> str:
    """The node on which the compute thread of a process runs."""
    return f"{node}+thread"
