"""Health with real processes: not ok while a request makes no progress, and ok again afterwards."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path

from served_models import Served

import flowrt
from flowrt.reliability.health import Health

ALONE = {"attention": {"groups": 1}, "experts": {"servers": 2, "replicas": 1}}
PARAMS = flowrt.SamplingParams(max_tokens=40, ignore_eos=True)
STALL_SECONDS = 0.5


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(60):
        while True:
            if condition():
                return
            await asyncio.sleep(0.02)


async def test_run_is_unhealthy_while_a_request_waits_for_a_paused_server(served: Served, tmp_path: Path) -> None:
    graph = served.write(tmp_path, ALONE, limits={"max_tokens": 40}, reliability={"detector": False})
    running = flowrt.open(graph)
    assert not running.health().ok
    async with running:
        assert running.health() == Health(True)

        def is_ok() -> bool:
            return running.health(STALL_SECONDS).ok

        os.kill(running.pids["experts.1"], signal.SIGSTOP)
        try:
            request = asyncio.create_task(running.complete(served.prompts[0], PARAMS))
            await until(lambda: not is_ok())
            (problem,) = running.health(STALL_SECONDS).problems
            assert problem.startswith("1 request is open, and none has made progress for")
        finally:
            os.kill(running.pids["experts.1"], signal.SIGCONT)
        await until(is_ok)
        async with asyncio.timeout(60):
            assert (await request).finish_reason == "length"
        assert is_ok()
    assert running.health().problems == ("the graph is not open",)


async def test_run_is_unhealthy_while_an_expert_is_unavailable(served: Served, tmp_path: Path) -> None:
    graph = served.write(tmp_path, ALONE, limits={"max_tokens": 40}, reliability={"unavailable_expert_seconds": 60})
    async with flowrt.open(graph, on_event=lambda event: None) as running:
        names = {"attention.0", "experts.0", "experts.1"}
        await until(lambda: names == running.health().workers.keys())
        await running.complete(served.prompts[0], PARAMS)
        await until(lambda: all(running.health().workers[name].num_firings for name in names))
        os.kill(running.pids["experts.1"], signal.SIGKILL)
        await until(lambda: not running.health().ok)
        assert "no replica is left of experts" in running.health(STALL_SECONDS).problems[0]
        await until(lambda: running.health().ok)
