"""Server deaths during a run: notifications and their order, restarts and their budget, and a clean end."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from launcher.owners import LauncherRun, launcher_of
from launcher.test_launcher import held, nothing_left, open_fds

from flowrt.actors.control import Control, Ended, Request, Submit
from flowrt.errors import NotRunningError, WorkerDiedError
from flowrt.graph.model import MONITOR, Edge, Graph, Node
from flowrt.graph.settings import ReliabilitySettings
from flowrt.launcher import deaths, events, worker_pool

__all__ = ["nothing_left"]  # the fixture that looks for what is left, for every test here
WORKER = "launcher.mortal_workers:run_worker"
QUIET = ReliabilitySettings(detector=False)


def graph_of(folder: Path, *servers: str, clients: int = 2, processes: str | int = "many", settings: ReliabilitySettings = QUIET) -> Graph:
    """Every client sends requests to every server; there are no other edges. The run cannot lose a client."""
    names = [f"client.{number}" for number in range(clients)]
    nodes = {name: Node(name, "source", name) for name in names} | {name: Node(name, "experts", name) for name in servers}
    pairs = [(client, server) for client in names for server in servers]
    edges = [Edge(client, "y", server, "x", transport="zmq") for client, server in pairs]
    nodes |= {f"{name}.state": Node(f"{name}.state", "nothing", name) for name in names}
    return Graph.of(nodes.values(), edges, processes=processes, reliability=settings, folder=str(folder))


class Run(LauncherRun):
    """A launcher with mortal workers, and the messages that it received."""

    def __init__(self, graph: Graph, **options: object) -> None:
        self.events: list[events.Event] = []
        self.notices: list[tuple[str, str]] = []  # (worker, notice that it received)
        self.lines: list[tuple[str, str]] = []
        self.times: dict[tuple[str, str], float] = {}
        self.on_event: Callable[[events.Event], None] = lambda event: None
        defaults: dict[str, object] = {"worker": WORKER, "preload": ("launcher.mortal_workers",), "response_seconds": 20.0}
        defaults["on_line"] = lambda name, line: self.lines.append((name, line))
        self.launcher = launcher_of(graph, self._note, self._on_control, **(defaults | options))  # type: ignore[arg-type]

    def _note(self, event: events.Event) -> None:
        self.events.append(event)
        self.on_event(event)

    def _on_control(self, name: str, control: Control) -> None:
        if isinstance(control, Ended):
            self.notices.append((name, control.request_id))
            self.times[name, control.request_id] = float(control.error or 0)

    def kill(self, name: str, number: int = signal.SIGKILL) -> tuple[int, str]:
        """The pid and incarnation of the process that it ended."""
        pid, incarnation = self.launcher.pids[name], self.launcher.incarnations[name]
        os.kill(pid, number)
        return pid, incarnation

    def kill_second(self, name: str) -> None:
        """End the second incarnation of a process once it is started."""

        def on_event(event: events.Event) -> None:
            if isinstance(event, events.WorkerStarted) and len(self.of(events.WorkerStarted, name)) == 2:
                self.kill(name)

        self.on_event = on_event

    async def submit(self, name: str, request_id: str) -> None:
        await self.launcher.send(name, Submit(Request(id=request_id, attempt=0, prompt_token_ids=(), max_tokens=1)))

    async def say_hello(self, name: str) -> None:
        """The process still responds."""
        await self.submit(name, "hello")
        await self.until(lambda: self.received(name, "done", "hello"))

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(60):
            while not condition():
                await asyncio.sleep(0.002)
                if self.launcher.failure is not None:
                    raise self.launcher.failure

    async def until_back(self, name: str, times: int = 1) -> None:
        await self.until(lambda: len(self.of(events.WorkerRestarted, name)) >= times)

    def of(self, kind: type, name: str) -> list[events.Event]:
        return [event for event in self.events if isinstance(event, kind) and getattr(event, "name", name) == name]

    def received(self, name: str, *words: str) -> list[str]:
        return [what for worker, what in self.notices if worker == name and what.split()[: len(words)] == list(words)]


@pytest.mark.parametrize("restarts", [0, 1])
async def test_drain_waits_for_no_group_that_is_down_or_loads(tmp_path: Path, restarts: int) -> None:
    nodes = [Node("slow.0", "source", "slow.0"), Node("server.0", "experts", "server.0")]
    settings = ReliabilitySettings(detector=False, restarts=restarts)
    graph = Graph.of(nodes, [Edge("slow.0", "y", "server.0", "x", transport="zmq")], reliability=settings, folder=str(tmp_path))
    async with Run(graph) as r:
        r.kill("slow.0")
        await r.until(lambda: r.of(events.WorkerGivenUp, "slow.0") or len(r.of(events.WorkerStarted, "slow.0")) == 2)
        async with asyncio.timeout(20):
            await r.launcher.drain()


async def test_killed_server_is_reported_and_restarted(loop_kind: str, tmp_path: Path) -> None:
    async with Run(graph_of(tmp_path, "server.0", "server.1")) as r:
        pid, incarnation = r.kill("server.0")
        await r.until_back("server.0")
        assert r.launcher.pids["server.0"] != pid
        incarnation_now = r.launcher.incarnations["server.0"]
        assert incarnation_now != incarnation
        await r.until(lambda: all(r.received(client, "joined") for client in ("client.0", "client.1")))
        for client in ("client.0", "client.1"):
            notices = [what for worker, what in r.notices if worker == client and what.split()[0] in ("left", "joined")]
            assert notices == [f"left server.0 {incarnation}", f"joined server.0 {incarnation_now} fake://server.0/2"]
        assert not r.received("server.1", "left")  # no edge with it
        assert not r.received("server.1", "joined")
        peers = r.received("server.0", "peers")[-1]
        assert "server.0=fake://server.0/2" in peers
        assert "client.1=fake://client.1/1" in peers
        (lost,) = r.of(events.WorkerLost, "server.0")
        assert lost == events.WorkerLost("server.0", "was killed by SIGKILL")
        (back,) = r.of(events.WorkerRestarted, "server.0")
        assert isinstance(back, events.WorkerRestarted)
        assert back.pid == r.launcher.pids["server.0"]
        await r.say_hello("server.0")
        found = await r.launcher.statistics()
        assert (found["server.0"].num_firings, found["server.0"].num_restarts) == (20, 1)
        assert (found["server.1"].num_firings, found["server.1"].num_restarts) == (10, 0)
        r.kill("server.0")
        await r.until_back("server.0", 2)
        final = await r.launcher.stop()
        assert (final["server.0"].num_firings, final["server.0"].num_restarts) == (20 + 30, 2)
        assert final["server.0"].resident_bytes == 3  # of the last incarnation
    assert not r.of(events.Straggler, "server.0")


async def test_exit_is_reported_while_the_fork_server_is_blocked(tmp_path: Path) -> None:
    async with Run(graph_of(tmp_path, "server.0")) as r:
        with held(r.launcher):
            _, incarnation = r.kill("server.0")
            await r.until(lambda: r.received("client.0", "left", "server.0", incarnation) and r.received("client.1", "left"))
            await r.until(lambda: r.of(events.WorkerLost, "server.0"))
        await r.until_back("server.0")
        assert not r.of(events.ForkServerLost, "server.0")


async def test_several_die_at_once(tmp_path: Path) -> None:
    names = [f"server.{number}" for number in range(4)]
    async with Run(graph_of(tmp_path, *names)) as r:
        dead = {name: r.kill(name)[1] for name in names}
        for name in names:
            await r.until_back(name)
        await r.until(lambda: len(r.received("client.0", "joined")) == len(names))
        for name in names:
            assert r.received("client.0", "left", name) == [f"left {name} {dead[name]}"]
            assert r.received("client.0", "joined", name) == [f"joined {name} {r.launcher.incarnations[name]} fake://{name}/2"]


async def test_a_death_during_a_restart(tmp_path: Path) -> None:
    async with Run(graph_of(tmp_path, "shaky.0", "server.1")) as r:
        r.kill("shaky.0")
        await r.until_back("shaky.0")  # its second incarnation ended while it was loading
        assert len(r.of(events.WorkerLost, "shaky.0")) == 2
        await r.until(lambda: r.received("client.0", "joined", "shaky.0", r.launcher.incarnations["shaky.0"]))
        r.kill_second("server.1")
        r.kill("server.1")
        await r.until_back("server.1")
        assert len(r.of(events.WorkerLost, "server.1")) == 2
        await r.say_hello("server.1")


async def test_one_that_dies_again_and_again_stays_down(tmp_path: Path) -> None:
    async with Run(graph_of(tmp_path, "frail.0", "server.1")) as r:
        r.kill("frail.0")
        await r.until(lambda: r.of(events.WorkerGivenUp, "frail.0"))
        (down,) = r.of(events.WorkerGivenUp, "frail.0")
        assert events.news(down) == "frail.0 stays down: it was started again 3 times in 30 s; the next try is in 30 s"
        assert len(r.of(events.WorkerLost, "frail.0")) == 4
        with pytest.raises(NotRunningError, match=r"frail\.0 has stopped"):
            await r.submit("frail.0", "hello")
        assert (await r.launcher.statistics())["frail.0"].num_restarts == 0
        await r.say_hello("server.1")  # the run goes on
        assert set(await r.launcher.stop()) == {"client.0", "client.1", "frail.0", "server.1"}
    assert not [event for event in r.events if isinstance(event, events.Straggler | events.RunFailed)]


async def test_one_that_was_given_up_is_tried_again_later(tmp_path: Path) -> None:
    r = Run(graph_of(tmp_path, "server.0", settings=ReliabilitySettings(detector=False, restarts=1, restart_window_seconds=3.0)))
    r.kill_second("server.0")
    async with r.launcher as launcher:
        r.kill("server.0")
        await r.until(lambda: r.of(events.WorkerGivenUp, "server.0"))
        why = "it was started again once in 3 s; the next try is in 3 s"
        assert f"server.0 stays down: {why}" in launcher.health_record.health().warnings
        await r.until_back("server.0")
        assert launcher.health_record.health().warnings == ()
        await r.say_hello("server.0")


async def test_earlier_incarnation_leaves_nothing_in_the_launcher(tmp_path: Path) -> None:
    async with Run(graph_of(tmp_path, "server.0", settings=ReliabilitySettings(detector=False, restarts=100))) as r:
        held_then: list[int] = []
        for times in range(1, 6):
            r.kill("server.0")
            await r.until_back("server.0", times)
            held_then.append(len(open_fds()))
            tasks = len(asyncio.all_tasks())
            if times == 1:
                first_tasks = tasks
        assert len(set(held_then)) == 1
        assert tasks == first_tasks


async def test_a_budget_of_none(tmp_path: Path) -> None:
    async with Run(graph_of(tmp_path, "server.0", "server.1", settings=ReliabilitySettings(detector=False, restarts=0))) as r:
        r.kill("server.0")
        await r.until(lambda: r.of(events.WorkerGivenUp, "server.0"))
        await r.until(lambda: r.received("client.0", "left", "server.0"))


@pytest.mark.parametrize(
    ("victim", "options"),
    [
        ("client.0", {}),
        ("server.0", {"settings": ReliabilitySettings(recovery="off")}),
        ("server.0", {"processes": 1}),  # shares its process with the clients
    ],
    ids=["a client", "no failover", "a process shared"],
)
async def test_other_deaths_end_the_run(tmp_path: Path, victim: str, options: dict[str, object]) -> None:
    r = Run(graph_of(tmp_path, "server.0", "server.1", **options))  # type: ignore[arg-type]

    async def live() -> None:
        async with r.launcher as launcher:
            r.kill(victim)
            await launcher.wait_failed()

    with pytest.raises(WorkerDiedError, match="was killed by SIGKILL"):
        await live()
    assert not r.of(events.WorkerLost, victim)


async def test_servers_that_share_a_process_come_back_together(tmp_path: Path) -> None:
    r = Run(graph_of(tmp_path, "server.0", "server.1", "server.2", clients=1, processes=2))  # client.0 + server.1, server.0 + server.2
    async with r.launcher as launcher:
        pid, _ = r.kill("server.0")
        await r.until_back("server.0")
        await r.until_back("server.2")
        assert launcher.pids["server.0"] == launcher.pids["server.2"] != pid
        await r.until(lambda: len(r.received("client.0", "left")) == len(r.received("client.0", "joined")) == 2)


async def test_stop_while_one_is_started_again(tmp_path: Path) -> None:
    async with Run(graph_of(tmp_path, "slow.0", "server.1"), stop_seconds=30.0) as r:
        r.kill("slow.0")
        await r.until(lambda: len(r.of(events.WorkerStarted, "slow.0")) == 2)
        final = await r.launcher.stop()
        assert final["server.1"].num_firings == 10
    assert not [event for event in r.events if isinstance(event, events.Straggler | events.RunFailed)]


@pytest.mark.parametrize("turns", range(0, 12, 2))
async def test_stop_at_any_moment_of_a_death(tmp_path: Path, turns: int) -> None:
    async with Run(graph_of(tmp_path, "server.0", "server.1")) as r:
        r.kill("server.0")
        await asyncio.sleep(turns * 0.002)
        await r.launcher.stop()
    assert not [event for event in r.events if isinstance(event, events.Straggler | events.RunFailed)]


async def test_leaving_in_haste_while_one_is_started_again(tmp_path: Path) -> None:
    r = Run(graph_of(tmp_path, "slow.0"))

    async def live() -> None:
        async with r.launcher:
            r.kill("slow.0")
            await r.until(lambda: len(r.of(events.WorkerStarted, "slow.0")) == 2)
            raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"):
        await live()


@pytest.mark.parametrize("is_late", [False, True])
async def test_failed_server_is_restarted_and_its_reason_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_late: bool) -> None:
    """Also when the reason is read after the exit notice."""
    monkeypatch.setattr(deaths, "LAST_MESSAGES_SECONDS", 30.0)
    async with Run(graph_of(tmp_path, "server.0")) as r:
        line = r.launcher.workers["server.0"]
        recv = line._control.recv

        async def recv_late() -> object:
            message = await recv()
            await asyncio.sleep(0.1)
            return message

        if is_late:
            monkeypatch.setattr(line._control, "recv", recv_late)
            await r.submit("server.0", "heartbeat")  # worker listens already is in the recv of before
            await r.until(lambda: r.launcher.health_record.heartbeat_age("server.0") is not None)
        await r.submit("server.0", "fail")
        await r.until_back("server.0")
        assert r.of(events.WorkerLost, "server.0") == [
            events.WorkerLost("server.0", "failed: broken teapot; exited with status 0", may_recur=True),
        ]


async def test_one_that_hangs_up_without_ending_is_killed(tmp_path: Path) -> None:
    async with Run(graph_of(tmp_path, "server.0")) as r:
        await r.submit("server.0", "hang up")
        await r.until(lambda: r.received("client.0", "left", "server.0"))
        await r.until_back("server.0")
        assert r.of(events.WorkerLost, "server.0") == [events.WorkerLost("server.0", "was killed by SIGKILL")]


async def test_server_that_lost_a_client_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deaths, "EXPLAINED_SECONDS", 0.05)
    async with Run(graph_of(tmp_path, "server.0", "server.1")) as r:
        former = r.launcher.incarnations["server.0"]
        await r.submit("client.0", "lost server.0")
        await r.until_back("server.0")
        (lost,) = r.of(events.WorkerLost, "server.0")
        assert isinstance(lost, events.WorkerLost)
        assert lost.how == "has lost its link to client.0 (it broke); was killed by SIGKILL"
        await r.submit("client.0", f"lost server.0 {former}")  # a late report about the former incarnation
        await r.submit("server.1", "lost client.1")
        await r.until_back("server.1")
        assert len(r.of(events.WorkerLost, "server.0")) == 1


async def test_a_link_lost_to_a_process_that_ends_costs_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last message of a process that is killed may be that it has lost a link."""
    monkeypatch.setattr(deaths, "EXPLAINED_SECONDS", 0.3)
    async with Run(graph_of(tmp_path, "server.0", "server.1")) as r:
        kept = r.launcher.incarnations["server.1"]
        await r.submit("server.0", "lost server.1")
        await r.until(lambda: r.received("server.0", "done"))
        r.kill("server.0")
        decided = asyncio.get_running_loop().time() + 0.3
        await r.until_back("server.0")
        await r.until(lambda: asyncio.get_running_loop().time() > decided)
        await r.say_hello("server.1")
        assert r.launcher.incarnations["server.1"] == kept
        assert r.of(events.WorkerLost, "server.1") == []


