"""The recovery policies: which processes are restarted with one that dies, in which order, and at whose cost."""

from __future__ import annotations

from collections.abc import Sequence
from unittest.mock import Mock

import pytest
from launcher.run_driver import KILLED, Driver, announced

from flowrt.actors.control import DeathCause, Listening, PeerLeft, Peers
from flowrt.graph import recovery
from flowrt.graph.kinds import Keeps
from flowrt.graph.model import MONITOR, Edge, Graph, Node
from flowrt.graph.settings import ReliabilitySettings
from flowrt.launcher import events
from flowrt.launcher.actions import Action, End, EndProcess, Send, StartProcess
from flowrt.launcher.deaths import FENCE_SECONDS, REAP_SECONDS
from flowrt.launcher.run import apply_group_change
from flowrt.processes.output_tail import exit_text

GROUPS, SERVERS = ("attention.0", "attention.1"), ("experts.0", "experts.1")
WORKERS = (*GROUPS, *SERVERS)


def graph_of(policy: str, restarts: int = 3, detector: bool = False) -> Graph:
    nodes = [Node(name, "source", name) for name in GROUPS] + [Node(name, "experts", name) for name in SERVERS]
    edges = [Edge(group, "y", server, "x", transport="zmq") for group in GROUPS for server in SERVERS]
    settings = ReliabilitySettings(detector=detector, recovery=policy, restarts=restarts)  # type: ignore[arg-type]
    return Graph.of(nodes, edges, reliability=settings)


class Run(Driver):
    """A run of two groups and two servers that has begun."""

    def __init__(self, policy: str, restarts: int = 3, packed: dict[str, list[str]] | None = None, detector: bool = False) -> None:
        super().__init__(graph_of(policy, restarts, detector), packed, names=WORKERS)
        self.begin()
        self.first = self.state.incarnations

    def listen(self, *names: str) -> list[Action]:
        actions = [action for name in names for action in self.do(self.state.on_listening, name, Listening({"zmq": name}))]
        return actions + [action for name in names for action in self.do(self.state.on_connected, name)]

    def end(self, process: str) -> list[Action]:
        """The process has ended, and its connections with it; then every timer that is due now."""
        actions = self.do(self.state.deaths.on_exited, process, KILLED)
        for worker in self.processes.get(process, [process]):
            actions += self.do(self.state.deaths.on_connection_closed, worker)
        return actions + self.pass_time(0)

    def return_(self, *names: str) -> list[Action]:
        """Their next incarnations are forked, listen and are connected."""
        for name in names:
            self.do(self.state.on_forked, name, 8)
        return self.listen(*names)

    @property
    def renewed(self) -> set[str]:
        return {name for name, incarnation in self.state.incarnations.items() if incarnation != self.first.get(name)}


@pytest.fixture
def run() -> Run:
    return Run("restart_all")


def killed(actions: Sequence[Action]) -> list[str]:
    return [action.process for action in actions if isinstance(action, EndProcess)]


def started(actions: Sequence[Action]) -> list[str]:
    return [action.process for action in actions if isinstance(action, StartProcess)]


@pytest.mark.parametrize("victim", WORKERS)
@pytest.mark.parametrize("policy", ["fine", "restart_role", "restart_all"])
def test_processes_that_each_policy_restarts(policy: str, victim: str) -> None:
    """The others are killed at the first sign of the death, and all start again when all have ended."""
    run = Run(policy)
    role = GROUPS if victim in GROUPS else SERVERS
    together = {"fine": (victim,), "restart_role": role, "restart_all": WORKERS}[policy]
    others = [name for name in together if name != victim]
    assert killed(run.do(run.state.deaths.on_dying, victim, "")) == others
    assert started(run.end(victim)) == ([] if others else [victim])
    for number, other in enumerate(others):
        assert sorted(started(run.end(other))) == (sorted(together) if number == len(others) - 1 else [])
    back = announced(run.return_(*together))
    assert [event.name for event in back if isinstance(event, events.WorkerRestarted)] == list(together)
    assert run.renewed == set(together)
    assert all(map(run.state.is_usable, WORKERS))
    assert run.state.restarting() == []


def test_only_the_processes_that_the_policy_kills_end_on_purpose() -> None:
    """The loss of any other process counts against the requests that had parts there."""
    run = Run("restart_role")
    actions = run.end(SERVERS[0]) + run.end(SERVERS[1])
    sent = [action.control for action in actions if isinstance(action, Send) and action.worker == GROUPS[0]]
    causes = [(control.process, control.is_on_purpose) for control in sent if isinstance(control, DeathCause)]
    assert causes == [(SERVERS[0], False), (SERVERS[1], True)]


