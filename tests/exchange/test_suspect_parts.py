"""Parts that may be the cause of a death of their server: losses that count, suspects, and parts that go alone."""

import pytest
from exchange.failover_client import SERVERS, Client, timed

from flowrt.actors.control import DeathCause
from flowrt.dataflow.parts import PartHeader
from flowrt.dataflow.payload import from_message
from flowrt.transports.wire.message import Tag


@pytest.fixture(params=[False, True], ids=["fast", "strict"])
def fencing(request):
    return Client(request.param, fences=True)


def test_a_part_that_was_lost_with_two_servers_is_not_sent_to_a_third(fencing):
    fencing.begin()
    fencing.die(0)
    assert fencing.requested[1]
    assert fencing.requested[2]
    fencing.die(1)
    assert fencing.suspects == [(Tag("s@1"), False)]
    assert not fencing.client.tags
    for server in (0, 1):
        fencing.join(server)
    assert not fencing.requested[0]
    assert not fencing.requested[1]


@pytest.mark.parametrize("is_on_purpose", [False, True])
def test_a_loss_does_not_count_when_the_run_ended_the_server_on_purpose(fencing, is_on_purpose):
    """As a recovery policy does with the servers of a role after one of them died."""
    fencing.begin()
    for server in (0, 1):
        fencing.die(server, is_on_purpose=is_on_purpose)
    assert fencing.suspects == ([] if is_on_purpose else [(Tag("s@1"), False)])
    if is_on_purpose:
        for server in (0, 1):
            fencing.join(server)
        fencing.finish()


def test_losses_count_for_the_part_and_not_for_the_step(fencing):
    """Two servers that die with different parts of one step are no reason to suspect it."""
    fencing.begin()
    fencing.die(2)
    for server in (0, 1):  # responses to what was redispatched come first
        fencing.requested[server].rotate(1)
        fencing.serve(server)
    fencing.die(0)
    assert fencing.suspects == []
    fencing.join(0)
    fencing.finish()


def test_a_part_that_was_never_sent_is_not_lost(fencing):
    """Its server is known to be gone when it is to leave."""
    outputs = fencing.dispatch()
    fencing.die(1)
    fencing.runner._send_early(outputs)
    fencing.die(0)
    assert fencing.suspects == []


def test_pending_parts_wait_for_the_cause_of_the_death(fencing):
    fencing.begin()
    num_requested = {server: len(requests) for server, requests in fencing.requested.items()}
    fencing.failover.mark_lost("experts.1")
    assert "experts.1" in fencing.client.servers.due
    assert {server: len(requests) for server, requests in fencing.requested.items()} == num_requested
    fencing.die(1, may_recur=False)
    fencing.serve_all()
    assert not fencing.suspects
    fencing.check()


def test_server_without_pending_parts_is_not_waited_for(fencing):
    fencing.begin()
    fencing.serve_all()
    fencing.failover.mark_lost("experts.1")
    assert not fencing.client.servers.due
    fencing.check()


def test_steps_with_parts_at_a_crashed_server_are_suspects(fencing):
    """Those of other steps go on. No part goes to a replica, which it might end too."""
    fencing.begin(0)
    fencing.begin(1)
    fencing.serve(1)  # of the first step
    sent = {server: len(fencing.requested[server]) for server in (0, 2)}
    fencing.die(1, may_recur=True)
    assert fencing.suspects == [(Tag("s@1", step=1), True)]
    assert {server: len(fencing.requested[server]) for server in (0, 2)} == sent


def test_steps_at_a_dead_server_are_suspects_when_another_has_crashed_before_its_cause_is_known(fencing):
    """The rollback after the first cause forgets their parts."""
    fencing.begin(0)
    for server in (0, 1):
        fencing.serve(server)  # of the first step, which waits for server 2
    fencing.begin(1)
    fencing.failover.mark_lost("experts.2")
    fencing.die(1, may_recur=True)
    fencing.die(2, may_recur=True)
    assert sorted((tag.step, crashed) for tag, crashed in fencing.suspects) == [(0, True), (1, True)]


def test_a_crashed_server_may_still_have_had_parts_of_steps_that_were_rolled_back(fencing):
    """They may be the cause, so that no suspect alone is blamed."""
    fencing.begin(1, epoch=1)
    rolled_back = Tag("s@1", step=0)
    fencing.failover.mark_lost("experts.1", awaited={rolled_back, Tag("s@1", step=1, epoch=1)})
    fencing.failover.settle("experts.1", DeathCause("experts.1", "1", "died", may_recur=True))
    assert [tag.step for tag, _ in fencing.suspects] == [1]
    assert fencing.left == [rolled_back]


def alone(client):
    client.client.computes_alone = True
    client.begin()
    return [(server, from_message(request).header_as(PartHeader)) for server, requests in client.requested.items() for request in requests]


def test_parts_of_a_suspect_go_one_by_one(fencing):
    assert len(alone(fencing)) == 1
    for _ in range(2):
        fencing.serve_all()
        assert sum(map(len, fencing.requested.values())) == 0
    fencing.check()


@pytest.mark.parametrize("has_first", [False, True])
def test_parts_of_a_suspect_survive_a_death_while_they_are_split(fencing, has_first):
    """The compute thread splits a tag while the loop handles the death of a server, of the first part or another: the plan comes after it,
    and all responses after the plan."""
    add_tag = fencing.client.add_tag

    def add_and_die(*arguments):
        requests = add_tag(*arguments)
        (sent,) = requests
        fencing.die(next(server for server in SERVERS if (sent == f"server{server}") is has_first))
        fencing.serve_all()
        return requests

    fencing.client.add_tag = add_and_die
    alone(fencing)
    fencing.finish()


def test_step_of_a_suspect_fails_when_the_server_of_its_part_crashes(fencing):
    ((server, _),) = alone(fencing)
    fencing.die(server, may_recur=True)
    assert fencing.suspects == [(Tag("s@1"), True)]


@pytest.mark.parametrize("may_recur", [False, True])
def test_step_of_a_suspect_goes_on_when_a_server_dies_that_its_part_was_not_sent_to(fencing, may_recur):
    """The parts that wait their turn for that server are redispatched."""
    ((server, _),) = alone(fencing)
    for other in set(SERVERS) - {server}:
        fencing.die(other, may_recur=may_recur)
        fencing.join(other)
    fencing.serve_all()
    assert not fencing.suspects
    fencing.check()


def test_suspects_part_that_waits_its_turn_is_not_overdue():
    client, clock = timed(0.1, 0.1, 0.1)
    ((server, _),) = alone(client)
    clock[0] = 3.0
    assert set(client.failover.overdue()) == {f"experts.{server}"}
