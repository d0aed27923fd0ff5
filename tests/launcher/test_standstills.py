"""Stopped processes that send no heartbeats: the monitor and the fork server."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest
from launcher.test_launcher import nothing_left
from launcher.test_restarts import Monitored, Run, fake_monitor, graph_of
from left_processes import left_processes

from flowrt.errors import WorkerDiedError
from flowrt.graph.model import MONITOR
from flowrt.graph.settings import ReliabilitySettings
from flowrt.launcher import events, run_state

__all__ = ["fake_monitor", "nothing_left"]


@pytest.mark.usefixtures("fake_monitor")
async def test_a_stopped_monitor_is_ended_and_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_state, "MONITOR_SECONDS", 2.0)
    async with Monitored(tmp_path, "server.0") as r:
        await r.until(lambda: r.launcher.state.is_usable(MONITOR))
        pid, _ = r.kill(MONITOR, signal.SIGSTOP)
        await r.until_back(MONITOR)
        assert r.launcher.pids[MONITOR] != pid
        assert not left_processes([pid]), "the former incarnation cannot wake up"
        assert r.of(events.WorkerLost, MONITOR) == [
            events.WorkerLost(MONITOR, "sent nothing for 2 s; was killed by SIGKILL"),
        ]


@pytest.mark.usefixtures("fake_monitor")
async def test_responsive_monitor_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_state, "POLL_SECONDS", 0.01)
    async with Monitored(tmp_path, "server.0") as r:
        await r.until(lambda: r.launcher.state.is_usable(MONITOR))
        monitor = r.launcher.state.table.workers[MONITOR]
        for _ in range(20):
            latest = monitor.last_message_seconds
            await r.until(lambda latest=latest: monitor.last_message_seconds > latest)
        assert not r.of(events.WorkerLost, MONITOR)


async def test_stopped_fork_server_and_worker_that_starts_are_replaced(tmp_path: Path) -> None:
    """By the real monitor, which samples both: no restart needs the fork server, and the worker is stopped while the run starts."""
    r = Run(graph_of(tmp_path, "server.0", settings=ReliabilitySettings()))
    stopped: list[int] = []

    def stop_first(event: events.Event) -> None:
        if isinstance(event, events.WorkerStarted) and event.name == "server.0" and not stopped:
            stopped.append(event.pid)
            os.kill(event.pid, signal.SIGSTOP)

    r.on_event = stop_first
    async with r.launcher as launcher:
        assert launcher.pids["server.0"] not in stopped
        (lost,) = r.of(events.WorkerLost, "server.0")
        assert isinstance(lost, events.WorkerLost)
        assert lost.how.startswith("was marked dead (stopped for ")
        assert lost.while_loading
        fork_server = launcher.fork_server_pid()
        os.kill(fork_server, signal.SIGSTOP)
        await r.until(lambda: r.of(events.ForkServerRestarted, ""))
        assert launcher.fork_server_pid() not in (0, fork_server)
        (gone,) = r.of(events.ForkServerLost, "")
        assert isinstance(gone, events.ForkServerLost)
        assert gone.how.startswith("was marked dead (stopped for ")


async def test_a_run_ends_in_order_though_its_fork_server_is_stopped(tmp_path: Path) -> None:
    r = Run(graph_of(tmp_path, "server.0", settings=ReliabilitySettings(detector=False)), stop_seconds=60.0)
    async with r.launcher as launcher, asyncio.timeout(60):
        os.kill(r.launcher.fork_server_pid(), signal.SIGSTOP)
        await launcher.stop()
    assert not [event for event in r.events if isinstance(event, events.Straggler)]


async def test_exit_status_is_known_while_the_fork_server_is_stopped(tmp_path: Path) -> None:
    r = Run(graph_of(tmp_path, "server.0"))

    async def live() -> None:
        async with r.launcher as launcher:
            os.kill(launcher.fork_server_pid(), signal.SIGSTOP)
            r.kill("client.0")
            await launcher.wait_failed()

    with pytest.raises(WorkerDiedError, match=r"^client\.0 was killed by SIGKILL$"):
        await live()


async def test_statistics_name_a_stopped_worker_and_do_not_wait_for_it(tmp_path: Path) -> None:
    async with Run(graph_of(tmp_path, "server.0", "server.1")) as r:
        assert all(each.has_responded for each in (await r.launcher.statistics(30.0)).values())
        os.kill(r.launcher.pids["server.0"], signal.SIGSTOP)
        for _ in range(40):  # more than its control connection has room for
            found = await r.launcher.statistics(0.05)
        assert {name for name, each in found.items() if not each.has_responded} == {"server.0"}
        assert found["server.0"].num_firings == 10
        os.kill(r.launcher.pids["server.0"], signal.SIGCONT)
        assert (await r.launcher.statistics(30.0))["server.0"].has_responded
