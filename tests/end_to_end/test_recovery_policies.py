"""`restart_role` and `restart_all` with real processes: who gets a new incarnation, and no token is lost, doubled or changed.

Requests wait at most 0.05 s for a lost group or expert. A restart takes longer; while a policy restarts, that time does not count.
"""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest
from end_to_end.test_expert_failover import Story, kill_once, tokens_of, write
from left_processes import left_processes
from served_models import Served

import flowrt
from flowrt.launcher import events

DEPLOY: dict[str, object] = {"attention": {"groups": 2}, "experts": {"servers": 2, "replicas": 2}}
ROLES = ({"attention.0", "attention.1"}, {"experts.0", "experts.1"})
WORKERS = ROLES[0] | ROLES[1]
IMPATIENT = {"unavailable_expert_seconds": 0.05, "lost_group_seconds": 0.05}


def settings(policy: str, **more: object) -> dict[str, object]:
    return {"recovery": policy, **IMPATIENT, **more}


@pytest.mark.parametrize("policy", ["restart_role", "restart_all"])
async def test_a_kill_restarts_the_role_or_all_and_changes_no_token(served: Served, tmp_path: Path, policy: str) -> None:
    """A server is killed, then a group."""
    story = Story()
    pids: set[int] = set()
    async with flowrt.open(write(served, tmp_path, DEPLOY, reliability=settings(policy)), on_event=story.note) as running:
        for victim in ("experts.1", "attention.0"):
            pids.update(running.pids.values())
            story.lost.clear()
            story.back.clear()
            await assert_kill_restarts(running, story, served, victim, WORKERS if policy == "restart_all" else role_of(victim))
        pids.update(running.pids.values())
    assert not left_processes(pids)


def role_of(name: str) -> set[str]:
    return next(role for role in ROLES if name in role)


async def assert_kill_restarts(running: flowrt.RunningGraph, story: Story, served: Served, victim: str, together: set[str]) -> None:
    expected = served.expected[:4]
    before = dict(running.launcher.incarnations)
    assert await tokens_of(running, served.prompts[:4], kill_once(running.pids[victim])) == expected
    await story.until(lambda story: set(story.back) == together)
    assert sorted(story.lost) == sorted(story.back) == sorted(together), "each once"
    renewed = {name for name, incarnation in running.launcher.incarnations.items() if incarnation != before[name]}
    assert renewed & WORKERS == together
    assert await tokens_of(running, served.prompts[:4], lambda count: None) == expected


@pytest.mark.parametrize("second", ["experts.0", "attention.1"])
async def test_a_second_death_during_the_restart_changes_no_token(served: Served, tmp_path: Path, second: str) -> None:
    """The second process dies as soon as its next incarnation is forked."""
    story = Story()
    deaths: list[str] = []

    def on_event(event: events.Event) -> None:
        story.note(event)
        if isinstance(event, events.WorkerStarted) and event.name == second and deaths == ["experts.1"]:
            deaths.append(second)
            os.kill(event.pid, signal.SIGKILL)

    async with flowrt.open(write(served, tmp_path, DEPLOY, reliability=settings("restart_all")), on_event=on_event) as running:
        expected = served.expected[:4]
        first = dict(running.pids)

        def kill(count: int) -> None:
            if count >= 20 and not deaths:
                deaths.append("experts.1")
                os.kill(first["experts.1"], signal.SIGKILL)

        assert await tokens_of(running, served.prompts[:4], kill) == expected
        assert deaths == ["experts.1", second]
        await story.until(lambda story: set(story.back) == WORKERS)
        assert story.lost.count(second) == 2


async def test_a_process_that_is_stopped_while_it_restarts_is_replaced(served: Served, tmp_path: Path) -> None:
    story = Story()
    stopped: list[int] = []
    verdicts: list[events.Event] = []

    def on_event(event: events.Event) -> None:
        story.note(event)
        if isinstance(event, events.WorkerMarkedDead):
            verdicts.append(event)
        if isinstance(event, events.WorkerStarted) and event.name == "experts.1" and story.lost and not stopped:
            os.kill(event.pid, signal.SIGSTOP)
            stopped.append(event.pid)

    async with flowrt.open(write(served, tmp_path, DEPLOY), on_event=on_event) as running:
        os.kill(running.pids["experts.1"], signal.SIGKILL)
        await story.until(lambda story: story.back == ["experts.1"])
        assert story.lost == ["experts.1"] * 2
    (verdict,) = verdicts
    assert isinstance(verdict, events.WorkerMarkedDead)
    assert verdict.why.startswith("stopped")
    assert not left_processes(stopped)


async def test_a_stop_during_the_restart_leaves_no_process(served: Served, tmp_path: Path) -> None:
    story = Story()
    pids: set[int] = set()

    def on_event(event: events.Event) -> None:
        story.note(event)
        if isinstance(event, events.WorkerStarted):
            pids.add(event.pid)

    async with flowrt.open(write(served, tmp_path, DEPLOY, reliability=settings("restart_all")), on_event=on_event) as running:
        request = asyncio.create_task(running.complete(served.prompts[0], flowrt.SamplingParams(max_tokens=200, ignore_eos=True)))
        os.kill(running.pids["attention.1"], signal.SIGKILL)
        await story.until(lambda story: len(pids) > len(WORKERS))  # the first new incarnation
    done = await request
    assert done.finish_reason == "abort"
    assert len(pids) > len(WORKERS)
    assert not left_processes(pids)
