"""Attention groups that are killed, stopped or hung, with real processes: every answer is that of the undisturbed run."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from flowrt.bench.report.report import Machine
from flowrt.chaos.cells import role_of
from flowrt.chaos.measure import ChaosResult, measure, prepare
from flowrt.chaos.moves import moved_requests, usual_times
from flowrt.chaos.options import ChaosOptions
from flowrt.chaos.report import report_of
from flowrt.launcher import events

ROOT = Path(__file__).resolve().parents[2]
QUICKSTART = ROOT / "examples" / "quickstart.yaml"
PLENTY_SECONDS = 120.0


async def found_of(kills: int, *overrides: str, roles: str = "attention", fault: str = "kill", phase: str = "decode") -> ChaosResult:
    """The eight ways of sampling, all at a time."""
    options = ChaosOptions(
        kills=kills,
        roles=roles,
        fault=fault,
        phase=phase,
        overrides=("numerics=strict", "deploy.experts.servers=2", *overrides),
        requests=8,
        concurrency=8,
        seconds=0.2,
        prompt_tokens=8,
        new_tokens=24,
    )
    async with asyncio.timeout(PLENTY_SECONDS):
        return await measure(prepare(QUICKSTART, options), print)


def assert_right(found: ChaosResult) -> None:
    report = report_of(found, Machine("a processor", 2, "Linux 6", {}, 0.0))
    assert report.is_success, report.notes
    assert found.leaks == []


@pytest.mark.parametrize("fault", ["kill", "pause", "hang"])
@pytest.mark.parametrize(("groups", "transport"), [(2, "shm"), (3, "zmq")])
async def test_a_lost_group_changes_no_answer(groups: int, transport: str, fault: str) -> None:
    link = f"deploy.links.attention-experts.transport={transport}"
    found = await found_of(1, f"deploy.attention.groups={groups}", link, fault=fault)
    assert_right(found)
    (injected,) = found.injected_faults
    assert injected.phase == "decode"
    moved = moved_requests(found.answers, found.injected_faults, usual_times(found.reference))
    assert {each.fault.process for each in moved} == {injected.process}
    lost = {event.name for _, event in found.observer.seen if isinstance(event, events.WorkerLost)}
    assert lost == {injected.process}, "the servers go on without it"
    stayed = [answer for answer in found.answers if not answer.moves and answer.submitted <= injected.at <= answer.ended]
    assert stayed, "the other groups go on, too"


async def test_the_last_group_dies_and_its_requests_wait_for_it() -> None:
    found = await found_of(1, "deploy.attention.groups=1")
    assert_right(found)
    assert any(answer.moves for answer in found.answers)


async def test_faults_go_through_the_phases_and_the_drain() -> None:
    found = await found_of(6, "deploy.attention.groups=2", phase="start,prefill,idle,replay,drain")
    assert_right(found)
    hit = {injected.phase for injected in found.injected_faults}
    assert {"start", "idle"} <= hit, hit  # the others pass quickly, and the fault may come too late
    assert {role_of(found.graph, injected.process) for injected in found.injected_faults} == {"attention"}


async def test_all_roles_are_hit_in_one_run() -> None:
    found = await found_of(8, "deploy.attention.groups=2", roles="all", phase="decode", fault="kill")
    assert_right(found)
    hit = {role_of(found.graph, injected.process) for injected in found.injected_faults}
    assert hit == {"attention", "experts", "monitor", "fork-server"}
