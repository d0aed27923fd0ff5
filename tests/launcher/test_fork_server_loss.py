"""Loss of the fork server: workers run on, restarts wait for the next one. Decisions first, then real processes."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from launcher.run_driver import CLIENT, KILLED, OTHER, SERVER, Driver, announced, end_of
from launcher.run_driver import graph_of as small_graph
from launcher.test_launcher import children, nothing_left
from launcher.test_restarts import Run, graph_of

from flowrt.errors import WorkerDiedError
from flowrt.graph.model import FORK_SERVER, MONITOR
from flowrt.launcher import events, starts
from flowrt.launcher.actions import End, KillForkServer, StartForkServer
from flowrt.launcher.starts import FORK_SECONDS, IMPORT_SECONDS, LAUNCH_FORK_SECONDS, RETRY_SECONDS
from flowrt.processes.leftover import processes_marked

__all__ = ["nothing_left"]


def test_restart_waits_for_the_next_fork_server(driver: Driver) -> None:
    assert announced(driver.do(driver.state.deaths.on_fork_server_lost, KILLED)) == [events.ForkServerLost(KILLED, 0.0)]
    assert driver.pass_time(0.0) == [StartForkServer()]
    driver.die(SERVER)
    assert driver.pass_time(30.0) == []
    assert driver.state.restarting() == [SERVER]
    assert announced(driver.do(driver.state.starts.on_fork_server_ready, 5)) == [events.ForkServerRestarted(30.0)]
    assert driver.pass_time(0.0) == [driver.start_of(SERVER)]


def test_start_that_meets_the_end_of_the_fork_server_waits_and_costs_no_restart() -> None:
    driver = Driver(small_graph(restarts=1)).begin()
    driver.die(SERVER)
    assert driver.pass_time(0.0) == [driver.start_of(SERVER)]
    driver.do(driver.state.deaths.on_fork_failed, SERVER, WorkerDiedError(FORK_SERVER, KILLED))
    driver.do(driver.state.deaths.on_fork_server_lost, KILLED)
    assert driver.pass_time(RETRY_SECONDS) == [StartForkServer()]
    driver.do(driver.state.starts.on_fork_server_ready, 5)
    assert driver.pass_time(0.0) == [driver.start_of(SERVER)]


def test_monitor_that_meets_the_end_of_the_fork_server_while_the_run_starts_is_started_later() -> None:
    """No worker needs the fork server any more, and its loss is reported once the run is at work."""
    graph = small_graph()
    driver = Driver(graph.replace(reliability=graph.reliability.replace(detector=True))).connect()
    driver.do(driver.state.deaths.on_fork_failed, MONITOR, WorkerDiedError(FORK_SERVER, KILLED))
    for name in (CLIENT, SERVER, OTHER):
        driver.do(driver.state.on_connected, name)
    driver.do(driver.state.deaths.on_fork_server_lost, KILLED)
    assert driver.pass_time(0.0) == [StartForkServer()]
    driver.do(driver.state.starts.on_fork_server_ready, 5)
    actions = driver.pass_time(RETRY_SECONDS)
    assert driver.start_of(MONITOR) in actions


def test_fork_server_of_another_host_that_does_not_return_costs_restarts() -> None:
    """Its loss is not reported: only refused forks show it."""
    driver = Driver(small_graph(restarts=2)).begin()
    driver.die(SERVER)
    given_up, num_starts = list[events.Event](), 0
    for _ in range(1200):
        actions = driver.pass_time(RETRY_SECONDS)
        if driver.start_of(SERVER) in actions:
            num_starts += 1
            refused = driver.do(driver.state.deaths.on_fork_failed, SERVER, WorkerDiedError(FORK_SERVER, KILLED))
            given_up += [each for each in announced(refused) if isinstance(each, events.WorkerGivenUp)]
    (first, *_) = given_up
    assert isinstance(first, events.WorkerGivenUp)
    assert first.why.startswith(f"the fork server of its host {KILLED}, and ")
    assert num_starts * RETRY_SECONDS < IMPORT_SECONDS + 1

    driver.pass_time(700.0)
    driver.do(driver.state.on_forked, SERVER, 7)
    driver.do(driver.state.deaths.on_exited, SERVER, KILLED)
    assert driver.state.table.processes[SERVER].refused_seconds is None


def test_fork_server_that_does_not_respond_is_killed_once(driver: Driver) -> None:
    assert driver.state.starts.fork_seconds == FORK_SECONDS
    driver.die(SERVER)
    driver.restart(OTHER)
    assert driver.do(driver.state.deaths.on_fork_silent, SERVER) == [KillForkServer()]
    assert driver.do(driver.state.deaths.on_fork_silent, OTHER) == []
    driver.do(driver.state.deaths.on_fork_server_lost, KILLED)
    assert driver.pass_time(10.0) == [StartForkServer()]
    driver.do(driver.state.starts.on_fork_server_ready, 5)
    actions = driver.pass_time(0.0)
    assert set(actions) == {driver.start_of(SERVER), driver.start_of(OTHER)}


def test_fork_server_that_dies_again_and_again_is_given_up_for_a_window() -> None:
    driver = Driver(small_graph(restarts=1)).begin()
    driver.do(driver.state.deaths.on_fork_server_lost, KILLED)
    driver.die(SERVER)
    assert StartForkServer() in driver.pass_time(0.0)
    lost, given_up = announced(driver.do(driver.state.starts.on_fork_server_failed, WorkerDiedError(FORK_SERVER, "exited with status 1")))
    assert lost == events.ForkServerLost("exited with status 1", 30.0)
    assert given_up == events.WorkerGivenUp(SERVER, "the fork server exited with status 1, and it was started again once in 30 s")
    (later,) = announced(driver.restart(OTHER))[1:]
    assert isinstance(later, events.WorkerGivenUp)
    assert driver.state.restarting() == []
    assert driver.pass_time(30.0) == [StartForkServer()]
    driver.do(driver.state.starts.on_fork_server_ready, 5)
    actions = driver.pass_time(0.0)
    assert set(actions) == {driver.start_of(SERVER), driver.start_of(OTHER)}


def test_run_without_restarts_has_a_fork_server_for_its_monitor() -> None:
    """One is started again, as the monitor is; later ones after the window."""
    driver = Driver(small_graph(restarts=0)).begin()
    assert announced(driver.do(driver.state.deaths.on_fork_server_lost, KILLED)) == [events.ForkServerLost(KILLED, 0.0)]
    assert driver.pass_time(0.0) == [StartForkServer()]
    driver.do(driver.state.starts.on_fork_server_ready, 5)
    assert announced(driver.do(driver.state.deaths.on_fork_server_lost, KILLED)) == [events.ForkServerLost(KILLED, 30.0)]
    driver.die(SERVER)
    driver.pass_time(30.0)
    driver.do(driver.state.starts.on_fork_server_ready, 6)
    assert driver.start_of(SERVER) not in driver.pass_time(3600.0)


@pytest.mark.parametrize("loss", ["dies", "is silent", "refuses"])
def test_loss_during_the_launch_ends_it_in_one_line(loss: str) -> None:
    driver = Driver()
    driver.do(driver.state.start, driver.now)
    error = WorkerDiedError(FORK_SERVER, KILLED)
    happen: dict[str, Callable[[], object]] = {
        "dies": lambda: driver.do(driver.state.deaths.on_fork_server_lost, KILLED),
        "is silent": lambda: actions.extend(driver.do(driver.state.deaths.on_fork_silent, SERVER)),
        "refuses": lambda: actions.extend(driver.do(driver.state.deaths.on_fork_failed, SERVER, error)),
    }
    actions: list[object] = []
    happen[loss]()
    silent = f"{FORK_SERVER} has not responded for {LAUNCH_FORK_SECONDS:g} s: is it stopped, or the machine overloaded?"
    assert end_of([*actions, *driver.pass_time(1.0)]) == (silent if loss == "is silent" else str(error))  # type: ignore[list-item]


def test_stop_waits_for_no_restart_that_waits_for_a_fork_server(driver: Driver) -> None:
    driver.do(driver.state.deaths.on_fork_server_lost, KILLED)
    driver.restart(SERVER)
    driver.do(driver.state.stop)
    actions = []
    for name in (CLIENT, OTHER):
        driver.do(driver.state.on_stop_sent, name)
        actions += driver.die(name)
    assert actions == [End()]


async def test_workers_run_on_and_restarts_wait_for_the_next_fork_server(loop_kind: str, tmp_path: Path) -> None:
    async with Run(graph_of(tmp_path, "server.0", "server.1")) as r:
        before, fork_server = dict(r.launcher.pids), r.launcher.fork_server_pid()
        assert {psutil.Process(pid).ppid() for pid in before.values()} == {os.getpid()}
        warned: list[tuple[str, ...]] = []  # with the event: a new fork server may be ready a moment later
        r.on_event = lambda event: (
            warned.append(r.launcher.health_record.health().warnings) if isinstance(event, events.ForkServerLost) else None
        )
        os.kill(fork_server, signal.SIGKILL)
        await r.until(lambda: r.of(events.ForkServerLost, ""))
        assert warned == [("the fork server was killed by SIGKILL; a process that ends stays down until a new one is ready",)]
        r.kill("server.0")
        await r.submit("client.0", "work")
        await r.until(lambda: r.received("client.0", "done", "work"))
        await r.until_back("server.0")
        assert r.launcher.fork_server_pid() not in (0, fork_server)
        assert r.launcher.health_record.health().warnings == ()
        assert r.of(events.WorkerLost, "server.0") == [events.WorkerLost("server.0", "was killed by SIGKILL")]
        kinds = [type(event) for event in r.events if isinstance(event, events.ForkServerRestarted | events.WorkerRestarted)]
        assert kinds == [events.ForkServerRestarted, events.WorkerRestarted]
        r.kill("server.0")  # forked by the second fork server
        r.kill("server.1")  # and by the first
        await r.until_back("server.0", 2)
        await r.until_back("server.1")
        assert {name: pid for name, pid in before.items() if r.launcher.pids[name] == pid}.keys() == {"client.0", "client.1"}


async def test_stopped_fork_server_is_replaced_when_a_restart_needs_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with Run(graph_of(tmp_path, "server.0", "server.1")) as r:
        monkeypatch.setattr(starts, "FORK_SECONDS", 0.3)
        fork_server = r.launcher.fork_server_pid()
        os.kill(fork_server, signal.SIGSTOP)
        r.kill("server.0")
        await r.until(lambda: r.of(events.ForkServerLost, ""))
        monkeypatch.undo()
        await r.until_back("server.0")
        assert r.launcher.fork_server_pid() not in (0, fork_server)
        assert r.of(events.ForkServerLost, "") == [events.ForkServerLost("was killed by SIGKILL", 0.0)]


async def test_fork_server_killed_while_it_forks(tmp_path: Path) -> None:
    names = [f"server.{number}" for number in range(4)]
    r = Run(graph_of(tmp_path, *names))
    r.on_event = lambda event: (  # the others are being forked, or are about to be
        os.kill(r.launcher.fork_server_pid(), signal.SIGKILL)
        if isinstance(event, events.WorkerStarted) and r.of(events.WorkerLost, "") and not r.of(events.ForkServerLost, "")
        else None
    )
    async with r.launcher:
        for name in names:
            r.kill(name)
        for name in names:
            await r.until_back(name)


async def test_run_ends_in_order_without_a_fork_server(tmp_path: Path) -> None:
    async with Run(graph_of(tmp_path, "server.0"), stop_seconds=60.0) as r:
        os.kill(r.launcher.fork_server_pid(), signal.SIGKILL)
        await r.until(lambda: r.of(events.ForkServerLost, ""))
    assert not [event for event in r.events if isinstance(event, events.Straggler | events.RunFailed)]
    assert processes_marked(r.launcher.run_id) == []


async def test_output_of_a_worker_is_read_after_the_end_of_its_fork_server(tmp_path: Path) -> None:
    async with Run(graph_of(tmp_path, "server.0")) as r:
        os.kill(r.launcher.fork_server_pid(), signal.SIGKILL)
        await r.until(lambda: r.of(events.ForkServerRestarted, ""))
        r.kill("server.0", signal.SIGABRT)  # the fault handler writes the stack
        await r.until(lambda: any(name == "server.0" and "Fatal Python error" in line for name, line in r.lines))
        await r.until_back("server.0")


PARENT = """
import asyncio, os, signal, sys
sys.path[:0] = {path!r}
from launcher.test_launcher import Run
async def main():
    it = Run("echo.0", "echo.1", "echo.2")
    async with it.launcher as launcher:
        fork_server = launcher.fork_server_pid()
        await it.submit("echo.2", "block", ())
        os.kill(fork_server, {number})
        os.kill(launcher.pids["echo.1"], signal.SIGSTOP)
        print(launcher.run_id, fork_server, *launcher.pids.values(), flush=True)
        await asyncio.sleep(3600)
asyncio.run(main())
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_killed_launcher_takes_every_worker_along(number: signal.Signals) -> None:
    """Also one that is stopped and one that is blocked in C, whatever has become of the fork server."""
    before = children()
    script = textwrap.dedent(PARENT.format(path=[entry for entry in sys.path if entry], number=int(number)))
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        run_id, *started = parent.stdout.readline().split()
        pids = {*processes_marked(run_id), *map(int, started)}
        parent.kill()
        parent.wait()
        while found := processes_marked(run_id):  # the test's time limit is the bound
            pids |= set(found)  # a new fork server
            time.sleep(0.01)
    for pid in pids | (children() - before):  # what the command had forked ends with it
        with contextlib.suppress(ChildProcessError):  # ours only where this process inherits orphans
            os.waitpid(pid, 0)
