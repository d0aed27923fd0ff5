"""The part of a group that runs beside its loop: compiles the grammars of requests, and computes the masks of their next tokens.

Each has a thread of its own, apart from the compute thread. A grammar that takes long to compile delays its own request and others with
a grammar that is new; a mask that takes longer than the layers of the step delays the step.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial

from flowrt.actors.control import Cancel, Control, Drain, KvCompleted, Request, Submit
from flowrt.dataflow.payload import Payload
from flowrt.engine.constraint import Constraint
from flowrt.engine.engine import StartStep
from flowrt.engine.grammar import GrammarError
from flowrt.errors import error_text
from flowrt.seams import Compute, Running

Constraints = Mapping[int, Constraint]  # by choice
GRAMMARS, MASKS = "grammars", "masks"  # threads


class ConstraintWork:
    """`build` compiles the constraints of a request, `payload_of` computes the sampling payload of a step; both run in a thread. `on_built`
    is called with each control message that was kept, in order, and `on_payload` with each payload."""

    def __init__(
        self,
        build: Callable[[Request], Constraints],
        payload_of: Callable[[StartStep], Payload],
        new_compute: Callable[[str], Compute],
    ) -> None:
        self._build, self._payload_of, self._new_compute = build, payload_of, new_compute
        self._controls: asyncio.Queue[Control] = asyncio.Queue()
        self._steps: asyncio.Queue[StartStep] = asyncio.Queue()
        self._num_kept = Counter[str]()  # control messages by request
        self._computes: dict[str, Compute] = {}  # by the names of their threads, made at first use

    @property
    def is_idle(self) -> bool:
        """Whether no control message waits."""
        return not self._num_kept

    @property
    def running(self) -> tuple[Running | None, ...]:
        """The running call of each thread, for heartbeats: a request, or a step, waits for it as for an operator. The check before a
        request is placed has compiled the same grammar, so one that does not end is no fault of the request."""
        return tuple(None if (compute := self._computes.get(name)) is None else compute.running for name in (GRAMMARS, MASKS))

    def keep(self, control: Control) -> bool:
        """Whether the control message must wait: for its grammar, or behind others of its request that do. Then it is kept."""
        match control:
            case Submit(request):
                request_id, waits = request.id, request.params.is_constrained
            case Cancel(request_id) | KvCompleted(request_id):
                waits = False
            case Drain():  # behind all
                request_id, waits = "", not self.is_idle
            case _:
                return False
        if not waits and request_id not in self._num_kept:
            return False
        self._num_kept[request_id] += 1
        self._controls.put_nowait(control)
        return True

    def compute(self, start: StartStep) -> None:
        """Compute the sampling payload of a step with constrained rows."""
        self._steps.put_nowait(start)

    async def run(
        self,
        on_built: Callable[[Control, Constraints, str | None], None],
        on_payload: Callable[[StartStep, Payload], None],
        on_failed: Callable[[StartStep, str], None],
    ) -> None:
        """Work until cancelled. `on_built` gets the constraints, or the reason why there are none."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._run_controls(on_built), name="grammars")
            tasks.create_task(self._run_steps(on_payload, on_failed), name="masks")

    async def _run_controls(self, on_built: Callable[[Control, Constraints, str | None], None]) -> None:
        control = await self._controls.get()
        compute = self._computes[GRAMMARS] = self._new_compute(GRAMMARS)
        try:
            while True:
                constraints: Constraints = {}
                error = None
                if isinstance(control, Submit) and control.request.params.is_constrained:
                    try:
                        constraints = await compute.run("build constraints", partial(self._build, control.request))
                    except Exception as failure:  # costs its own request only
                        error = str(failure) if isinstance(failure, GrammarError) else error_text(failure)
                request_id = _request_id(control)
                self._num_kept[request_id] -= 1
                if not self._num_kept[request_id]:
                    del self._num_kept[request_id]
                on_built(control, constraints, error)
                control = await self._controls.get()
        finally:
            await compute.aclose()

    async def _run_steps(self, on_payload: Callable[[StartStep, Payload], None], on_failed: Callable[[StartStep, str], None]) -> None:
        start = await self._steps.get()
        compute = self._computes[MASKS] = self._new_compute(MASKS)
        try:
            while True:
                try:
                    payload = await compute.run("masks", partial(self._payload_of, start))
                except Exception as failure:
                    on_failed(start, error_text(failure))
                else:
                    on_payload(start, payload)
                start = await self._steps.get()
        finally:
            await compute.aclose()


def _request_id(control: Control) -> str:
    match control:
        case Submit(request):
            return request.id
        case Cancel(request_id) | KvCompleted(request_id):
            return request_id
    return ""
