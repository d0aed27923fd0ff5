"""Deaths during the start: an expert server that dies while it loads is loaded again; any other death ends the run."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import pytest
from launcher.test_launcher import nothing_left
from launcher.test_restarts import Run, graph_of

from flowrt.errors import WorkerDiedError
from flowrt.graph.settings import ReliabilitySettings
from flowrt.launcher import events

__all__ = ["nothing_left"]  # the fixture that looks for what is left, for every test here


def kill_when(r: Run, *seen: tuple[type, str], kill: Sequence[str]) -> None:
    """Once all these events have been seen."""

    def on_event(event: events.Event) -> None:
        if all(r.of(kind, name) for kind, name in seen):
            r.on_event = lambda event: None
            for name in kill:
                r.kill(name)

    r.on_event = on_event


async def test_a_server_killed_while_it_loads_is_loaded_again(tmp_path: Path) -> None:
    r = Run(graph_of(tmp_path, "mute.0", "server.1"))
    kill_when(r, (events.WorkerLoading, "mute.0"), kill=["mute.0"])
    async with r.launcher as launcher:
        (died,) = r.of(events.WorkerLost, "mute.0")
        assert died == events.WorkerLost("mute.0", "was killed by SIGKILL", while_loading=True)
        assert events.news(died) == "mute.0 was killed by SIGKILL while it loaded; it is loaded again"
        started = [event.pid for event in r.events if isinstance(event, events.WorkerStarted) and event.name == "mute.0"]
        assert len(started) == 2
        assert launcher.pids["mute.0"] == started[1]
        assert not Path(f"/proc/{started[0]}").exists()
        await r.until(lambda: r.received("client.0", "peers") and r.received("client.1", "peers"))
        assert "mute.0=fake://mute.0/2" in r.received("client.0", "peers")[0], "each worker receives the address of the living incarnation"
        r.kill("mute.0")  # and from then on it may die as ever
        await r.until_back("mute.0")
        assert (await launcher.statistics())["mute.0"].num_restarts == 2


async def test_one_that_dies_after_it_has_loaded_and_before_the_others_have(tmp_path: Path) -> None:
    """server.1 listens and is killed while mute.0 still loads, which then is killed too."""
    r = Run(graph_of(tmp_path, "mute.0", "server.1"))
    kill_when(r, (events.WorkerLoading, "mute.0"), (events.WorkerListening, "server.1"), kill=["server.1", "mute.0"])
    async with r.launcher:
        assert {event.name for event in r.events if isinstance(event, events.WorkerLost)} == {"mute.0", "server.1"}


async def test_incarnations_that_exit_while_they_load(tmp_path: Path) -> None:
    async with Run(graph_of(tmp_path, "infant.0", "server.1")) as r:
        how = [event.how for event in r.events if isinstance(event, events.WorkerLost)]
        assert how == ["exited with status 7"] * 2


@pytest.mark.parametrize("restarts", [0, 2])
async def test_server_that_dies_too_often_while_loading_ends_the_run(tmp_path: Path, restarts: int) -> None:
    r = Run(graph_of(tmp_path, "stillborn.0", "server.1", settings=ReliabilitySettings(detector=False, restarts=restarts)))
    why = {0: "reliability.restarts is 0", 2: "it was started again 2 times in 30 s"}[restarts]
    with pytest.raises(WorkerDiedError, match=rf"stillborn\.0 exited with status 7 while it loaded, and {why}"):
        await r.launcher.__aenter__()
    assert len(r.of(events.WorkerLost, "stillborn.0")) == restarts + 1


async def test_worker_that_reports_its_failure_is_not_loaded_again(tmp_path: Path) -> None:
    r = Run(graph_of(tmp_path, "broken.0", "server.1"))
    with pytest.raises(WorkerDiedError, match=r"broken\.0"):
        await r.launcher.__aenter__()


@pytest.mark.parametrize(("victim", "recovery"), [("client.0", "fine"), ("mute.0", "off")])
async def test_other_deaths_while_loading_end_the_run(tmp_path: Path, victim: str, recovery: Literal["fine", "off"]) -> None:
    r = Run(graph_of(tmp_path, "mute.0", settings=ReliabilitySettings(detector=False, recovery=recovery)))
    kill_when(r, (events.WorkerLoading, "mute.0"), kill=[victim])
    with pytest.raises(WorkerDiedError, match=rf"{victim} was killed by SIGKILL"):
        await r.launcher.__aenter__()
    assert not r.of(events.WorkerLost, victim)


async def test_server_killed_while_workers_connect_is_restarted(tmp_path: Path) -> None:
    r = Run(graph_of(tmp_path, "lingering.0", "server.1"))
    starting = asyncio.ensure_future(r.launcher.__aenter__())
    await r.until(lambda: r.received("lingering.0", "peers"))
    assert not starting.done()
    _, incarnation = r.kill("lingering.0")
    launcher = await starting
    try:
        assert r.of(events.WorkerLost, "lingering.0") == [events.WorkerLost("lingering.0", "was killed by SIGKILL")]
        assert r.of(events.WorkerRestarted, "lingering.0")
        await r.until(lambda: r.received("client.0", "joined"))
        assert r.received("client.0", "left") == [f"left lingering.0 {incarnation}"]
        assert r.received("client.0", "joined") == [f"joined lingering.0 {launcher.incarnations['lingering.0']} fake://lingering.0/2"]
    finally:
        await launcher.stop()


async def test_server_that_dies_too_often_while_workers_connect_ends_the_run(tmp_path: Path) -> None:
    r = Run(graph_of(tmp_path, "lingering.0", settings=ReliabilitySettings(detector=False, restarts=0)))
    starting = asyncio.ensure_future(r.launcher.__aenter__())
    await r.until(lambda: r.received("lingering.0", "peers"))
    r.kill("lingering.0")
    with pytest.raises(WorkerDiedError, match=r"lingering\.0 was killed by SIGKILL while it connected, and reliability.restarts is 0"):
        await starting


async def test_a_start_that_is_given_up_while_one_is_loaded_again_leaves_nothing(tmp_path: Path) -> None:
    settings = ReliabilitySettings(detector=False, restarts=100)
    r = Run(graph_of(tmp_path, "stillborn.0", "server.1", settings=settings))
    starting = asyncio.ensure_future(r.launcher.__aenter__())
    await r.until(lambda: len(r.of(events.WorkerLost, "stillborn.0")) == 2)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
