"""Runs with drawn deaths, changes of the graph and orders of all messages and notices: each settles, and every worker knows its peers."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from random import Random
from typing import Any

import pytest
from launcher.run_driver import KILLED, Driver
from launcher.test_recovery_policy import graph_of

from flowrt.actors.control import (
    ChangeGraph,
    Connected,
    Control,
    DeathCause,
    GraphChanged,
    LinkLost,
    Listening,
    PeerJoined,
    PeerLeft,
    Peers,
    Stop,
)
from flowrt.errors import WorkerDiedError
from flowrt.graph import delta
from flowrt.graph.model import FORK_SERVER, Edge, Graph, Node
from flowrt.graph.recovery import neighbours
from flowrt.launcher import events
from flowrt.launcher.actions import Action, Announce, End, EndProcess, Send, SendStart, StartForkServer, StartProcess
from flowrt.launcher.run_table import ProcessPhase
from flowrt.processes.output_tail import exit_text

NUM_RUNS = 80
FAILED_ONCE = (328,)
MAX_ACTIONS = 5000
SOON_SECONDS = 0.8  # a timer may be this much sooner than what is under way
SETTLED_SECONDS = 3.0  # longer than the wait for a death that explains a lost link


class ToyProcess:
    """A process with one worker. `knows` are the incarnations of the peers that it uses."""

    def __init__(self, name: str, incarnation: str, graph: Graph) -> None:
        self.name, self.incarnation, self.graph, self.how = name, incarnation, graph, ""
        self.is_loaded = False
        self.inbox: deque[Control] = deque()
        self.outbox: deque[Control] = deque()
        self.unconfirmed: list[int] = []  # versions of the graph
        self.knows: dict[str, str] = {}
        self.ended: set[tuple[str, str]] = set()

    @property
    def near(self) -> Sequence[str]:
        return [*neighbours(self.graph).get(self.name, ())]

    def take(self) -> None:
        match self.inbox.popleft():
            case Peers(_, incarnations):
                self.knows = {name: each for name, each in incarnations.items() if name in self.near and (name, each) not in self.ended}
                self.outbox.append(Connected())
                self.unconfirmed += [self.graph.version] if self.graph.version else []
            case ChangeGraph(change):
                self.graph = delta.apply(self.graph, delta.from_json(change))
                self.knows = {name: each for name, each in self.knows.items() if name in self.near}
                self.unconfirmed.append(self.graph.version)
            case PeerLeft(name, incarnation):
                self.lose(name, incarnation)
            case PeerJoined(name, incarnation):
                if name in self.near and (name, incarnation) not in self.ended:
                    self.knows[name] = incarnation
            case DeathCause(name, incarnation):
                assert self.knows.get(name) != incarnation, "a cause of death before the notice of it"

    def lose(self, name: str, incarnation: str) -> None:
        self.ended.add((name, incarnation))
        if self.knows.get(name) == incarnation:
            del self.knows[name]


class DrawnRun:
    def __init__(self, random: Random, policy: str, num_fork_server_deaths: int = 0) -> None:
        self.num_fork_server_deaths, self.fork_server = num_fork_server_deaths, "up"
        self.random, self.policy, self.restarts = random, policy, random.choice((0, 1, 3, 9))
        groups, servers = ([f"{role}.{number}" for number in range(random.randint(1, 3))] for role in ("attention", "experts"))
        self.driver = Driver(self.graph_of(groups, servers), {name: [name] for name in (*groups, *servers)})
        self.state = self.driver.state
        self.living: dict[str, ToyProcess] = {}
        self.unnoticed: list[tuple[ToyProcess, str]] = []  # dead processes, and a kind of notice that has not come yet
        self.forking: list[str] = []
        self.stopping: list[str] = []
        self.lost: set[str] = set()
        self.is_ready = self.is_changing = False
        self.end: End | None = None
        self.num_deaths, self.num_changes, self.num_resets, self.num_refusals = (random.choice((0, 1, 2, 4)) for _ in range(4))
        self.next_name = 100
        self.do(self.state.start, self.driver.now)

    def graph_of(self, groups: Sequence[str], servers: Sequence[str]) -> Graph:
        nodes = [*(Node(name, "source", name) for name in groups), *(Node(name, "experts", name) for name in servers)]
        edges = [Edge(group, "y", server, "x", transport="zmq") for group in groups for server in servers]
        return Graph.of(nodes, edges, reliability=graph_of(self.policy, self.restarts).reliability)

    def play(self) -> None:
        for _ in range(MAX_ACTIONS):
            actions, deadline = [*self.actions()], self.state.deadline
            if not actions and (deadline is None or (self.is_settled() and deadline > self.driver.now + SETTLED_SECONDS)):
                return
            is_soon = deadline is not None and deadline <= self.driver.now + SOON_SECONDS
            if deadline is not None and (not actions or (is_soon and self.random.random() < 0.08)):
                self.driver.now = max(self.driver.now, deadline)
                self.do(self.state.on_time)
                continue
            action, *arguments = self.random.choice(actions)
            later = self.driver.now + self.random.choice((0.0, 1e-3, 1e-2))
            self.driver.now = later if deadline is None else min(later, max(self.driver.now, deadline))
            action(*arguments)
        raise AssertionError("it never settles")

    def is_settled(self) -> bool:
        return not self.is_changing and all(
            each.phase == ProcessPhase.UP or each.is_given_up for each in self.state.table.processes.values()
        )

    def actions(self) -> Iterator[tuple[Callable[..., None], *tuple[Any, ...]]]:
        yield from ((self.fork, name) for name in self.forking)
        yield from ((self.note_stop_sent, name) for name in self.stopping)
        for process in self.living.values():
            yield from [] if process.is_loaded else [(self.listen, process)]
            yield from [(self.take, process)] if process.inbox else []
            yield from ((self.confirm, process, version) for version in process.unconfirmed)
            yield from [(self.read, process)] if process.outbox else []
            if self.is_ready and self.num_deaths:
                yield self.crash, process
        for process, kind in self.unnoticed:
            yield (self.read, process) if kind == "close" and process.outbox else (self.notice, process, kind)
        if self.is_ready and self.num_changes and not self.is_changing:
            yield (self.change,)
        if self.is_ready and self.num_fork_server_deaths and self.fork_server == "up":
            yield (self.kill_fork_server,)
        if self.fork_server == "dead":
            yield (self.notice_fork_server,)
        if self.fork_server == "starting":
            yield (self.serve_forks,)
        if self.is_ready and self.num_resets and self.living:
            yield (self.reset,)

    def do(self, event: Callable[..., None], *arguments: object) -> None:
        for action in self.driver.do(event, *arguments):
            self.carry_out(action)

    def carry_out(self, action: Action) -> None:
        assert self.end is None, "an action after the end"
        match action:
            case StartProcess(name):
                assert name not in self.living
                assert name not in self.forking
                self.forking.append(name)
                self.lost.discard(name)
            case SendStart(name):
                self.living[name].graph = self.state.table.graph
            case Send(name, control):
                if name in self.living:
                    self.living[name].inbox.append(control)
                self.stopping += [name] if isinstance(control, Stop) else []
            case EndProcess(name) if name in self.living:
                self.die(self.living[name], exit_text(-9))
            case StartForkServer():
                assert self.fork_server == "lost"
                self.fork_server = "starting"
            case Announce(event):
                self.note(event)
            case End():
                self.end = action

    def note(self, event: events.Event) -> None:
        match event:
            case events.Ready():
                self.is_ready = True
            case events.ChangeEnded():
                self.is_changing = False
            case events.WorkerLost(name, how):
                assert name not in self.lost, "lost twice"
                self.lost.add(name)
                first = how.removeprefix("is restarted with ").partition(";")[0]
                in_unit = [
                    each for each in (name, first) if each in self.state.table.processes and not self.state.table.processes[each].is_leaving
                ]
                assert first == how.partition(";")[0] or len(in_unit) < 2 or first in self.lost, f"{name} was lost before {first}"

    def kill_fork_server(self) -> None:
        self.num_fork_server_deaths -= 1
        self.fork_server = "dead"

    def notice_fork_server(self) -> None:
        self.fork_server = "lost"
        self.do(self.state.deaths.on_fork_server_lost, KILLED)

    def serve_forks(self) -> None:
        if self.random.random() < 0.2:
            self.fork_server = "lost"
            return self.do(self.state.starts.on_fork_server_failed, WorkerDiedError(FORK_SERVER, KILLED))
        self.fork_server = "up"
        return self.do(self.state.starts.on_fork_server_ready, 5)

    def fork(self, name: str) -> None:
        self.forking.remove(name)
        if self.fork_server != "up":
            return self.do(self.state.deaths.on_fork_failed, name, WorkerDiedError(FORK_SERVER, KILLED))
        if self.is_ready and self.num_refusals and self.random.random() < 0.3:
            self.num_refusals -= 1
            return self.do(self.state.deaths.on_fork_failed, name, WorkerDiedError(name, "could not be forked"))
        self.living[name] = ToyProcess(name, self.state.incarnations[name], self.state.table.graph)
        return self.do(self.state.on_forked, name, 7)

    def note_stop_sent(self, name: str) -> None:
        self.stopping.remove(name)
        self.do(self.state.on_stop_sent, name)

    def listen(self, process: ToyProcess) -> None:
        process.is_loaded = True
        process.outbox.append(Listening({"zmq": process.incarnation}))

    def take(self, process: ToyProcess) -> None:
        if isinstance(process.inbox[0], Stop):
            return self.die(process, exit_text(0))
        return process.take()

    def confirm(self, process: ToyProcess, version: int) -> None:
        process.unconfirmed.remove(version)
        process.outbox.append(GraphChanged(version))

    def read(self, process: ToyProcess) -> None:
        control = process.outbox.popleft()
        if not self.state.is_current(process.name, process.incarnation):
            return
        match control:
            case GraphChanged(version):
                self.do(self.state.change.on_changed, process.name, version)
            case Listening():
                self.do(self.state.on_listening, process.name, control)
            case Connected():
                self.do(self.state.on_connected, process.name)
            case LinkLost():
                self.do(self.state.deaths.on_link_lost, process.name, control)

    def crash(self, process: ToyProcess) -> None:
        self.num_deaths -= 1
        self.die(process, exit_text(self.random.choice((-9, -11))))

    def die(self, process: ToyProcess, how: str) -> None:
        del self.living[process.name]
        process.how = how
        notices = ["close", "exit", *(["dying"] if self.random.random() < 0.6 else [])]
        self.unnoticed += [(process, kind) for kind in notices]

    def notice(self, process: ToyProcess, kind: str) -> None:
        self.unnoticed.remove((process, kind))
        if process.name not in self.state.table.processes:
            return
        match kind:
            case "close":
                self.do(self.state.deaths.on_connection_closed, process.name)
            case "exit":
                self.unnoticed = [each for each in self.unnoticed if each != (process, "dying")]
                self.do(self.state.deaths.on_exited, process.name, process.how)
            case _:
                self.do(self.state.deaths.on_dying, process.name, process.how if self.random.random() < 0.7 else "")

    def reset(self) -> None:
        """A link is lost, which both ends report."""
        self.num_resets -= 1
        process = self.random.choice([*self.living.values()])
        for peer in self.random.sample(sorted(process.knows), min(1, len(process.knows))):
            other, incarnation = self.living.get(peer), process.knows[peer]
            process.lose(peer, incarnation)
            process.outbox.append(LinkLost(peer, "it broke", incarnation))
            if other is not None and other.incarnation == incarnation and other.knows.get(process.name) == process.incarnation:
                other.lose(process.name, process.incarnation)
                other.outbox.append(LinkLost(process.name, "it broke", process.incarnation))

    def change(self) -> None:
        self.num_changes -= 1
        graph = self.state.table.graph
        names = {role: [name for name in graph.process_names() if name.startswith(role)] for role in ("attention", "experts")}
        for _ in range(self.random.choice((1, 1, 2))):
            role = self.random.choice([*names])
            if self.random.random() < 0.5:
                names[role].append(f"{role}.{self.next_name}")
                self.next_name += 1
            elif len(names[role]) > 1:
                names[role].remove(self.random.choice(names[role]))
        target = self.graph_of(*names.values())
        if {*target.process_names()} != {*graph.process_names()}:
            self.is_changing = True
            self.do(self.state.change.begin, target.replace(version=graph.version))

    def check(self) -> None:
        table = self.state.table
        assert self.end is None, f"the run ended: {self.end}"
        assert {*table.processes} == {*table.graph.process_names()}
        assert not table.graph.leaving
        for process in self.living.values():
            assert process.graph.version == table.graph.version
            for name in process.near:
                if table.processes[name].phase == ProcessPhase.UP:
                    assert process.knows.get(name) == table.workers[name].incarnation, f"{process.name} does not know {name}"


@pytest.mark.parametrize("policy", ["fine", "restart_role", "restart_all"])
def test_runs_settle_and_all_workers_know_their_peers(policy: str) -> None:
    for seed in (*range(NUM_RUNS), *FAILED_ONCE):
        run = DrawnRun(Random(seed), policy)
        try:
            run.play()
            run.check()
        except Exception as error:
            error.add_note(f"seed {seed}")
            raise


@pytest.mark.parametrize("policy", ["fine", "restart_role", "restart_all"])
def test_no_process_is_forgotten_when_fork_servers_die(policy: str) -> None:
    for seed in range(NUM_RUNS):
        run = DrawnRun(Random(f"fork servers {seed}"), policy, num_fork_server_deaths=1 + seed % 3)
        try:
            run.play()
            run.check()
            assert run.is_settled()
        except Exception as error:
            error.add_note(f"seed {seed}")
            raise
