"""The client of the expert servers when servers die and return."""

import pytest
import torch
from exchange.failover_client import ACTIVE, ROWS, SERVERS, WEIGHTS_TA, X_TH, Client

from flowrt.dataflow.matching import Firing
from flowrt.dataflow.parts import PartHeader
from flowrt.dataflow.payload import Payload
from flowrt.exchange.dispatch import Combine
from flowrt.operators.replica_table import UNAVAILABLE
from flowrt.transports.wire.message import Tag


@pytest.fixture(params=[False, True], ids=["fast", "strict"])
def client(request):
    return Client(request.param)


def test_all_servers_alive(client):
    client.begin()
    client.finish()


@pytest.mark.parametrize("server", SERVERS)
@pytest.mark.parametrize("responded", [(), (0,), (1,), (0, 1), (1, 2)])
def test_parts_of_a_dead_server_are_redispatched(client, server, responded):
    client.begin()
    for other in responded:
        client.serve(other)
    client.die(server)
    assert not client.requested[server]
    client.finish()


def test_two_of_three_servers_die_in_turn_and_return(client):
    client.begin()
    client.die(0)
    client.finish()
    client.die(1)
    client.begin(1)  # experts 2 and 3 have no copy now
    client.serve_all()
    assert len(client.ends) == 1
    assert "experts 2, 3: experts.0, experts.1" in client.failover.unavailable_text()
    client.join(1)
    assert client.failover.unavailable_text() is None
    client.finish((0, 1))
    client.join(0)
    client.begin(2)
    assert all(client.requested.values())
    client.finish((0, 1, 2))


def test_parts_wait_for_a_replica_when_the_server_dies(client):
    client.begin()
    client.die(0)
    client.die(1)
    client.serve_all()
    assert not client.ends
    client.join(0)
    client.finish()


def test_a_part_cut_before_its_server_died_and_sent_after(client):
    """The dispatch node ran on the compute thread; its outputs leave when the server is known to be gone."""
    outputs = client.dispatch()
    client.die(1)
    client.runner._send_early(outputs)
    assert not client.requested[1]
    client.finish()


def test_part_dispatched_without_a_replica_and_known_after_the_replica_is_back(client):
    client.die(0)
    client.die(1)
    outputs = client.dispatch()
    client.join(1)
    client.runner._send_early(outputs)
    client.serve_all()
    assert not client.ends
    assert client.client.has_waiting_parts
    client.failover.redispatch_waiting()
    client.finish()
    assert not client.client.has_waiting_parts


def test_part_without_a_replica_when_another_server_dies_before_its_retry(client):
    """Server 0 is back, but the tag's plan came after the check for it; then server 1 dies, and the tag is partitioned again for that."""
    client.die(0)
    client.die(2)
    outputs = client.dispatch()
    client.join(0)
    client.join(2)
    client.runner._send_early(outputs)
    client.die(1)
    client.failover.redispatch_waiting()
    client.finish()


def test_a_tag_that_is_being_cut_by_an_older_map_may_wait(client):
    client.die(0)
    client.die(1)
    client.client.servers.replica_table(0)
    client.join(1)
    assert client.client.has_waiting_parts
    client.client.add_tag(Tag("s@1"), X_TH, ACTIVE, [])
    assert not client.client.has_waiting_parts


def test_redispatched_response_for_a_rolled_back_tag_is_not_an_error(client):
    responses = [Payload((X_TH,), PartHeader(7))]
    inputs = {"plan": Payload((WEIGHTS_TA, torch.arange(ROWS))), "parts": responses, "residual": Payload((X_TH,))}
    (outputs,) = Combine(client.client, client.strict)([Firing("combine", Tag("s@1"), inputs)])
    assert torch.equal(outputs["y"].tensors[0], X_TH)


def test_late_response_counts_if_first_and_is_dropped_otherwise(client):
    client.begin()
    late = client.requested[1].popleft()
    client.die(1)
    client.join(1)  # its response comes on a credit of its new incarnation
    client.begin(1)
    client.finish((0, 1))
    client.runner._outbound.edges[client.request_edge(1)].free -= 1
    client.runner.accept("experts.1", client.response(1, late))
    client.check((0, 1))


def test_credits_of_an_earlier_incarnation_do_not_count(client):
    """Four tags take both credits of each server and wait; all continue after a death; the next incarnation has all its credits."""
    for step in range(4):
        client.begin(step)
    requests = client.runner._outbound.edges[client.request_edge(0)]
    assert requests.free == 0
    client.die(0)
    client.finish((0, 1, 2, 3))
    client.join(0)
    assert (requests.free, len(requests.pending)) == (2, 0)


def test_rolled_back_tags_are_removed(client):
    client.begin()
    client.runner.roll_back("s@1", 1)
    client.client.roll_back("s@1", 1)
    client.die(0)
    client.die(1)
    client.join(0)
    client.client.add_tag(Tag("s@1"), X_TH, ACTIVE, [])  # it was being cut meanwhile
    assert not client.client.tags
    client.join(1)
    client.serve_all()
    client.begin(1, epoch=1)
    client.finish((1,))


def test_pairs_without_a_replica_form_a_part_without_server(client):
    client.die(0)
    client.die(1)
    client.begin()
    tag = Tag("s@1")
    assert UNAVAILABLE in {part.server for part in client.client.parts(tag, client.runner.missing("combine", "parts", tag))}
