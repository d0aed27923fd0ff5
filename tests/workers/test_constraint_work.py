"""What a group does beside its loop: order of control messages that wait for a grammar, and what failures cost."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from flowrt.actors.control import Cancel, Control, Drain, Request, Submit
from flowrt.dataflow.payload import Payload
from flowrt.engine.batch import Batch
from flowrt.engine.constraint import Constraint
from flowrt.engine.engine import StartStep
from flowrt.engine.grammar import GrammarError
from flowrt.sampling_params import SamplingParams
from flowrt.seams import BOUND_SECONDS, STILL_SECONDS, ThreadCompute
from flowrt.structured_outputs import StructuredOutputs
from flowrt.workers.constraint_work import ConstraintWork

PLAIN, CONSTRAINED = SamplingParams(), SamplingParams(structured_outputs=StructuredOutputs(regex="a"))
STEP = StartStep(0, 0, 0, Batch([], [], [], [], [], [], [], [], []))


def submit(request_id: str, params: SamplingParams = CONSTRAINED) -> Submit:
    return Submit(Request(id=request_id, attempt=1, prompt_token_ids=(1,), max_tokens=1, params=params))


class Outcome:
    """What came out: control messages with what was built for them, payloads and failed steps."""

    def __init__(self) -> None:
        self.built: list[tuple[Control, Mapping[int, Constraint], str | None]] = []
        self.payloads: list[Payload] = []
        self.failures: list[str] = []
        self._changed = asyncio.Event()

    def on_built(self, *what: Any) -> None:
        self.built.append(what)
        self._changed.set()

    def on_payload(self, start: StartStep, payload: Payload) -> None:
        self.payloads.append(payload)
        self._changed.set()

    def on_failed(self, start: StartStep, error: str) -> None:
        self.failures.append(error)
        self._changed.set()

    async def wait_for(self, count: int) -> None:
        while len(self.built) + len(self.payloads) + len(self.failures) < count:
            self._changed.clear()
            await self._changed.wait()


@asynccontextmanager
async def running(work: ConstraintWork) -> AsyncIterator[Outcome]:
    outcome = Outcome()
    task = asyncio.create_task(work.run(outcome.on_built, outcome.on_payload, outcome.on_failed))
    try:
        yield outcome
    finally:
        task.cancel()
        await asyncio.wait([task])


async def test_messages_of_a_request_stay_in_order_and_others_do_not_wait() -> None:
    may_end = threading.Event()

    def build(request: Request) -> dict[int, Constraint]:
        may_end.wait()
        return {}

    work = ConstraintWork(build, lambda start: Payload(()), ThreadCompute)
    first = [submit("a"), Cancel("a", 1), submit("a", PLAIN)]
    async with running(work) as outcome:
        assert [work.keep(each) for each in first] == [True, True, True]
        assert not any(work.keep(each) for each in (submit("b", PLAIN), Cancel("b", 1)))
        assert work.keep(Drain())
        assert not work.is_idle
        work.compute(STEP)
        await outcome.wait_for(1)
        assert outcome.payloads == [Payload(())], "masks do not wait for grammars"
        may_end.set()
        await outcome.wait_for(5)
    assert [control for control, _, _ in outcome.built] == [*first, Drain()]
    assert work.is_idle
    assert not work.keep(Drain())


async def test_calls_that_do_not_end_are_reported_to_the_heartbeats_by_thread() -> None:
    """Neither has a declared bound: one that stands still is hung."""
    have_begun, may_end = threading.Barrier(3), threading.Event()

    def wait(*of: Any) -> Any:
        have_begun.wait()
        may_end.wait()
        return {}

    work = ConstraintWork(wait, wait, ThreadCompute)
    assert work.running == (None, None)
    async with running(work) as outcome:
        work.keep(submit("a"))
        work.compute(STEP)
        await asyncio.to_thread(have_begun.wait)
        reported = [(each.label, each.bound_seconds, each.still_seconds) for each in work.running if each is not None]
        may_end.set()
        await outcome.wait_for(2)
    assert reported == [(label, BOUND_SECONDS, STILL_SECONDS) for label in ("build constraints", "masks")]


async def test_failure_costs_its_own_request_or_step() -> None:
    errors = [GrammarError("cannot be used"), RuntimeError("unforeseen"), None]

    def fail(*of: Any) -> Any:
        if (error := errors.pop(0)) is not None:
            raise error
        return {}

    work = ConstraintWork(fail, fail, ThreadCompute)
    async with running(work) as outcome:
        for each in (submit("a"), submit("b"), submit("c")):
            work.keep(each)
        await outcome.wait_for(3)
        errors[:] = [RuntimeError("no mask")]
        work.compute(STEP)
        await outcome.wait_for(4)
    assert [error for _, _, error in outcome.built] == ["structured_outputs cannot be used", "RuntimeError: unforeseen", None]
    assert outcome.failures == ["RuntimeError: no mask"]
