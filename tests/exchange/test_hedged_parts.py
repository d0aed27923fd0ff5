"""Late parts are sent to other servers too."""

from exchange.failover_client import ROWS, timed

from flowrt.transports.wire.message import Tag


def with_late_part(hedges_at=0.1):
    """A client with a step of which server 1 has not responded, which is hedged at this time; and that part."""
    client, clock = timed(0.01, 0.01, 0.01)
    client.begin()
    for server in (0, 2):
        client.serve(server)
    late = client.requested[1].popleft()
    clock[0] = hedges_at
    client.failover.hedge()
    return client, clock, late


def test_late_part_is_hedged_and_the_first_response_counts():
    for first in ("late", "hedge"):
        client, clock, late = with_late_part(hedges_at=0.005)
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
            client.finish()
            client.requested[1].append(late)
            client.serve(1)
        client.check()
        assert client.client.hedging.num_hedged == 1


def test_server_with_a_late_response_gets_no_part_that_others_can_take():
    client, _, late = with_late_part()
    client.serve_all()
    for step in range(1, 20):
        client.begin(step)
        assert not client.requested[1]
        client.serve_all()
    client.requested[1].append(late)
    client.serve(1)
    client.begin(20)
    assert client.requested[1]
    client.finish(range(21))
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
    client.finish()


def test_crash_of_a_late_server_fails_its_step_unless_the_hedge_has_responded():
    """What is late there may be the cause, and crash the server of the hedge, too."""
    for has_responded in (False, True):
        client, *_ = with_late_part()
        if has_responded:
            client.serve_all()
        client.die(1, may_recur=True)
        assert client.suspects == ([] if has_responded else [(Tag("s@1"), True)])


def test_crash_of_the_server_of_a_hedge_fails_its_step():
    client, *_ = with_late_part()
    (hedge, *_) = [server for server, requests in client.requested.items() if requests]
    client.die(hedge, may_recur=True)
    assert client.suspects == [(Tag("s@1"), True)]


def test_slow_server_is_avoided_where_others_hold_a_replica():
    client, _ = timed(0.01, 0.05, 0.01)
    client.failover.hedge()
    client.begin()
    assert not client.requested[1]
    client.finish()
    client.die(0)
    client.begin(1)
    assert client.requested[1]  # experts 2 and 3 lie nowhere else now
    client.finish((0, 1))


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


def test_redispatched_parts_are_as_old_as_their_own_requests():
    """How long a dead server held a tag up says nothing of the servers that compute its parts again."""
    client, clock = timed(0.01, 0.01, 0.01)
    client.begin()
    for server in (0, 2):
        client.serve(server)
    client.requested[1].popleft()
    clock[0] = 3.0
    client.die(1)
    others = [server for server, requests in client.requested.items() if requests]
    usual = {server: client.client.hedging.late_after(server, ROWS) for server in others}
    client.failover.hedge()
    assert client.client.hedging.num_hedged == 0, "they were sent just now"
    assert client.failover.overdue() == {}
    client.serve_all()
    assert {server: client.client.hedging.late_after(server, ROWS) for server in others} == usual
    client.check()
