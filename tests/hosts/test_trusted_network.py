"""Runs whose hosts are in a trusted network: edges between them take `ucx`, and a death changes no token."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest
from end_to_end.test_expert_failover import Story, kill_once, tokens_of
from left_processes import left_processes
from served_models import Served

import flowrt
from flowrt.processes.leftover import marked_processes
from flowrt.transports.registry import unavailable_reason

pytestmark = pytest.mark.skipif(unavailable_reason("ucx") is not None, reason=str(unavailable_reason("ucx")))


async def test_a_death_changes_no_token(served: Served, tmp_path: Path) -> None:
    deploy = {"attention": {"groups": 2}, "experts": {"servers": 2, "replicas": 2}}
    hosts = {"engine": "local", "count": 2, "trusted": ["127.0.0.0/8"]}
    path, story = served.write(tmp_path, deploy, numerics="strict", hosts=hosts), Story()
    async with flowrt.open(path, on_event=story.note) as running:
        graph = running.launcher.graph
        for edge in graph.edges.values():
            if len({graph.host_of(end) for end in graph.ends_of(edge)}) == 2:
                assert edge.transport == "ucx"
        assert await tokens_of(running, served.prompts, lambda count: None) == served.expected
        pids = [marked.pid for marked in marked_processes() if marked.run_id.startswith(running.launcher.run_id)]
        victim = next(name for name, host in graph.process_hosts.items() if host == "host.1" and name.startswith("experts"))
        pid = next(pid for pid in pids if psutil.Process(pid).name() == f"fr:{victim}")
        assert await tokens_of(running, served.prompts[:4], kill_once(pid)) == served.expected[:4]
        await story.until(lambda story: story.back == [victim])
        assert await tokens_of(running, served.prompts[:4], lambda count: None) == served.expected[:4]
    assert not left_processes(pids)


async def test_a_channel_that_breaks_between_hosts_restarts_one_end(served: Served, tmp_path: Path) -> None:
    """The end that keeps less state, an expert server: no token changes."""
    deploy = {
        "attention": {"groups": 2},
        "experts": {"servers": 2, "replicas": 2},
        "links": {"attention-experts": {"transport": "faulty+auto?drop@20"}},
    }
    hosts = {"engine": "local", "count": 2, "trusted": ["127.0.0.0/8"]}
    path, story = served.write(tmp_path, deploy, numerics="strict", hosts=hosts, reliability={"restarts": 1000}), Story()
    async with flowrt.open(path, on_event=story.note) as running:
        graph = running.launcher.graph
        crossing = [edge for edge in graph.edges.values() if len({graph.host_of(end) for end in graph.ends_of(edge)}) == 2]
        assert {edge.transport for edge in crossing} == {"faulty+ucx?drop@20"}
        assert await tokens_of(running, served.prompts[:4], lambda count: None) == served.expected[:4]
        await story.until(lambda story: story.lost)
    assert {name.partition(".")[0] for name in story.lost} == {"experts"}
