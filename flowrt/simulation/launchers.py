"""Runs a case in virtual time: one launcher, or with a request log several, each of which continues the requests of the one before."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from contextvars import copy_context
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from flowrt.simulation.case import Case
from flowrt.simulation.cluster import SimulatedRun, serve
from flowrt.simulation.errors import InvariantError
from flowrt.simulation.log_disk import LauncherLog, LogDisk
from flowrt.simulation.served import Served
from flowrt.simulation.waitables import OUTSIDE, current_node
from flowrt.simulation.world import Outcome, World, joined, run

T = TypeVar("T")
OBSERVER = "observer"  # the node of a task that outlives the launcher
OTHER_SEED = 1 << 40  # more for each further launcher: it draws other seeds for requests than the first one
MAX_STEPS = 400_000  # of a run, which usually has some thousands: an endless recomputation takes virtual time, but not much


def simulate(case: Case) -> Outcome[Served]:
    """Run a case. Raises InvariantError, DeadlockError, LivelockError, UnhandledError, and what the code itself raises."""
    if case.log is None:
        return _run(case, case.seed, lambda world: serve(world, case))
    observer, disk, outcomes = copy_context(), LogDisk(case.seed), list[Outcome[SimulatedRun]]()
    observer.run(current_node.set, OBSERVER)
    while not outcomes or outcomes[-1].result.is_continued:
        launcher = partial(serve_until_death, case=case, disk=disk, earlier=[outcome.result for outcome in outcomes])
        outcomes.append(observer.run(_run, case, case.seed + len(outcomes) * OTHER_SEED, launcher))
    results = [outcome.result.outcome() for outcome in outcomes]  # clients have what they saw of all launchers
    most_poisoned, most_parts = max(each.num_poisoned for each in results), max(each.num_poison_parts for each in results)
    served = replace(results[-1], num_poisoned=most_poisoned, num_poison_parts=most_parts)
    if served.failure is None:
        disk.check_closed()
    return joined(outcomes, served)


def _run(case: Case, seed: int, main: Callable[[World], Coroutine[Any, Any, T]]) -> Outcome[T]:
    return run(seed, main, conditions=case.conditions, cost=case.cost, max_seconds=case.max_seconds, max_steps=MAX_STEPS)


async def serve_until_death(world: World, case: Case, disk: LogDisk, earlier: Sequence[SimulatedRun]) -> SimulatedRun:
    """As `serve`, for one of the launchers that have the log one after another. Its death ends all that runs, as that of a real launcher
    does, but for this task, which is on another node."""
    assert case.log is not None
    log = LauncherLog(world, disk, case.log, len(earlier))
    simulated: SimulatedRun | None = None

    async def launch() -> None:
        nonlocal simulated
        simulated = SimulatedRun(world, case, log, earlier[-1].clients.records if earlier else ())
        await simulated.serve()
        if left := world.leftovers():
            raise InvariantError("I8", f"left behind: {', '.join(left)}")

    launcher = world.loop.create_task(launch(), name="launcher", context=world.context(OUTSIDE))
    await asyncio.wait([launcher, log.died], return_when=asyncio.FIRST_COMPLETED)
    if launcher.done():
        launcher.result()
    assert simulated is not None
    simulated.clients.freeze()
    return simulated