class Monitored(Run):
    def __init__(self, folder: Path, *servers: str) -> None:
        super().__init__(graph_of(folder, *servers, settings=ReliabilitySettings()))
        self.folder = folder

    def received_by_monitor(self, number: int = 1) -> list[str]:
        path = self.folder / f"received {number}"
        return path.read_text().splitlines() if path.exists() else []

    async def until_monitor_receives(self, *words: str, number: int = 1) -> str:
        def found() -> list[str]:
            return [line for line in self.received_by_monitor(number) if all(word in line for word in words)]

        await self.until(found)
        return found()[0]


@pytest.fixture
def fake_monitor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_pool, "MONITOR_ENTRY", "launcher.mortal_workers:run_monitor")


@pytest.mark.usefixtures("fake_monitor")
async def test_monitor_receives_incarnations_and_heartbeats(tmp_path: Path) -> None:
    async with Monitored(tmp_path, "server.0") as r:
        for name in ("client.0", "client.1", "server.0"):
            await r.until_monitor_receives("PeerJoined", f'"{name}"', r.launcher.incarnations[name])
        await r.submit("server.0", "heartbeat")
        heartbeat = await r.until_monitor_receives("Heartbeat", '"process":"server.0"', r.launcher.incarnations["server.0"])
        assert '"lag_seconds":0.5' in heartbeat
        await r.submit("client.1", "late server.0")
        await r.until_monitor_receives("LateResponse", '"process":"server.0"', '"by":"client.1"')
        _, incarnation = r.kill("server.0")
        await r.until_monitor_receives("PeerLeft", '"server.0"', incarnation)
        await r.until_back("server.0")
        await r.until_monitor_receives("PeerJoined", '"server.0"', r.launcher.incarnations["server.0"])
        assert MONITOR not in await r.launcher.statistics()
        assert not r.of(events.WorkerStarted, MONITOR)