def test_processes_of_a_lower_rank_start_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """As decode before prefill; here the groups take the place of prefill workers."""
    monkeypatch.setitem(recovery.RULES, Keeps.SEQUENCES, recovery.Rule("sequences", "", recovery.Recovery.REPLAY, "", restart_rank=1))
    for first in ("attention.0", "experts.1"):
        run = Run("restart_all")
        order = [first, *(name for name in WORKERS if name != first)]
        actions = [action for name in order for action in run.end(name)]
        assert [set(started(actions)[:2]), set(started(actions)[2:])] == [set(SERVERS), set(GROUPS)]


def test_one_incident_costs_one_restart(run: Run) -> None:
    """Ten deaths of others cost a process none of its own three restarts."""
    for victim in (*GROUPS, *SERVERS, *GROUPS, *SERVERS, *GROUPS):
        actions = run.end(victim) + [action for name in WORKERS if name != victim for action in run.end(name)]
        actions += run.pass_time(1.0)  # the second restart of a process is delayed
        assert sorted(started(actions)) == list(WORKERS)
        assert not [event for event in announced(actions) if isinstance(event, events.WorkerGivenUp)]
        run.return_(*WORKERS)


def test_a_process_that_has_used_up_its_restarts_stays_down_and_the_others_return() -> None:
    run = Run("restart_all", restarts=1)
    for victim in ("experts.0", "experts.0"):
        actions = [action for name in (victim, *(name for name in WORKERS if name != victim)) for action in run.end(name)]
        run.return_(*started(actions))
    assert run.state.restarting() == []
    assert not run.state.is_usable("experts.0")
    assert all(map(run.state.is_usable, (*GROUPS, "experts.1")))


def test_a_second_death_while_the_others_end_changes_nothing(run: Run) -> None:
    run.do(run.state.deaths.on_dying, "experts.0", "")
    assert killed(run.do(run.state.deaths.on_dying, "attention.1", "")) == []
    actions = [action for name in WORKERS for action in run.end(name)]
    assert sorted(started(actions)) == list(WORKERS)
    assert not [event for event in announced(actions) if isinstance(event, events.WorkerLost) and event.may_recur]


@pytest.mark.parametrize("victim", ["experts.0", "attention.0"])
def test_a_process_that_dies_while_it_starts_is_restarted_alone(victim: str, run: Run) -> None:
    for name in WORKERS:
        run.end(name)
    run.return_(*(name for name in WORKERS if name != victim))
    run.do(run.state.on_forked, victim, 9)
    actions = run.end(victim) + run.pass_time(1.0)
    assert killed(actions) == []
    assert started(actions) == [victim]
    run.return_(victim)
    assert all(map(run.state.is_usable, WORKERS))


def test_a_death_kills_no_process_that_starts(run: Run) -> None:
    for name in WORKERS:
        run.end(name)
    run.return_("experts.1", "attention.0")
    for name in ("experts.0", "attention.1"):
        run.do(run.state.on_forked, name, 9)
    assert killed(run.do(run.state.deaths.on_dying, "experts.1", "")) == ["attention.0"]
    assert started([*run.end("experts.1"), *run.end("attention.0"), *run.pass_time(1.0)]) == ["attention.0", "experts.1"]


def test_a_stop_during_the_restart_starts_nothing_and_ends_the_run() -> None:
    for num_ended in range(len(WORKERS) + 1):
        run = Run("restart_all")
        run.do(run.state.deaths.on_dying, "experts.0", "")
        for name in WORKERS[:num_ended]:
            run.end(name)
        actions = run.do(run.state.stop)
        for name in WORKERS:
            actions += run.do(run.state.on_forked, name, 9) if num_ended == len(WORKERS) else []
            actions += run.end(name)
        actions += run.pass_time(30.0)
        assert started(actions) == []
        assert [action for action in actions if isinstance(action, End)] == [End()]


def test_a_process_that_does_not_end_keeps_the_others_waiting_for_a_limited_time() -> None:
    run = Run("restart_role")
    run.end("experts.0")
    assert started(run.pass_time(REAP_SECONDS - 0.1)) == []
    assert started(run.pass_time(0.2)) == ["experts.0"]
    assert started(run.end("experts.1")) == ["experts.1"]


def test_without_restarts_no_other_process_is_killed() -> None:
    run = Run("restart_all", restarts=0)
    assert killed(run.do(run.state.deaths.on_dying, "experts.0", "")) == []
    (lost, _) = announced(run.end("experts.0"))
    assert isinstance(lost, events.WorkerLost)
    assert not lost.is_restarting


def test_the_monitor_is_restarted_alone_and_with_no_other() -> None:
    run = Run("restart_all", detector=True)
    run.return_(MONITOR)
    assert killed(run.do(run.state.deaths.on_dying, "experts.0", "")) == [*GROUPS, "experts.1"]
    assert killed(run.do(run.state.deaths.on_dying, MONITOR, "")) == []


