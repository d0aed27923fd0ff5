"""Standby processes of a real run: they take the place of servers and groups that die, and give the same tokens."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest
from end_to_end.test_expert_failover import Story
from served_models import Served

import flowrt
from flowrt.api.status import process_state
from flowrt.launcher import events

DEPLOY = {"attention": {"groups": 2}, "experts": {"servers": 3, "replicas": 2}}

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="kills processes")


async def test_standby_process_takes_the_place_of_each_role(served: Served, tmp_path: Path) -> None:
    story = Story()
    graph = served.write(tmp_path, DEPLOY, limits={"max_tokens": 16}, numerics="strict", reliability={"standby": 1})
    prompt = list(served.prompts[0])
    async with flowrt.open(graph, on_event=story.note) as running:
        expected = (await running.complete(prompt, max_tokens=8)).token_ids
        await story.next(events.WorkerListening, "standby.0")
        for victim in ("experts.2", "attention.1"):
            assert process_state(running.launcher, "standby.0") == "standby"
            standby = running.pids["standby.0"]
            os.kill(running.pids[victim], signal.SIGKILL)
            await story.next(events.WorkerRestarted, victim)
            assert running.pids[victim] == standby
            assert Path(f"/proc/{standby}/comm").read_text(encoding="utf-8") == f"fr:{victim}\n"
            assert (await running.complete(prompt, max_tokens=8)).token_ids == expected
            await story.next(events.WorkerListening, "standby.0")
            assert running.pids["standby.0"] != standby
        assert "standby.0" not in await running.statistics()


async def test_standby_process_that_is_stopped_is_replaced_by_a_fork(served: Served, tmp_path: Path) -> None:
    story = Story()
    graph = served.write(tmp_path, DEPLOY, limits={"max_tokens": 16}, numerics="strict", reliability={"standby": 1})
    prompt = list(served.prompts[0])
    async with flowrt.open(graph, on_event=story.note) as running:
        expected = (await running.complete(prompt, max_tokens=8)).token_ids
        await story.next(events.WorkerListening, "standby.0")
        standby = running.pids["standby.0"]
        os.kill(standby, signal.SIGSTOP)
        os.kill(running.pids["experts.0"], signal.SIGKILL)
        await story.next(events.WorkerRestarted, "experts.0")
        assert running.pids["experts.0"] != standby
        assert (await running.complete(prompt, max_tokens=8)).token_ids == expected