@pytest.mark.usefixtures("fake_monitor")
async def test_incarnation_marked_dead_is_killed_and_no_later_one(tmp_path: Path) -> None:
    async with Monitored(tmp_path, "server.0") as r:
        former = r.launcher.incarnations["server.0"]
        os.kill(r.launcher.pids["server.0"], signal.SIGSTOP)
        (tmp_path / "verdict").write_text(f"dead server.0 {former}")
        await r.until_back("server.0")
        await r.until(lambda: r.received("client.0", "joined"))
        assert r.received("client.0", "left") == [f"left server.0 {former}"]
        assert r.of(events.WorkerLost, "server.0") == [
            events.WorkerLost("server.0", "was marked dead (no sign of it); was killed by SIGKILL", may_recur=True),
        ]
        (tmp_path / "verdict").write_text(f"dead server.0 {former}")  # that incarnation has ended: no effect
        await r.until(lambda: not (tmp_path / "verdict").exists())
        (tmp_path / "verdict").write_text(f"suspect server.0 {r.launcher.incarnations['server.0']}")
        await r.until(lambda: r.of(events.WorkerSuspected, "server.0"))
        (tmp_path / "verdict").write_text(f"dead client.0 {r.launcher.incarnations['client.0']}")
        await r.until(lambda: r.of(events.WorkerMarkedDead, "client.0"))
        assert r.of(events.WorkerMarkedDead, "client.0") == [
            events.WorkerMarkedDead("client.0", "no sign of it", is_killed=False, may_recur=True)
        ]
        await r.say_hello("client.0")
        assert len(r.of(events.WorkerLost, "server.0")) == 1


