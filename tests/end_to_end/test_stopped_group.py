"""A group that is stopped: its requests end with an error that names it, new ones go to the other group, and it comes back."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest
from served_models import Served

import flowrt
from flowrt.launcher import events

PARAMS = flowrt.SamplingParams(max_tokens=60, ignore_eos=True)


@pytest.mark.parametrize("servers", [2, 0])
async def test_a_stopped_group_is_fenced_and_readmitted(served: Served, tmp_path: Path, servers: int) -> None:
    graph = served.write(tmp_path, {"attention": {"groups": 2}, "experts": {"servers": servers}}, limits={"max_tokens": 60})
    fenced, cleared = asyncio.Event(), asyncio.Event()

    def on_event(event: events.Event) -> None:
        if isinstance(event, events.WorkerMarkedDead) and event.name == "attention.1":
            fenced.set()
        elif isinstance(event, events.WorkerCleared) and event.name == "attention.1" and fenced.is_set():
            cleared.set()

    async with asyncio.timeout(120), flowrt.open(graph, on_event=on_event) as running:
        pid = running.pids["attention.1"]
        os.kill(pid, signal.SIGSTOP)
        try:
            early = [asyncio.create_task(running.complete(prompt, PARAMS)) for prompt in served.prompts]
            await fenced.wait()
            done = [await task for task in early]
            lost = [each for each in done if each.finish_reason == "error"]
            assert len(lost) == len(done) // 2
            assert all((each.error or "").startswith("attention.1 was marked dead: stopped, no heartbeat for ") for each in lost)
            late = [await running.complete(prompt, PARAMS) for prompt in served.prompts[:2]]
            assert {each.finish_reason for each in late} == {"length"}
            health = running.health()
            assert health.ok
            assert any(text.startswith("attention.1 is marked dead: stopped") for text in health.warnings)
        finally:
            os.kill(pid, signal.SIGCONT)
        await cleared.wait()
        repeated = await asyncio.gather(*(running.complete(prompt, PARAMS) for prompt in served.prompts))
        assert {each.finish_reason for each in repeated} == {"length"}
        assert not running.health().warnings
        statistics = await running.statistics()
        assert statistics["attention.1"].num_steps > 0
