"""Death of a trampoline in each stage of the exchange, with real processes: no token changes, and it is used again."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path

import pytest
from end_to_end.killed_trampoline import OPERATORS, TRAMPOLINE, WORKER
from served_models import Served, answers

import flowrt
from flowrt.actors.control import Statistics
from flowrt.launcher import events

DEPLOY = {"attention": {"micro_batches": 2}, "experts": {"servers": 3, "replicas": 2, "trampoline": "always"}}


def forwarded_parts(statistics: Mapping[str, Statistics]) -> int:
    return sum(edge.num_messages for each in statistics.values() for edge in each.edges if edge.edge.endswith(".forward.rows"))


@pytest.mark.parametrize("stage", OPERATORS)
async def test_trampoline_killed_in_each_stage_changes_no_token(served: Served, tmp_path: Path, stage: str) -> None:
    is_back = asyncio.Event()

    def note(event: events.Event) -> None:
        if isinstance(event, events.WorkerRestarted):
            assert event.name == TRAMPOLINE
            is_back.set()

    graph = flowrt.open(served.write(tmp_path, DEPLOY, numerics="strict"), on_event=note)
    graph.launcher.worker = WORKER
    async with graph as running, asyncio.timeout(120):
        expected = await answers(running, served.prompts[:4], 8)
        (tmp_path / "stage").write_text(stage)
        assert await answers(running, served.prompts[:4], 8) == expected
        assert (tmp_path / "killed").exists()
        await is_back.wait()
        before = forwarded_parts(await running.statistics())
        while forwarded_parts(await running.statistics()) == before:  # the group learns of the next incarnation by itself
            assert await answers(running, served.prompts[:4], 8) == expected
