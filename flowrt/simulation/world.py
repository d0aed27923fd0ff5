"""A simulated world: the seams of every node, and one run of it.

Here: SimulatedClock, SimulatedCompute, World, `run`, Outcome. Not here: the loop and the network it stands on (loop.py, transport.py),
whole clusters (cluster.py). Called by tests, cluster.py and the command line (__main__.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import random
from collections.abc import Callable, Coroutine
from contextvars import Context, copy_context
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from flowrt.seams import Running, Seams
from flowrt.simulation.errors import SimulationError, UnhandledError
from flowrt.simulation.loop import START_SECONDS, VirtualLoop, current_node
from flowrt.simulation.transport import NetworkConditions, SimulatedNetwork

T = TypeVar("T")


@dataclass(frozen=True)
class ComputeCost:
    """Virtual seconds a call takes, drawn between these. After each call one label in `short_one_in` passes for short: its next call
    takes no time and gives way to nobody. 0: none ever does."""

    least_seconds: float = 50e-6
    most_seconds: float = 2e-3
    short_one_in: int = 3


class SimulatedClock:
    """The loop's time plus this node's own offset: monotonic clocks of different processes have nothing in common."""

    def __init__(self, loop: VirtualLoop, offset_seconds: float) -> None:
        self._loop = loop
        self._offset_seconds = offset_seconds

    def now(self) -> float:
        return self._loop.time() + self._offset_seconds

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


class SimulatedCompute:
    """Makes the call on the loop, and lets virtual time pass before or after it: nothing says when a thread looks at its input."""

    def __init__(self, loop: VirtualLoop, chance: random.Random, cost: ComputeCost) -> None:
        self._loop = loop
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
            seconds = self._random.uniform(self._cost.least_seconds, self._cost.most_seconds)
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
        done = self._loop.create_future()
        timer = self._loop.call_later(seconds, _set, done)
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


class World:
    """The nodes of one run and what they share."""

    def __init__(self, seed: int, loop: VirtualLoop, conditions: NetworkConditions, cost: ComputeCost) -> None:
        self.seed = seed
        self.loop = loop
        self.network = SimulatedNetwork(loop, seed, conditions)
        self._cost = cost
        self._num_incarnations = 0
        self._random = random.Random(f"world {seed}")

    def seams(self, node: str) -> Seams:
        """The seams for one process of the run."""
        chance = random.Random(f"node {node} {self.seed}")
        return Seams(
            clock=SimulatedClock(self.loop, chance.uniform(0.0, 1000.0)),
            new_incarnation=self.new_incarnation,
            new_seed=lambda: chance.getrandbits(63),
            new_compute=lambda name: SimulatedCompute(self.loop, random.Random(f"compute {name} {node} {self.seed}"), self._cost),
            transport=self.network.transport,
            resident_bytes=lambda: 0,
            random=chance,
        )

    def context(self, node: str) -> Context:
        """A context in which everything belongs to `node`; give it to TaskGroup.create_task."""
        context = copy_context()
        context.run(current_node.set, node)
        return context

    def new_incarnation(self) -> str:
        self._num_incarnations += 1
        return f"{self._num_incarnations:04x}"

    def new_key(self) -> bytes:
        """The key of a run: as good as any, here."""
        return self._random.randbytes(32)


@dataclass(frozen=True)
class Outcome(Generic[T]):
    """What a run came to. Equal seeds and code give equal digests, in every process."""

    result: T
    digest: str
    virtual_seconds: float
    num_steps: int
    num_frames: int


def run(
    seed: int,
    main: Callable[[World], Coroutine[Any, Any, T]],
    *,
    conditions: NetworkConditions | None = None,
    cost: ComputeCost | None = None,
    max_seconds: float = 3600.0,
) -> Outcome[T]:
    """Run `main(world)` to its end in virtual time.

    Raises what it raises, DeadlockError, LivelockError, and UnhandledError when a task was left running or an error went unseen.
    The collector of cycles is off meanwhile, since what it would find first is not the seed's choice, and runs once at the end.
    """
    collecting = gc.isenabled()
    gc.disable()
    gc.freeze()  # what was there before is not looked at when the run's own leavings are collected
    loop = VirtualLoop(seed, max_seconds=max_seconds)  # type: ignore[abstract]  # sockets and signals are left out on purpose
    try:
        world = World(seed, loop, conditions or NetworkConditions(), cost or ComputeCost())
        try:
            result = loop.run_until_complete(main(world))
        except BaseException as error:
            error.add_note(f"in the simulated run of seed {seed}")
            with contextlib.suppress(SimulationError):  # the first error is the one to tell
                loop.finish()
            raise
        outcome = Outcome(result, loop.digest(), loop.time() - START_SECONDS, loop.num_steps, world.network.num_frames)
        left = loop.finish()
        gc.collect()
        loop.raise_failures()
        if left:
            raise UnhandledError(f"seed {seed}: tasks left running at the end: {', '.join(left)}")
        return outcome
    finally:
        loop.close()
        gc.unfreeze()
        if collecting:
            gc.enable()
