"""Runs a graph of user operators in virtual time: the real launcher, endpoint and workers, while calls are made and some of them cancelled.

An operator may raise: then exactly its call fails. `check_calls` compares every call with the same call alone on a calm network.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

from flowrt.errors import NotRunningError, OperatorError, UserError, WorkerDiedError
from flowrt.graph.model import GATEWAY
from flowrt.launcher import events
from flowrt.launcher.launcher import WORKER, Launcher
from flowrt.seams import Seams
from flowrt.simulation.case import Case, SimulatedCall
from flowrt.simulation.errors import InvariantError
from flowrt.simulation.faults import Faults
from flowrt.simulation.inside import WorkerInternals, credit_faults
from flowrt.simulation.invariants import falls_back, may_fail, may_not_start
from flowrt.simulation.network_conditions import CALM
from flowrt.simulation.processes import SimulatedBackend
from flowrt.simulation.served import Served
from flowrt.simulation.world import Outcome, World, run
from flowrt.transports.contract import Channel

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
    failure = simulated.failure
    failed = None if failure is None else getattr(failure, "process", "")
    return CallsServed(tuple(simulated.records), failed, None if failure is None else str(failure))


_latest_run: ContextVar[_SimulatedCalls] = ContextVar("_latest_run")


class _SimulatedCalls:
    def __init__(self, world: World, case: Case) -> None:
        self._world, self._case = world, case
        _latest_run.set(self)
        self._endpoint = import_module("flowrt.workers.endpoint").Endpoint(case.graph)  # imported when used: it brings torch
        self.insides: dict[str, WorkerInternals] = {}
        self.records: list[CallRecord] = []
        self.failure: UserError | WorkerDiedError | None = None
        self._launcher = Launcher(
            case.graph,
            replace(world.seams(GATEWAY), open_backend=self._open_backend),
            on_event=self._on_event,
            on_control=self._endpoint.on_control,
            on_line=lambda name, line: None,
            hosted={GATEWAY: self._endpoint.run},
            worker="flowrt.simulation.calls:run_worker",
            unavailable_reason=lambda scheme: None,  # the network stands in for all of them
        )
        running = replace(case, graph=self._launcher.graph)
        harmless = [fault for fault in case.scenario.faults if falls_back(running, fault)]
        self._faults = Faults(world, case.scenario, self._living_inside, harmless)
        world.loop.accounts.append(lambda: [text for inside in self._living_insides() for text in inside.waiting()])

    async def serve(self) -> None:
        clock = self._launcher.seams.clock
        try:
            async with self._launcher:
                self.insides[GATEWAY] = WorkerInternals(self._endpoint._worker)
                self._faults.begin()
                async with asyncio.TaskGroup() as callers:
                    for number, call in enumerate(self._case.calls):
                        await clock.sleep(call.after_seconds)
                        self.records.append(CallRecord(call))
                        callers.create_task(self._call(self.records[-1]), name=f"caller {number}")
                if self.failure is None:
                    await self._quieten()
                await self._launcher.stop()
        except (UserError, WorkerDiedError) as error:
            self.failure = error
        self._faults.heal()

    async def _call(self, record: CallRecord) -> None:
        torch = import_module("torch")
        tensors = {port: torch.tensor([record.call.value]) for port in self._endpoint.ports}
        try:
            async with asyncio.timeout(record.call.cancel_seconds):
                outputs = await self._endpoint.call(tensors)
            record.result = ("output", *sorted((port, *tensor.tolist()) for port, tensor in outputs.items()))
        except TimeoutError:
            record.has_left = True
        except OperatorError as error:
            record.result = "error", error.node
        except (UserError, WorkerDiedError, NotRunningError) as error:
            if self.failure is None:
                raise InvariantError("I7", f"a call of {record.call.value} raised {error} in a run that goes on") from error

    async def _quieten(self) -> None:
        """Heal all faults, wait for messages in flight, and check for leftovers."""
        self._faults.heal()
        self._world.network.conditions = CALM
        clock, healed = self._launcher.seams.clock, self._world.loop.time()
        insides = self._living_insides()
        await clock.sleep(QUIET_SECONDS)
        while (credit_faults(insides) or any(inside.computes for inside in insides)) and self._world.loop.time() < healed + SETTLE_SECONDS:
            await clock.sleep(QUIET_SECONDS)
        if self.failure is not None:
            return
        for inside in insides:
            self._world.num_faults.update(inside.branches())
        calls = self._endpoint._calls
        left = [text for inside in insides for text in inside.leftovers()]
        left += [f"gateway: call {step} is live" for step in calls._live]
        left += [f"gateway: call {step} waits for {', '.join(sorted(workers))}" for step, workers in calls._unconfirmed.items()]
        if left:
            raise InvariantError("I8", "left when all had ended: " + "; ".join(left))
        if wrong := credit_faults(insides):
            raise InvariantError("I4", "; ".join(wrong))

    async def _open_backend(self, run_id: str, owner: Any, preload: Sequence[str], num_processes: int, seconds: float) -> SimulatedBackend:
        return await SimulatedBackend.open(self._world, owner, self._case.processes)

    def _on_event(self, event: events.Event) -> None:
        if isinstance(event, events.RunFailed):
            if isinstance(event.error, UserError | WorkerDiedError):
                self.failure = event.error
            self._endpoint.fail(event.error)

    def _living_inside(self, name: str) -> WorkerInternals | None:
        process = self._world.processes.get(name)  # None: a worker inside the launching process
        return self.insides.get(name) if process is None or not process.exit.done() else None

    def _living_insides(self) -> list[WorkerInternals]:
        return [inside for name in self.insides if (inside := self._living_inside(name)) is not None]


async def run_worker(control: Channel, seams: Seams) -> None:
    """The entry of each worker: runs the real worker and observes its internal state."""
    run = _latest_run.get()

    def begin(worker: Any) -> None:
        inside = WorkerInternals(worker)
        run.insides[inside.name] = inside

    await import_module(WORKER.partition(":")[0]).serve(control, seams, None, begin)


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
