"""Which expert servers a client may use: each event and the state that follows, and the tables that follow from the states."""

import pytest

from flowrt.exchange import servers as servers_module
from flowrt.exchange.servers import AVOIDED_SECONDS, CAUSE_SECONDS, Servers, ServerState
from flowrt.operators.replica_table import UNAVAILABLE
from flowrt.reliability.expert_map import ExpertMap, servers_by_expert

HELD = {0: (0, 1), 1: (1, 2), 2: (2, 0)}
A, B, C = NAMES = ("a", "b", "c")


@pytest.fixture
def clock():
    return [5.0]


@pytest.fixture
def servers(clock):
    return Servers(ExpertMap(servers_by_expert(HELD, 3)), dict(enumerate(NAMES)), now=lambda: clock[0])


def replicas(servers, layer=0):
    return [sorted({each for each in row if each != UNAVAILABLE}) for row in servers.table(layer).servers_EB.tolist()]


EVENTS = {
    ServerState.LATE: lambda servers: servers.note_late(0),
    ServerState.AVOIDED: lambda servers: servers.avoid(0),
    ServerState.SLOW: lambda servers: setattr(servers.hedging, "slow", frozenset({0})),
    ServerState.LOST: lambda servers: servers.lose(A),
}


@pytest.mark.parametrize("state", EVENTS)
def test_others_are_preferred_to_a_server_in_each_state(servers, state):
    assert replicas(servers) == [[0, 2], [0, 1], [1, 2]]
    EVENTS[state](servers)
    assert [servers.state(server) for server in range(3)] == [state, ServerState.USABLE, ServerState.USABLE]
    assert replicas(servers) == [[2], [1], [1, 2]]


@pytest.mark.parametrize("state", EVENTS)
def test_only_a_lost_server_computes_nothing_where_it_is_the_only_one(servers, state):
    servers.lose(C)
    EVENTS[state](servers)
    assert replicas(servers)[0] == ([] if state is ServerState.LOST else [0])
    assert servers.unavailable_experts == ([0] if state is ServerState.LOST else [])


def test_each_state_ends_by_its_event(servers, clock):
    servers.note_late(0)
    servers.note_response(0)
    assert servers.state(0) is ServerState.USABLE
    assert servers.avoid(0)
    assert not servers.avoid(0), "once, while it is avoided"
    clock[0] += AVOIDED_SECONDS
    assert servers.state(0) is ServerState.USABLE
    servers.lose(A)
    servers.join(A)
    assert servers.state(0) is ServerState.USABLE


@pytest.mark.parametrize("state", EVENTS)
def test_next_incarnation_begins_without_history(servers, state):
    EVENTS[state](servers)
    servers.lose(A)
    servers.join(A)
    assert servers.state(0) is ServerState.USABLE


def test_cause_of_a_loss_is_due_until_the_parts_are_settled(servers, clock):
    servers.lose(A)
    assert not servers.settle(A), "no part was there"
    servers.lose(A, awaits_cause=True)
    assert servers.due == {A: clock[0] + CAUSE_SECONDS}
    servers.lose(A)
    assert servers.due, "a second notice changes nothing"
    assert servers.settle(A)
    assert not servers.settle(A)
    assert (servers.due, servers.lost) == ({}, [A])


def test_map_changes_once_per_loss_and_per_return(servers):
    for version, event in enumerate((servers.lose, servers.lose, servers.join, servers.join)):
        event(A)
        assert servers.map_version == (2, 2, 3, 3)[version]


def test_server_that_returns_brings_back_no_other_one(servers):
    for name in (A, B):
        servers.lose(name)
    servers.join(B)
    assert replicas(servers) == [[2], [1], [1, 2]]


@pytest.fixture
def trampoline(clock):
    """Server 3 is a trampoline in the process of server 0, before servers 0 and 1."""
    held = {**HELD, 3: (0, 1, 2)}
    return Servers(ExpertMap(servers_by_expert(held, 3)), dict(enumerate((*NAMES, A))), now=lambda: clock[0], behind={3: (0, 1)})


def first_replicas(servers):
    found = [sorted({each for each in row if each != UNAVAILABLE}) for row in servers.replica_table(0).servers_EB.tolist()]
    servers.end_split()
    return found


def test_trampoline_takes_the_place_of_the_servers_behind_it(trampoline):
    assert first_replicas(trampoline) == [[2, 3], [3], [2, 3]]
    assert replicas(trampoline) == [[0, 2], [0, 1], [1, 2]], "what is sent again goes past it"


@pytest.mark.parametrize("server", [0, 1, 3])
def test_trampoline_with_a_late_server_forwards_nothing(trampoline, server):
    trampoline.note_late(server)
    assert {each for row in first_replicas(trampoline) for each in row} <= {0, 1, 2}
    trampoline.note_response(server)
    assert first_replicas(trampoline) == [[2, 3], [3], [2, 3]]


def test_trampoline_holds_the_experts_of_the_servers_that_are_left(trampoline):
    trampoline.lose(B)
    assert first_replicas(trampoline) == [[2, 3], [3], [2]]
    trampoline.lose(A)
    assert first_replicas(trampoline) == [[2], [], [2]], "its process is lost"
    assert trampoline.unavailable_experts == [1]
    trampoline.join(A)
    assert first_replicas(trampoline) == [[2, 3], [3], [2]]


def test_some_tags_use_slow_servers_too(servers):
    servers.hedging.slow = frozenset({0})
    used = {tuple(sorted(set(servers.replica_table(0).servers_EB[1].tolist()) - {UNAVAILABLE})) for _ in range(64)}
    assert used == {(1,), (0, 1)}


def test_tables_from_before_a_change_are_known_until_the_split_is_over(servers):
    servers.replica_table(0)
    assert not servers.splits_by_old_map
    servers.lose(A)
    assert servers.splits_by_old_map
    servers.end_split()
    assert not servers.splits_by_old_map


def test_a_table_of_the_map_before_is_not_kept_for_the_one_behind(servers, monkeypatch):
    """The compute thread builds a table while the loop loses a server."""
    made = servers_module.ReplicaTables

    def lose_meanwhile(*arguments):
        monkeypatch.setattr(servers_module, "ReplicaTables", made)
        servers.lose(A)
        return made(*arguments)

    monkeypatch.setattr(servers_module, "ReplicaTables", lose_meanwhile)
    assert replicas(servers)[0] == [0, 2], "of the map before"
    assert replicas(servers)[0] == [2]
