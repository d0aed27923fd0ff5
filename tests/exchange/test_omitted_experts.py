"""Degraded output: which experts a sum omits, for how long, and which steps are marked."""

import pytest
import torch
from exchange.failover_client import IDS_TA, WEIGHTS_TA, X_TH, Client

from flowrt.dataflow.matching import Firing
from flowrt.dataflow.payload import Payload
from flowrt.exchange.dispatch import Dispatch
from flowrt.exchange.omitted_experts import OmittedExperts
from flowrt.transports.wire.message import Tag

LOST_SECONDS = 5.0


@pytest.fixture(params=[False, True], ids=["fast", "strict"])
def client(request):
    """With experts 2 and 3 on servers 0 and 1, which go down; the clock is `client.clock[0]`."""
    client = Client(request.param)
    client.clock = [0.0]
    client.client._now = client.client.servers._now = client.client.servers.omitted._now = lambda: client.clock[0]
    client.die(0)
    client.die(1)
    return client


def give_up(client, seconds=LOST_SECONDS, epoch=1):
    """As the worker does: what waits is rolled back. True when there was reason to."""
    client.clock[0] += seconds
    is_new = client.client.servers.omitted.omit_unavailable(LOST_SECONDS)
    if is_new:
        client.runner.roll_back("s@1", epoch)
        client.client.roll_back("s@1", epoch)
    return is_new


def sum_without(*lost):
    """The sum without these experts, weights as the gate gave them."""
    kept_TA = torch.ones_like(WEIGHTS_TA)
    for expert in lost:
        kept_TA[expert == IDS_TA] = 0.0
    return X_TH + sum(X_TH * (kept_TA[:, slot] * WEIGHTS_TA[:, slot] * (IDS_TA[:, slot] + 1)).unsqueeze(1) for slot in range(2))


def last(client):
    return client.ends[-1][1]


def test_pairs_of_lost_experts_are_left_out_after_a_while_and_not_before(client):
    client.begin(0)
    client.serve_all()
    assert not give_up(client, LOST_SECONDS - 0.1)
    client.serve_all()
    assert not client.ends
    assert give_up(client, 0.1)
    assert client.client.servers.omitted.has_omitted
    client.begin(1, epoch=1)
    client.serve_all()
    assert [tag.step for tag, _ in client.ends] == [1]
    assert torch.equal(last(client), sum_without(2, 3))
    assert client.client.servers.omitted.take_degraded(Tag("s@1", 1, 0, 1))
    assert not client.client.servers.omitted.take_degraded(Tag("s@1", 1, 0, 1)), "reported once"
    assert not client.client.tags
    assert not client.client.servers.omitted.parts
    assert not give_up(client), "the same experts are given up once"


def test_a_step_in_which_nothing_was_left_out_is_not_marked(client):
    give_up(client)
    whole = torch.tensor([[0, 1], [1, 4], [4, 5], [5, 4], [5, 0]])  # no row is sent to experts 2 and 3
    firing = Firing("dispatch", Tag("s@1", 1), {"x": Payload((X_TH,)), "routing": Payload((whole, WEIGHTS_TA))})
    Dispatch(client.client, client.strict)([firing])
    assert not client.client.servers.omitted.take_degraded(Tag("s@1", 1))


def test_with_a_replica_back_the_sum_is_whole_and_no_step_is_marked(client):
    give_up(client)
    client.begin(0, epoch=1)
    client.serve_all()
    client.join(1)
    assert not client.client.servers.omitted.has_omitted
    client.begin(1, epoch=1)
    client.serve_all()
    assert torch.equal(last(client), sum_without())
    assert not client.client.servers.omitted.take_degraded(Tag("s@1", 1, 0, 1))


def test_an_expert_lost_again_has_its_whole_time_again(client):
    give_up(client)
    client.join(1)
    client.die(1)
    assert not give_up(client, LOST_SECONDS - 0.1)
    client.begin(0, epoch=1)
    client.serve_all()
    assert not client.ends
    assert give_up(client, 0.1, epoch=2)


def test_each_expert_is_waited_for_as_long(client):
    """Experts 0, 1, 4 and 5 are lost three seconds after 2 and 3: when those are given up, these are still waited for."""
    client.clock[0] = 3.0
    client.die(2)
    assert give_up(client, LOST_SECONDS - 3.0)
    client.begin(0, epoch=1)
    client.serve_all()
    assert not client.ends
    client.join(2)
    client.serve_all()
    assert torch.equal(last(client), sum_without(2, 3))
    client.die(2)
    assert give_up(client, epoch=2)
    client.begin(1, epoch=2)
    assert torch.equal(last(client), X_TH), "no server remains"


def test_a_step_rolled_back_is_not_marked_when_it_is_computed_again_whole(client):
    give_up(client)
    client.begin(0, epoch=1)
    client.runner.roll_back("s@1", 2)
    client.client.roll_back("s@1", 2)
    assert not client.client.servers.omitted.take_degraded(Tag("s@1", 1, 0, 0))
    assert not client.client.servers.omitted.parts


def test_a_tag_that_was_rolled_back_while_it_was_cut_leaves_nothing(client):
    give_up(client)
    firing = Firing("dispatch", Tag("s@1", 0), {"x": Payload((X_TH,)), "routing": Payload((IDS_TA, WEIGHTS_TA))})
    Dispatch(client.client, client.strict)([firing])
    assert not client.client.tags
    assert not client.client.servers.omitted.parts
    assert not client.client.servers.omitted.take_degraded(Tag("s@1", 0))


def test_experts_are_given_up_layer_by_layer():
    now = [0.0]
    lacking = OmittedExperts(lambda: now[0])
    lacking.update({1: frozenset({4}), 2: frozenset()})
    now[0] = 3.0
    lacking.update({1: frozenset({4}), 2: frozenset({4, 5})})
    now[0] = 5.0
    assert lacking.omit_unavailable(5.0)
    assert lacking._omitted == {1: [4]}
    now[0] = 8.0
    assert lacking.omit_unavailable(5.0)
    assert not lacking.omit_unavailable(5.0)
    assert lacking._omitted == {1: [4], 2: [4, 5]}
    lacking.update({1: frozenset(), 2: frozenset({5})})
    assert lacking._omitted == {2: [5]}


def test_postponed_time_starts_again_except_for_omitted_experts():
    now = [0.0]
    omitted = OmittedExperts(lambda: now[0])
    omitted.update({0: frozenset({1})})
    now[0] = LOST_SECONDS
    assert omitted.omit_unavailable(LOST_SECONDS)
    omitted.update({0: frozenset({1, 2})})
    now[0] = 2 * LOST_SECONDS - 0.1
    omitted.postpone()
    now[0] = 3 * LOST_SECONDS - 0.2
    assert not omitted.omit_unavailable(LOST_SECONDS)
    assert omitted.has_omitted, "expert 1 still is"
    now[0] = 3 * LOST_SECONDS
    assert omitted.omit_unavailable(LOST_SECONDS), "expert 2 now is too"
