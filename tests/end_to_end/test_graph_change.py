"""A running graph changes with real processes: groups and servers join and leave while requests run, and nothing is left of them."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
from left_processes import left_processes
from served_models import Served

import flowrt
from flowrt.api import read_graph
from flowrt.graph.model import Graph

SETTINGS = {"limits": {"max_tokens": 32}, "numerics": "strict"}


def graph_of(served: Served, folder: Path, groups: int, servers: int) -> Graph:
    """Each server holds every expert."""
    deploy = {"attention": {"groups": groups}, "experts": {"servers": servers, "replicas": servers}}
    folder = folder / f"{groups}x{servers}"
    folder.mkdir()
    return read_graph(served.write(folder, deploy, **SETTINGS))


def shared_memory() -> set[str]:
    return set(os.listdir("/dev/shm"))


async def test_groups_and_servers_join_and_leave_while_requests_run(served: Served, tmp_path: Path) -> None:
    small, large = (graph_of(served, tmp_path, size, size) for size in (2, 3))
    params = flowrt.SamplingParams(max_tokens=8, ignore_eos=True)
    joined = {"attention.2", "experts.2"}
    async with asyncio.timeout(200), flowrt.open(small) as running:
        expected = [(await running.complete(prompt, params)).token_ids for prompt in served.prompts[:3]]
        is_over = asyncio.Event()

        async def send_again(number: int) -> int:
            """Send a prompt again and again. Returns how often it was answered."""
            count = 0
            while not is_over.is_set() or not count:
                assert (await running.complete(served.prompts[number], params)).token_ids == expected[number]
                count += 1
            return count

        memory, descriptors = shared_memory(), len(os.listdir("/proc/self/fd"))
        pids = set[int]()
        async with asyncio.TaskGroup() as clients:
            asking = [clients.create_task(send_again(number)) for number in range(3)]
            for _ in range(2):
                await running.run.apply(large)
                new = {name: running.pids[name] for name in joined}
                pids |= {*new.values()}
                before = await running.statistics()
                while not await has_worked(running, joined, before):
                    await running.complete(served.prompts[0], params)
                await running.run.apply(small)
                assert {*running.graph.process_names()} == {*small.process_names()}
                assert not left_processes(new.values())
            is_over.set()
        assert len(pids) == 4
        assert all(task.result() for task in asking)
        assert not running.health().warnings
        assert shared_memory() <= memory
        assert len(os.listdir("/proc/self/fd")) <= descriptors
        for name, statistics in (await running.statistics()).items():
            assert statistics.num_restarts == 0, name


async def has_worked(running: flowrt.RunningGraph, names: set[str], before: dict[str, flowrt.Statistics]) -> bool:
    now = await running.statistics()
    return all(now[name].num_firings > before[name].num_firings for name in names)


async def test_a_change_that_is_refused_changes_nothing(served: Served, tmp_path: Path) -> None:
    small = graph_of(served, tmp_path, 1, 2)
    async with asyncio.timeout(100), flowrt.open(small) as running:
        before = running.graph
        other = small.replace(limits=small.limits.replace(page_size=8))
        with pytest.raises(flowrt.UserError, match=r"limits\.page_size: cannot change from 16 to 8 while the graph runs"):
            await running.run.apply(other)
        assert running.graph is before
