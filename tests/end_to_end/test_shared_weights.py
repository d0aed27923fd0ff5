"""Expert servers of one host share their weights, with real processes: replicas map one copy, and so does a restarted server."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest
from served_models import Served

import flowrt
from flowrt.launcher import events

DEPLOY = {"attention": {"groups": 1}, "experts": {"servers": 2, "replicas": 2}}

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory files are Linux's")


def weight_maps(pid: int) -> dict[str, set[str]]:
    """Inode -> access of the mapped weights."""
    found: dict[str, set[str]] = {}
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        if "/memfd:flowrt-weights" in line:
            _, access, _, _, inode, *_ = line.split()
            found.setdefault(inode, set()).add(access)
    return found


@pytest.mark.parametrize("numerics", ["strict", "fast"])
async def test_restarted_server_maps_the_weights_of_the_first(served: Served, tmp_path: Path, numerics: str) -> None:
    back = asyncio.Event()
    graph = served.write(tmp_path, DEPLOY, limits={"max_tokens": 16}, numerics=numerics)
    prompt = list(served.prompts[0])
    async with flowrt.open(graph, on_event=lambda event: back.set() if isinstance(event, events.WorkerRestarted) else None) as running:
        expected = (await running.complete(prompt, max_tokens=8)).token_ids
        servers = [running.pids[f"experts.{server}"] for server in range(2)]
        maps = weight_maps(servers[0])
        assert list(maps.values()) == [{"r--p"}]
        assert weight_maps(servers[1]) == maps
        for server in range(2):
            os.kill(servers[server], signal.SIGKILL)
            async with asyncio.timeout(60):
                await back.wait()
            back.clear()
            assert weight_maps(running.pids[f"experts.{server}"]) == maps
            assert (await running.complete(prompt, max_tokens=8)).token_ids == expected


async def test_servers_read_their_own_weights_with_sharing_off(served: Served, tmp_path: Path) -> None:
    graph = served.write(tmp_path, DEPLOY, limits={"max_tokens": 16}, numerics="strict", reliability={"share_weights": False})
    async with flowrt.open(graph) as running:
        assert (await running.complete(list(served.prompts[0]), max_tokens=8)).token_ids
        assert not any(weight_maps(pid) for pid in running.pids.values())
