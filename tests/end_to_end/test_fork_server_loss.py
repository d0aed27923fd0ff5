"""Loss of the fork server while a model graph serves requests, with real processes: no token changes, and servers still come back."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from end_to_end.test_expert_failover import COPIES, Story, tokens_of, write
from left_processes import left_processes
from served_models import Served

import flowrt
from flowrt.launcher import starts


async def test_lost_fork_server_changes_no_token_and_is_replaced(served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is killed; then the next one is stopped."""
    monkeypatch.setattr(starts, "FORK_SECONDS", 1.0)
    story = Story()
    pids: set[int] = set()
    async with flowrt.open(write(served, tmp_path, COPIES), on_event=story.note) as running:
        for cause in (signal.SIGKILL, signal.SIGSTOP):
            pids |= {running.launcher.fork_server_pid(), *running.pids.values()}
            story.back.clear()
            await assert_fork_server_is_replaced(running, story, served, cause)
        pids.update(running.pids.values())
    assert not left_processes(pids)


async def assert_fork_server_is_replaced(running: flowrt.RunningGraph, story: Story, served: Served, cause: signal.Signals) -> None:
    prompts, expected = served.prompts[:4], served.expected[:4]
    fork_server, first, lost = running.launcher.fork_server_pid(), dict(running.pids), []

    def lose(count: int) -> None:
        if count >= 10 and not lost:
            lost.append("fork server")
            os.kill(fork_server, cause)
        if count >= 24 and len(lost) == 1:
            lost.append("experts.1")
            os.kill(running.pids["experts.1"], signal.SIGKILL)

    assert await tokens_of(running, prompts, lose) == expected
    await story.until(lambda story: "experts.1" in story.back)
    assert await tokens_of(running, prompts, lambda count: None) == expected
    assert running.launcher.fork_server_pid() not in (0, fork_server)
    assert {name for name in first if running.pids[name] != first[name]} == {"experts.1"}
    assert running.health().ok
    assert not [each for each in running.health().warnings if "fork server" in each]
