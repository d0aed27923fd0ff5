"""Late parts are sent to other servers too."""

from exchange.failover_client import SERVERS, timed

from flowrt.actors.control import DeathCause
from flowrt.dataflow.parts import PartHeader
from flowrt.dataflow.payload import from_message
from flowrt.transports.wire.message import Tag


def test_late_part_is_hedged_and_the_first_response_counts():
    for first in ("late", "hedge"):
        client, clock = timed(0.01, 0.01, 0.01)
        client.begin()
        late = client.requested[1].popleft()
        client.serve(0)
        client.serve(2)
        clock[0] = 0.005
        client.failover.hedge()
        assert not any(client.requested.values())
        clock[0] = 0.1
        client.failover.hedge()
        assert any(client.requested[server] for server in (0, 2))
        client.failover.hedge()
        if first == "late":
            client.requested[1].append(late)
            client.serve(1)
            client.check()
            client.serve_all()
        else:
            client.serve_all()
            client.check()
            client.requested[1].append(late)
            client.serve(1)
        client.check()
        assert client.client.hedging.num_hedged == 1


def test_server_with_a_late_response_gets_no_part_that_others_can_take():
    client, clock = timed(0.01, 0.01, 0.01)
    client.begin()
    late = client.requested[1].popleft()
    client.serve(0)
    client.serve(2)
    clock[0] = 0.1
    client.failover.hedge()
    client.serve_all()
    for step in range(1, 20):
        client.begin(step)
        assert not client.requested[1]
        client.serve_all()
    client.requested[1].append(late)
    client.serve(1)
    client.begin(20)
    assert client.requested[1]
    client.serve_all()
    client.check(range(21))
    assert client.client.hedging.num_hedged == 1


def test_hedge_of_a_dead_server_is_redispatched():
    client, clock = timed(0.01, 0.01, 0.01)
    client.begin()
    client.requested[1].popleft()
    clock[0] = 0.1
    client.failover.hedge()
    client.die(1)
    client.die(0)
    client.join(1)
    client.serve_all()
    client.check()


def in_flight(client, steps=(0,)):
    """(server, header) of each request of these steps that no server has computed."""
    requests = [(server, request) for server, each in client.requested.items() for request in each if request.tag.step in steps]
    return [(server, from_message(request).header_as(PartHeader)) for server, request in requests]


def late(client, clock):
    """Server 1 is late with its part of step 0, and has one of step 1. The hedge that was sent: (server, header)."""
    client.begin()
    for server in (0, 2):
        client.serve(server)
    clock[0] = 0.1
    client.begin(1)
    client.requested[1].popleft()
    client.failover.hedge()
    (sent,) = in_flight(client)
    return sent


def test_hedges_of_a_late_part_go_one_by_one_each_of_one_sequence_alone():
    client, clock = timed(0.01, 0.01, 0.01)
    sent, sequences = [late(client, clock)], []
    while sent:
        ((server, header),) = sent
        assert header.alone
        (part,) = client.client.parts(Tag("s@1"), [header.part])
        sequences.append({max(row, 1) for row in part.rows_R.tolist()})
        client.requested[server].rotate(1)  # before what the server has of step 1
        client.serve(server)
        sent = in_flight(client)
    assert len(sequences) > 1
    assert all(len(rows) == 1 for rows in sequences)
    client.serve_all()
    client.check((0, 1))


def test_hedge_that_ends_its_server_blames_its_sequence_also_after_the_end_of_the_late_server():
    client, clock = timed(0.01, 0.01, 0.01)
    server, header = late(client, clock)
    (part,) = client.client.parts(Tag("s@1"), [header.part])
    client.die(1, may_recur=True)
    client.failover.hedge()
    assert client.suspects == []
    client.die(server, may_recur=True, tag=Tag("s@1"), part=header.part)
    client.failover.hedge()
    assert (client.blamed, client.suspects) == ([(Tag("s@1"), part.rows_R[0])], [])
    assert not client.client.tags


