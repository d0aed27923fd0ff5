"""A run on two hosts, both played by this machine: exact tokens, also when one host is lost during requests."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil
from end_to_end.test_expert_failover import Story, tokens_of
from left_processes import left_processes
from served_models import Served

import flowrt
from flowrt.processes.leftover import marked_processes

DEPLOY = {"prefill": {"workers": 1}, "attention": {"groups": 2}, "experts": {"servers": 2, "replicas": 2}}


def pids_of(run_id: str) -> list[int]:
    return [marked.pid for marked in marked_processes() if marked.run_id.startswith(run_id)]


async def test_the_loss_of_a_host_changes_no_token_and_its_processes_rejoin(served: Served, tmp_path: Path) -> None:
    path = served.write(tmp_path, DEPLOY, numerics="strict", hosts={"engine": "local"}, reliability={"hedge": False})
    story, expected = Story(), served.expected[:4]
    async with flowrt.open(path, on_event=story.note) as running:
        graph, run_id = running.launcher.graph, running.launcher.run_id
        lost = sorted(name for name, host in graph.process_hosts.items() if host == "host.1")
        assert len(lost) == 2
        between = {edge.transport for edge in graph.edges.values() if len({graph.host_of(end) for end in graph.ends_of(edge)}) == 2}
        assert between == {"zmq"}
        assert await tokens_of(running, served.prompts[:4], lambda count: None) == expected
        servers = [pid for pid in pids_of(run_id) if "flowrt.hosts.server" in psutil.Process(pid).cmdline()]

        def kill(count: int) -> None:
            if count >= 20 and servers:
                os.kill(servers.pop(), signal.SIGKILL)

        assert await tokens_of(running, served.prompts[:4], kill) == expected
        await story.until(lambda story: sorted(story.back) == lost)
        assert sorted(story.lost) == lost
        assert await tokens_of(running, served.prompts[:4], lambda count: None) == expected
        pids = pids_of(run_id)
    assert not left_processes(pids)
