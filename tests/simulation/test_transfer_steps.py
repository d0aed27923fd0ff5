"""At each step of a KV transfer (docs/kv-transfer.md), a side is killed or stopped for ever, the link between both is cut for ever, or the
client leaves. The tokens are those of an undisturbed run, and no page, offer, credit or task is left."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import pytest
from simulation.outcomes import finish_reasons
from simulation.test_deaths import load

from flowrt.actors.control import Cancel, KvPulled, Prefilled, Prefilling, Submit
from flowrt.engine.engine import Engine
from flowrt.engine.scheduler import Scheduler
from flowrt.exchange.kv_transfer import KvUnpack
from flowrt.gateway.gateway import Gateway
from flowrt.reliability.scenario import PERMANENT_SECONDS, AnyFault, Crash, Cut, Pause, Scenario
from flowrt.sampling_params import SamplingParams
from flowrt.simulation.case import Case, SimulatedRequest
from flowrt.simulation.cases import run_case
from flowrt.simulation.clients import DirectClients
from flowrt.simulation.faults import Faults
from flowrt.simulation.served import Served
from flowrt.simulation.world import Outcome
from flowrt.workers.group import Group

FIRST = "request-0"
EACH_STEP: dict[str, tuple[type, str, Callable[..., bool]]] = {
    "1: a worker gets the request": (
        Group,
        "on_control",
        lambda group, control: isinstance(control, Submit) and (control.request.id, control.request.stage) == (FIRST, "prefill"),
    ),
    "2: it begins a step": (Group, "_emit", lambda group, start: group._pack is not None),
    "3a: it offers the KV": (
        Gateway,
        "on_transfer",
        lambda gateway, worker, control: isinstance(control, Prefilling) and control.request_id == FIRST,
    ),
    "4, 5: a group gets the request": (
        Group,
        "on_control",
        lambda group, control: isinstance(control, Submit) and control.request.id == FIRST and control.request.kv is not None,
    ),
    "6: it has pages": (KvUnpack, "begin", lambda unpack, request_id, *rest: request_id == FIRST),
    "7: the first chunk arrives": (KvUnpack, "on_chunk", lambda unpack, firing: (FIRST, 0) in unpack._transfers),
    "3b: the prompt is computed": (
        Gateway,
        "on_transfer",
        lambda gateway, worker, control: isinstance(control, Prefilled) and control.request_id == FIRST,
    ),
    "8: the group has the KV": (
        Gateway,
        "on_transfer",
        lambda gateway, group, control: isinstance(control, KvPulled) and control.request_id == FIRST,
    ),
    "the worker frees its pages": (
        Group,
        "on_control",
        lambda group, control: isinstance(control, Cancel) and control.request_id == FIRST and group._pack is not None,
    ),
}


@dataclass
class Watched:
    """`seconds`: when the first request reached each step, from the time at which faults count. `workers`: that have had it. `freed`: when
    a worker freed its pages. `step_seconds`: the longest step of any request."""

    outcome: Outcome[Served]
    seconds: dict[str, float]
    workers: dict[str, str]
    freed: list[float]
    step_seconds: float


def run(fault: AnyFault | None = None, *, detector: bool = False, cancel_seconds: float | None = None) -> Watched:
    """Three requests, each of two steps in a prefill worker. The first one has 12 tokens."""
    graph = load("prefill.yaml", detector=detector)
    graph = graph.replace(limits=graph.limits.replace(max_num_batched_tokens=8))
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    requests = [SimulatedRequest(tuple(range(5 + number, 17 + number)), params, after_seconds=0.002) for number in range(3)]
    requests[0] = replace(requests[0], cancel_seconds=cancel_seconds)
    scenario = Scenario(faults=() if fault is None else (fault,), expect="tokens")
    seconds: dict[str, float] = {}
    workers: dict[str, str] = {}
    freed: list[float] = []
    begun: dict[int, float] = {}  # by engine: the latest step
    step_seconds = [0.0]

    def note_removal(scheduler: Scheduler, sequence: Any) -> bool:
        if sequence.request.id == FIRST:
            freed.append(asyncio.get_running_loop().time())
        return False

    def note_step(engine: Engine, *values: Any) -> bool:
        now = asyncio.get_running_loop().time()
        step_seconds.append(now - begun.get(id(engine), now))
        return False

    def note_begin(group: Group, start: Any) -> bool:
        begun[id(group._engine)] = asyncio.get_running_loop().time()
        return False

    def watched(name: str, method: Callable[..., Any], is_step: Callable[..., bool]) -> Callable[..., Any]:
        def call(self: Any, *values: Any) -> Any:
            if name not in seconds and is_step(self, *values):
                seconds[name] = asyncio.get_running_loop().time()
                if isinstance(self, Group):
                    workers.setdefault("prefill" if self._pack is not None else "group", self._node.removesuffix(".source"))
            return method(self, *values)

        return call

    with pytest.MonkeyPatch.context() as patch:
        noted: dict[str, tuple[type, str, Callable[..., bool]]] = {
            "begin": (Faults, "begin", lambda faults: True),
            "client": (DirectClients, "run", lambda clients, client: True),
            "cancel": (Gateway, "cancel", lambda gateway, index: index == 0),
            "removal": (Scheduler, "remove", note_removal),
            "step end": (Engine, "step_done", note_step),
            "step": (Group, "_emit", note_begin),
        }
        for name, (owner, method, is_step) in (EACH_STEP | noted).items():
            patch.setattr(owner, method, watched(name, getattr(owner, method), is_step))
        outcome = run_case(Case(graph, tuple(requests), scenario, seed=1))
    begin = seconds.pop("begin")
    times = {name: at - begin for name, at in seconds.items()}
    return Watched(outcome, times, workers, [at - begin for at in freed], max(step_seconds))


undisturbed = lru_cache(run)  # the same run, until a fault begins


def test_the_steps_come_in_their_order() -> None:
    found = undisturbed()
    assert sorted(EACH_STEP, key=found.seconds.__getitem__) == list(EACH_STEP)
    assert found.workers == {"prefill": "prefill.0", "group": "attention.0"}


@pytest.mark.parametrize("what", ["prefill killed", "group killed", "prefill stopped", "group stopped", "link cut"])
@pytest.mark.parametrize("step", EACH_STEP)
def test_a_fault_at_each_step_changes_no_token(step: str, what: str) -> None:
    stops = what.endswith("stopped")
    before = undisturbed(detector=stops)
    at_seconds = before.seconds[step] + 1e-9
    name = before.workers.get(what.partition(" ")[0], "")
    fault: AnyFault = Crash(process=name or "none", at_seconds=at_seconds)
    if stops:
        fault = Pause(process=name, at_seconds=at_seconds, for_seconds=PERMANENT_SECONDS)
    elif not name:
        fault = Cut(between=("prefill.0", "attention.0"), at_seconds=at_seconds, for_seconds=PERMANENT_SECONDS)
    found = run(fault, detector=stops)
    assert found.seconds[step] == before.seconds[step], "the fault comes behind the step"
    assert found.outcome.num_faults[fault.kind] == 1
    assert finish_reasons(found.outcome.result) == ("length",) * 3


@pytest.mark.parametrize("step", EACH_STEP)
def test_a_client_that_leaves_at_a_step_frees_all_pages_within_a_step_and_100_ms(step: str) -> None:
    before = undisturbed()
    found = run(cancel_seconds=before.seconds[step] - before.seconds["client"] + 1e-9)
    assert found.seconds[step] == before.seconds[step]
    assert finish_reasons(found.outcome.result) == ("abort", "length", "length")
    assert found.freed
    assert max(found.freed) < found.seconds["cancel"] + found.step_seconds + 0.1