@pytest.mark.usefixtures("fake_monitor")
async def test_run_continues_without_its_monitor_and_the_next_one_receives_all(tmp_path: Path) -> None:
    async with Monitored(tmp_path, "server.0") as r:
        await r.until_monitor_receives("PeerJoined", '"server.0"')
        r.kill(MONITOR)
        await r.until_back(MONITOR)
        for name in ("client.0", "client.1", "server.0"):
            await r.until_monitor_receives("PeerJoined", f'"{name}"', r.launcher.incarnations[name], number=2)
        for times in (2, 3):
            r.kill(MONITOR)
            await r.until_back(MONITOR, times)
        r.kill(MONITOR)
        await r.until(lambda: r.of(events.WorkerGivenUp, MONITOR))
        r.kill("server.0")
        await r.until_back("server.0")
        assert MONITOR not in await r.launcher.stop()
    assert not r.of(events.RunFailed, MONITOR)


@pytest.mark.usefixtures("fake_monitor")
async def test_stop_while_the_monitor_is_started(tmp_path: Path) -> None:
    async with Monitored(tmp_path, "server.0") as r:
        await r.launcher.stop()
    assert not [event for event in r.events if isinstance(event, events.Straggler | events.RunFailed)]


@pytest.mark.usefixtures("fake_monitor")
@pytest.mark.parametrize("settings", [ReliabilitySettings(detector=False), ReliabilitySettings(recovery="off")])
async def test_no_monitor_where_none_is_wanted(tmp_path: Path, settings: ReliabilitySettings) -> None:
    async with Run(graph_of(tmp_path, "server.0", settings=settings)) as r:
        assert set(r.launcher.pids) == {"client.0", "client.1", "server.0"}
    assert not (tmp_path / MONITOR).exists()


def test_news_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    events.print_news(events.WorkerLost("experts.1", "was killed by SIGKILL"))
    events.print_news(events.WorkerStarted("experts.1", 3))
    events.print_news(events.WorkerRestarted("experts.1", 3, 0.612))
    assert capsys.readouterr().err.splitlines() == [
        "flowrt: experts.1 was killed by SIGKILL; the run goes on without it",
        "flowrt: experts.1 is back after 0.61 s, pid 3",
    ]
