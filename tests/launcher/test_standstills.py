"""Stopped processes that send no heartbeats: the monitor and the fork server."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import psutil
import pytest
from launcher.test_launcher import nothing_left
from launcher.test_restarts import Monitored, Run, fake_monitor, graph_of

from flowrt.errors import WorkerDiedError
from flowrt.graph.model import MONITOR, ReliabilitySettings
from flowrt.launcher import events, run_state, run_table, worker_pool

__all__ = ["fake_monitor", "nothing_left"]


def fork_server_of(r: Run) -> int:
    return psutil.Process(next(pid for pid in r.launcher.pids.values() if pid != os.getpid())).ppid()


@pytest.mark.usefixtures("fake_monitor")
async def test_a_stopped_monitor_is_ended_and_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_state, "MONITOR_SECONDS", 2.0)
    r = Monitored(tmp_path, "server.0")
    async with r.launcher as launcher:
        await r.until(lambda: launcher.state.is_usable(MONITOR))
        pid, _ = r.kill(MONITOR, signal.SIGSTOP)
        await r.until_back(MONITOR)
        assert launcher.pids[MONITOR] != pid
        assert not Path(f"/proc/{pid}").exists(), "the former incarnation cannot wake up"
        assert r.of(events.WorkerLost, MONITOR) == [
            events.WorkerLost(MONITOR, "sent nothing for 2 s; was killed by SIGKILL"),
        ]


@pytest.mark.usefixtures("fake_monitor")
async def test_responsive_monitor_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_state, "POLL_SECONDS", 0.01)
    r = Monitored(tmp_path, "server.0")
    async with r.launcher as launcher:
        await r.until(lambda: launcher.state.is_usable(MONITOR))
        latest = launcher.workers[MONITOR].last_message_seconds
        for _ in range(20):
            await r.until(lambda latest=latest: launcher.workers[MONITOR].last_message_seconds > latest)
            latest = launcher.workers[MONITOR].last_message_seconds
        assert not r.of(events.WorkerLost, MONITOR)


async def test_death_is_noticed_while_the_fork_server_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_table, "FORK_SERVER_SECONDS", 0.3)
    r = Run(graph_of(tmp_path, "server.0", "server.1"))
    async with r.launcher:
        os.kill(fork_server_of(r), signal.SIGSTOP)
        r.kill("server.0")
        await r.until(lambda: r.of(events.WorkerGivenUp, "server.0"))
        assert r.of(events.WorkerGivenUp, "server.0") == [
            events.WorkerGivenUp(
                "server.0", "it died 0.3 s ago, and the fork server has not reported it: is it stopped, or the machine overloaded?"
            ),
        ]
        await r.submit("client.0", "work")  # the run goes on
        await r.until(lambda: r.received("client.0", "done", "work"))
        os.kill(fork_server_of(r), signal.SIGCONT)
        await r.until_back("server.0")


async def test_a_restart_does_not_wait_for_ever_for_a_stopped_fork_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    r = Run(graph_of(tmp_path, "server.0", "server.1"))

    def stop_it(event: events.Event) -> None:
        if isinstance(event, events.WorkerLost) and len(r.of(events.WorkerLost, "server.0")) == 1:
            os.kill(fork_server_of(r), signal.SIGSTOP)  # it has latest of the end, and is about to be asked for a fork

    async with r.launcher:
        monkeypatch.setattr(worker_pool, "FORK_SECONDS", 0.3)
        r.on_event = stop_it
        r.kill("server.0")
        await r.until(lambda: r.of(events.WorkerGivenUp, "server.0"))
        assert r.of(events.WorkerGivenUp, "server.0") == [
            events.WorkerGivenUp("server.0", "the fork server has not responded for 0.3 s: is it stopped, or the machine overloaded?"),
        ]
        monkeypatch.setattr(worker_pool, "FORK_SECONDS", 20.0)
        os.kill(fork_server_of(r), signal.SIGCONT)
        await r.until_back("server.0")
    assert not r.of(events.RunFailed, "server.0")


async def test_a_run_ends_in_order_though_its_fork_server_is_stopped(tmp_path: Path) -> None:
    """No worker is late: each has ended, which only the fork server has not reported."""
    r = Run(graph_of(tmp_path, "server.0", settings=ReliabilitySettings(detector=False)), stop_seconds=60.0)
    async with r.launcher as launcher, asyncio.timeout(60):
        os.kill(fork_server_of(r), signal.SIGSTOP)
        await launcher.stop()
    assert not [event for event in r.events if isinstance(event, events.Straggler)]


async def test_death_that_a_stopped_fork_server_does_not_report_is_not_called_a_closed_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_state, "STATUS_SECONDS", 0.3)
    r = Run(graph_of(tmp_path, "server.0"))

    async def live() -> None:
        async with r.launcher as launcher:
            os.kill(fork_server_of(r), signal.SIGSTOP)
            r.kill("client.0")
            await launcher.wait_failed()

    with pytest.raises(WorkerDiedError) as caught:
        await live()
    text = "client.0 has ended, and the fork server has not reported how: is it stopped, or the machine overloaded?"
    assert str(caught.value) == text


async def test_statistics_name_a_stopped_worker_and_do_not_wait_for_it(tmp_path: Path) -> None:
    r = Run(graph_of(tmp_path, "server.0", "server.1"))
    async with r.launcher as launcher:
        assert all(each.has_responded for each in (await launcher.statistics(30.0)).values())
        os.kill(launcher.pids["server.0"], signal.SIGSTOP)
        for _ in range(40):  # more than its control connection has room for
            found = await launcher.statistics(0.05)
        assert {name for name, each in found.items() if not each.has_responded} == {"server.0"}
        assert found["server.0"].num_firings == 10
        os.kill(launcher.pids["server.0"], signal.SIGCONT)
        assert (await launcher.statistics(30.0))["server.0"].has_responded