def test_hedge_blames_its_sequence_when_both_servers_are_lost_before_a_cause_is_known():
    client, clock = timed(0.01, 0.01, 0.01)
    server, header = late(client, clock)
    lost = ("experts.1", f"experts.{server}")
    for name in lost:
        client.runner.end_peer(name)
        client.failover.mark_lost(name)
    client.failover.settle(lost[0], DeathCause(lost[0], "1", "hung", may_recur=True))
    assert (client.blamed, client.suspects) == ([], [])
    client.failover.settle(lost[1], DeathCause(lost[1], "1", "hung", may_recur=True, tag=Tag("s@1"), part=header.part))
    client.failover.hedge()
    assert [tag for tag, _ in client.blamed] == [Tag("s@1")]
    assert client.suspects == []


def test_other_parts_of_a_crashed_server_are_suspects_once_all_hedges_are_computed():
    client, clock = timed(0.01, 0.01, 0.01)
    late(client, clock)
    client.die(1, may_recur=True)
    while in_flight(client):
        client.failover.hedge()
        assert client.suspects == []
        client.serve(in_flight(client)[0][0])
    client.failover.hedge()
    assert (client.blamed, client.suspects) == ([], [(Tag("s@1", step=1), False)])


def test_parts_of_the_next_incarnation_are_not_suspects_of_the_crash():
    client, clock = timed(0.01, 0.01, 0.01)
    late(client, clock)
    for server in (0, 2):
        client.serve(server)  # of step 1
    client.die(1, may_recur=True)
    client.join(1)
    clock[0] = 1.0
    client.failover.hedge()
    assert client.client.hedging.num_hedged == 1  # the part that was lost is not late
    client.begin(2)
    while hedges := in_flight(client):
        client.serve(hedges[0][0])
    assert client.requested[1]
    client.failover.hedge()
    assert client.suspects == [(Tag("s@1", step=1), False)]


def test_hedge_that_waits_at_a_crashed_server_goes_to_a_replica():
    """The server would have named it, had it computed it."""
    client, clock = timed(0.01, 0.01, 0.01)
    server, header = late(client, clock)
    for each in SERVERS:
        client.serve(each)  # of step 1, before the hedge
    client.die(server, may_recur=True)
    ((other, redispatched),) = in_flight(client)
    assert other != server
    assert redispatched.alone
    assert redispatched.part != header.part
    client.join(server)
    clock[0] = 1.0
    client.failover.hedge()
    assert client.client.hedging.num_hedged == 1  # late as it is, no third server gets it
    assert (client.blamed, client.suspects) == ([], [])


def test_redispatched_part_that_goes_alone_has_no_hedge_that_would_wait_for_it():
    """One server is late with a part, and a second one is lost with another: its parts go one by one, after the hedge."""
    client, clock = timed(0.01, 0.01, 0.01)
    client.begin()
    client.requested[1].popleft()
    client.serve(0)
    clock[0] = 0.1
    client.failover.hedge()
    client.die(2)
    while (sent := in_flight(client)) and client.client.in_flight(Tag("s@1")) in client.client._outstanding[Tag("s@1")].hedges:
        client.serve(sent[0][0])
    ((server, header),) = sent
    assert header.part == client.client.in_flight(Tag("s@1"))
    client.join(2)
    clock[0] = 1.0
    client.failover.hedge()
    client.die(server)
    client.serve_all()
    client.check()


def test_slow_server_is_avoided_where_others_hold_a_replica():
    client, _ = timed(0.01, 0.05, 0.01)
    client.failover.hedge()
    client.begin()
    assert not client.requested[1]
    client.serve_all()
    client.check()
    client.die(0)
    client.begin(1)
    assert client.requested[1]  # experts 2 and 3 lie nowhere else now
    client.serve_all()
    client.check((0, 1))


def test_overdue_server_is_reported():
    client, clock = timed(0.1, 0.1, 0.1)
    client.begin()
    client.serve(0)
    assert client.failover.overdue() == {}
    clock[0] = 0.3  # late enough for a hedge, too soon for a report
    assert client.failover.overdue() == {}
    clock[0] = 3.0
    overdue = client.failover.overdue()
    assert set(overdue) == {"experts.1", "experts.2"}
    for waited, usual in overdue.values():
        assert waited == 3.0
        assert 0.1 <= usual <= 0.75
    client.serve(1)
    client.die(2)  # a dead server is not reported
    assert client.failover.overdue() == {}
