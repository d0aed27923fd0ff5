"""Which expert servers a client may use: each event and the state that follows, and the tables that follow from the states."""

import pytest

from flowrt.exchange.servers import AVOIDED_SECONDS, CAUSE_SECONDS, Servers, ServerState, via
from flowrt.operators.replica_table import UNAVAILABLE
from flowrt.reliability.expert_map import ExpertMap, servers_by_expert

HELD = {0: (0, 1), 1: (1, 2), 2: (2, 0)}
A, B, C = NAMES = ("a", "b", "c")


@pytest.fixture
def clock():
    return [5.0]


@pytest.fixture
def servers(clock):
    return Servers(ExpertMap(servers_by_expert(HELD, 3)), NAMES, now=lambda: clock[0])


def replicas(servers, layer=0):
    return [sorted({each for each in row if each != UNAVAILABLE}) for row in servers.table(layer).servers_EB.tolist()]


EVENTS = {
    ServerState.LATE: lambda servers: servers.note_late(A),
    ServerState.AVOIDED: lambda servers: servers.avoid(A),
    ServerState.SLOW: lambda servers: setattr(servers.hedging, "slow", frozenset({0})),
    ServerState.LOST: lambda servers: servers.lose(A),
}


@pytest.mark.parametrize("state", EVENTS)
def test_others_are_preferred_to_a_server_in_each_state(servers, state):
    assert replicas(servers) == [[0, 2], [0, 1], [1, 2]]
    EVENTS[state](servers)
    assert [servers.state(name) for name in NAMES] == [state, ServerState.USABLE, ServerState.USABLE]
    assert replicas(servers) == [[2], [1], [1, 2]]


@pytest.mark.parametrize("state", EVENTS)
def test_only_a_lost_server_computes_nothing_where_it_is_the_only_one(servers, state):
    servers.lose(C)
    EVENTS[state](servers)
    assert replicas(servers)[0] == ([] if state is ServerState.LOST else [0])
    assert servers.unavailable_experts == ([0] if state is ServerState.LOST else [])


def test_each_state_ends_by_its_event(servers, clock):
    servers.note_late(A)
    servers.note_response(A)
    assert servers.state(A) is ServerState.USABLE
    assert servers.avoid(A)
    assert not servers.avoid(A), "once, while it is avoided"
    clock[0] += AVOIDED_SECONDS
    assert servers.state(A) is ServerState.USABLE
    servers.lose(A)
    servers.join(A)
    assert servers.state(A) is ServerState.USABLE


@pytest.mark.parametrize("state", EVENTS)
def test_next_incarnation_begins_without_history(servers, state):
    EVENTS[state](servers)
    servers.lose(A)
    servers.join(A)
    assert servers.state(A) is ServerState.USABLE


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


def test_late_or_lost_trampoline_forwards_nothing(servers):
    assert servers.may_forward(A)
    servers.note_late(via(A))
    assert not servers.may_forward(A)
    assert servers.state(A) is ServerState.USABLE, "its own server is not late"
    servers.note_response(via(A))
    servers.lose(A)
    assert not servers.may_forward(A)


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
