"""Runs a graph of user operators in virtual time: the real launcher, endpoint and workers, while calls are made and some of them cancelled.

An operator may raise: then exactly its call fails. `check_calls` compares every call with the same call alone on a calm network.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from flowrt.errors import NotRunningError, OperatorError, UserError, WorkerDiedError
from flowrt.graph.model import GATEWAY
from flowrt.simulation.case import Case, SimulatedCall
from flowrt.simulation.errors import InvariantError
from flowrt.simulation.inside import WorkerInternals
from flowrt.simulation.invariants import may_fail, may_not_start
from flowrt.simulation.network_conditions import CALM
from flowrt.simulation.observed_run import ObservedRun
from flowrt.simulation.served import Served
from flowrt.simulation.world import Outcome, World, run

QUIET_SECONDS = 2.0  # after the last call, with everything healed: all messages in flight arrive
SETTLE_SECONDS = 30.0

Result = tuple[Any, ...]  # ("output", port, values, ...), or ("error", node)


@dataclass
class CallRecord:
    """What one caller got. `result`: None when it has left, or the run has failed."""

    call: SimulatedCall
    result: Result | None = None
    has_left: bool = False


@dataclass(frozen=True)
class CallsServed:
    """What all callers got. `failed` is the process that the run failed for, `failure` the text, or None."""

    clients: tuple[CallRecord, ...]
    failed: str | None
    failure: str | None


AnyServed = Served | CallsServed


def simulate_calls(case: Case) -> Outcome[CallsServed]:
    """Run a case. Raises InvariantError, DeadlockError, LivelockError, UnhandledError, and what the code itself raises."""
    return run(case.seed, lambda world: _serve(world, case), conditions=case.conditions, cost=case.cost, max_seconds=case.max_seconds)


async def _serve(world: World, case: Case) -> CallsServed:
    """Run the case's graph until every call has ended. Raises InvariantError for what is left behind (I4, I8)."""
    simulated = _SimulatedCalls(world, case)
    await simulated.serve()
    if left := world.leftovers():
        raise InvariantError("I8", f"left behind: {', '.join(left)}")
    failure = simulated.launcher.failure
    failed = None if failure is None else getattr(failure, "process", "")
    return CallsServed(tuple(simulated.records), failed, None if failure is None else str(failure))


class _SimulatedCalls(ObservedRun):
    def __init__(self, world: World, case: Case) -> None:
        super().__init__(world, case, case.graph, world.seams(GATEWAY))
        self.records: list[CallRecord] = []
        world.loop.accounts.append(lambda: [text for inside in self.living_insides() for text in inside.waiting()])

    async def serve(self) -> None:
        clock = self.launcher.seams.clock
        try:
            async with self:
                self.insides[GATEWAY] = WorkerInternals(self.endpoint.worker)
                self.faults.begin()
                async with asyncio.TaskGroup() as callers:
                    for number, call in enumerate(self.case.calls):
                        await clock.sleep(call.after_seconds)
                        self.records.append(CallRecord(call))
                        callers.create_task(self._call(self.records[-1]), name=f"caller {number}")
                if self.launcher.failure is None:
                    await self._quieten()
        except (UserError, WorkerDiedError):
            if self.launcher.failure is None:
                raise
        self.faults.heal()

    async def _call(self, record: CallRecord) -> None:
        torch = import_module("torch")
        tensors = {port: torch.tensor([record.call.value]) for port in self.endpoint.ports}
        try:
            async with asyncio.timeout(record.call.cancel_seconds):
                outputs = await self.endpoint.call(tensors)
            record.result = ("output", *sorted((port, *tensor.tolist()) for port, tensor in outputs.items()))
        except TimeoutError:
            record.has_left = True
        except OperatorError as error:
            record.result = "error", error.node
        except (UserError, WorkerDiedError, NotRunningError) as error:
            if self.launcher.failure is None:
                raise InvariantError("I7", f"a call of {record.call.value} raised {error} in a run that goes on") from error

    async def _quieten(self) -> None:
        """Heal all faults, wait for messages in flight, and check for leftovers."""
        self.faults.heal()
        self.world.network.conditions = CALM
        clock, healed = self.launcher.seams.clock, self.world.loop.time()
        insides = self.living_insides()
        await clock.sleep(QUIET_SECONDS)
        while self.world.loop.time() < healed + SETTLE_SECONDS:
            if not (self.left_behind() or any(inside.computes for inside in insides)):
                break  # else messages of a link that was slow are on their way
            await clock.sleep(QUIET_SECONDS)
        if self.launcher.failure is not None:
            return
        self.check_leftovers()


def check_calls(case: Case, served: CallsServed, references: Sequence[Result]) -> None:
    """Raise InvariantError unless every call has the result of the same call alone, or its caller left, or the run may have failed."""
    if (
        served.failed is not None
        and served.failed not in may_fail(case)
        and not (served.failed in may_not_start(case) and not served.clients)
    ):
        raise InvariantError("I7", f"the run failed for {served.failed}, and no fault that permits it hit that process: {served.failure}")
    for number, (record, reference) in enumerate(zip(served.clients, references, strict=False)):
        if record.result is None and not record.has_left and served.failed is None:
            raise InvariantError("I5", f"call {number} has not ended")
        if record.result not in (None, reference):
            raise InvariantError("I1", f"call {number} of {record.call.value} gave {record.result}, alone it gives {reference}")
