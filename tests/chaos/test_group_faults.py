"""Attention groups that are killed, stopped or hung, with real processes: every answer is that of the undisturbed run."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from flowrt.bench.report.report import Machine
from flowrt.chaos.cells import role_of
from flowrt.chaos.chaos_options import ChaosOptions
from flowrt.chaos.measure import ChaosResult, measure, prepare
from flowrt.chaos.moves import moved_requests, usual_times
from flowrt.chaos.report import report_of
from flowrt.launcher import events

ROOT = Path(__file__).resolve().parents[2]
QUICKSTART = ROOT / "examples" / "quickstart.yaml"
PLENTY_SECONDS = 120.0


async def found_of(kills: int, *overrides: str, roles: str = "attention", fault: str = "kill", phase: str = "decode") -> ChaosResult:
    """The ten ways of sampling, four at a time."""
    options = ChaosOptions(
        kills=kills,
        roles=roles,
        fault=fault,
        phase=phase,
        overrides=("numerics=strict", "deploy.experts.servers=2", *overrides),
        requests=10,
        concurrency=4,
        seconds=0.2,
        prompt_tokens=8,
        new_tokens=12,
    )
    async with asyncio.timeout(PLENTY_SECONDS):
        return await measure(prepare(QUICKSTART, options), print)


def assert_right(found: ChaosResult) -> None:
    report = report_of(found, Machine("a processor", 2, "Linux 6", {}, 0.0))
    assert report.is_success, report.notes
    assert found.leaks == []


@pytest.mark.parametrize(("groups", "transport", "faults"), [(2, "shm", ["hang"]), (3, "zmq", ["kill", "pause", "hang"])])
async def test_a_lost_group_changes_no_answer(groups: int, transport: str, faults: list[str]) -> None:
    """Each fault comes when the group of the one before is back."""
    link = f"deploy.links.attention-experts.transport={transport}"
    found = await found_of(len(faults), f"deploy.attention.groups={groups}", link, fault=",".join(faults))
    assert_right(found)
    assert sorted(injected.kind for injected in found.injected_faults) == sorted(each.replace("kill", "crash") for each in faults)
    moved = moved_requests(found.answers, found.injected_faults, usual_times(found.reference), 64)
    lost = [event.name for _, event in found.observer.seen if isinstance(event, events.WorkerLost)]
    assert lost == [injected.process for injected in found.injected_faults], "the servers go on without it"
    for injected in found.injected_faults:
        assert injected.phase in ("prefill", "decode")  # a group that was decoding may have taken a new request by then
        assert {each.fault.process for each in moved if each.fault is injected} == {injected.process}
    first = found.injected_faults[0]  # later all requests may be in the group that is hit
    stayed = [answer for answer in found.answers if not answer.moves and answer.submitted <= first.at <= answer.ended]
    assert stayed, "the other groups go on, too"


async def test_the_last_group_dies_and_its_requests_wait_for_it() -> None:
    found = await found_of(1, "deploy.attention.groups=1")
    assert_right(found)
    assert any(answer.moves for answer in found.answers)


async def test_faults_go_through_the_phases_and_the_drain() -> None:
    found = await found_of(5, "deploy.attention.groups=2", phase="start,prefill,idle,replay,drain")
    assert_right(found)
    hit = {injected.phase for injected in found.injected_faults}
    assert {"start", "idle"} <= hit, hit  # the others pass quickly, and the fault may come too late
    assert {role_of(found.graph, injected.process) for injected in found.injected_faults} == {"attention"}


async def test_all_roles_are_hit_in_one_run() -> None:
    found = await found_of(4, "deploy.attention.groups=2", roles="all", phase="decode", fault="kill")
    assert_right(found)
    hit = {role_of(found.graph, injected.process) for injected in found.injected_faults}
    assert hit == {"attention", "experts", "monitor", "fork-server"}