def test_a_shared_process_has_the_role_of_the_worker_with_the_most_state() -> None:
    run = Run(
        "restart_role",
        packed={"attention.0+experts.0": ["attention.0", "experts.0"], "attention.1": ["attention.1"], "experts.1": ["experts.1"]},
    )
    assert killed(run.do(run.state.deaths.on_dying, "attention.1", "")) == ["attention.0+experts.0"]
    assert killed(run.do(run.state.deaths.on_dying, "experts.1", "")) == []


def test_a_worker_that_is_killed_on_purpose_is_not_blamed(run: Run) -> None:
    crash = run.do(run.state.deaths.on_exited, "attention.0", exit_text(-11)) + run.do(run.state.deaths.on_connection_closed, "attention.0")
    lost = [event for event in announced([*crash, *run.end("attention.1")]) if isinstance(event, events.WorkerLost)]
    assert [(event.name, event.may_recur, event.is_restarting) for event in lost] == [
        ("attention.0", True, True),
        ("attention.1", False, True),
    ]
    assert lost[1].how == f"is restarted with attention.0; {KILLED}"


@pytest.mark.parametrize("victim", WORKERS)
def test_the_loss_of_the_process_that_died_by_itself_is_announced_first(victim: str) -> None:
    """Also when its exit status is known last, or not in time: else what it crashed over would have moved before it is suspected."""
    others = [name for name in WORKERS if name != victim]
    for ends in (True, False):
        run = Run("restart_all")
        actions = run.do(run.state.deaths.on_dying, victim, "")
        for name in others:
            actions += run.end(name)
        assert not [event for event in announced(actions) if isinstance(event, events.WorkerLost)]
        actions = run.end(victim) if ends else run.pass_time(FENCE_SECONDS)
        lost = [event.name for event in announced(actions) if isinstance(event, events.WorkerLost)]
        assert lost[0] == victim
        assert sorted(lost[1:]) == others


def test_the_others_wait_for_no_announcement_of_a_process_that_leaves_the_graph() -> None:
    """They are restarted without it: an announcement that is held would fence their next incarnations."""
    run = Run("restart_role")
    run.do(run.state.deaths.on_dying, SERVERS[0], "")
    run.end(SERVERS[1])
    graph = run.state.table.graph
    nodes = {name: node for name, node in graph.nodes.items() if name != SERVERS[0]}
    edges = {name: edge for name, edge in graph.edges.items() if edge.target != SERVERS[0]}
    actions = run.do(run.state.change.begin, graph.replace(nodes=nodes, edges=edges)) + run.pass_time(0)
    assert [event.name for event in announced(actions) if isinstance(event, events.WorkerLost)] == [SERVERS[1]]
    assert started(actions) == [SERVERS[1]]
    lost = [event.name for event in announced(run.end(SERVERS[0])) if isinstance(event, events.WorkerLost)]
    assert lost == [SERVERS[0]]


@pytest.mark.parametrize("hangs", [True, False])
def test_requests_of_a_group_that_hangs_and_is_not_killed_are_suspects(hangs: bool) -> None:
    requests = Mock()
    apply_group_change(events.WorkerMarkedDead("attention.0", "no progress", is_killed=False, may_recur=hangs), requests)
    requests.lose_group.assert_called_once_with("attention.0", "was marked dead: no progress", may_recur=hangs, is_alive=True)


@pytest.mark.parametrize(("policy", "ends_groups"), [("fine", False), ("restart_role", False), ("restart_all", True)])
def test_loss_of_a_server_reports_whether_groups_end_with_it(policy: str, ends_groups: bool) -> None:
    run = Run(policy)
    crash = run.do(run.state.deaths.on_exited, "experts.0", exit_text(-11)) + run.do(run.state.deaths.on_connection_closed, "experts.0")
    (lost,) = [event for event in announced(crash) if isinstance(event, events.WorkerLost)]
    assert (lost.name, lost.may_recur, lost.ends_groups) == ("experts.0", True, ends_groups)


def test_groups_learn_which_servers_are_restarted_on_purpose() -> None:
    """PeerLeft when they die, Peers for a group that starts meanwhile, and PeerLeft again for a server that is given up."""
    run = Run("restart_all", restarts=1)
    run.end("experts.0")
    actions = [action for name in ("attention.0", "attention.1", "experts.1") for action in run.end(name)]
    actions += run.return_("attention.0")
    (peers,) = [action.control for action in actions if isinstance(action, Send) and isinstance(action.control, Peers)]
    assert sorted(peers.restarting) == ["attention.1", *SERVERS]
    run.do(run.state.on_forked, "experts.0", 8)
    left = [a.control for a in run.end("experts.0") if isinstance(a, Send) and a.worker == "attention.0"]
    assert [(each.process, each.is_restarting) for each in left if isinstance(each, PeerLeft)] == [
        ("experts.0", True),
        ("experts.0", False),
    ]
