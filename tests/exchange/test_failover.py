"""The client of the expert servers when servers die and return, without channels and with real tensors that expose mistakes."""

from collections import deque

import pytest
import torch

from flowrt.actors.control import DeathCause
from flowrt.dataflow.matching import Firing
from flowrt.dataflow.parts import PartHeader
from flowrt.dataflow.payload import Payload, from_message, to_message
from flowrt.dataflow.runner import Runner
from flowrt.exchange.dispatch import Combine, Dispatch
from flowrt.exchange.expert_client import ExpertClient
from flowrt.exchange.failover import Failover
from flowrt.graph.model import Edge, Graph, ModelPart, Node, PortSpec
from flowrt.operators.replica_table import UNAVAILABLE
from flowrt.reliability.expert_map import ExpertMap, servers_by_expert
from flowrt.seams import RealClock
from flowrt.transports.wire.message import Tag

NUM_EXPERTS, ROWS, ACTIVE, WIDTH = 6, 5, 2, 4
SERVERS = {0: (0, 1, 2, 3), 1: (2, 3, 4, 5), 2: (0, 1, 4, 5)}  # two copies of each expert
IDS_TA = torch.tensor([[0, 2], [1, 4], [3, 5], [2, 4], [5, 0]])
X_TH = torch.arange(float(ROWS * WIDTH)).reshape(ROWS, WIDTH)
WEIGHTS_TA = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0], [7.0, 8.0], [9.0, 10.0]])
POSITIONS_T = torch.tensor([0, 1, 2, 3, 4])


def respond(x_RH, row_P, expert_P, weight_P, strict):
    """An expert multiplies by its number + 1: whatever is lost, doubled or in a wrong row shows."""
    y_PH = x_RH[row_P] * (expert_P + 1).unsqueeze(1)
    return y_PH if strict else torch.zeros_like(x_RH).index_add_(0, row_P, y_PH * weight_P.unsqueeze(1))


def expected():
    return X_TH + sum(X_TH * (WEIGHTS_TA[:, slot] * (IDS_TA[:, slot] + 1)).unsqueeze(1) for slot in range(ACTIVE))


class Inline:
    running = None

    def is_short(self, label):
        return True

    def run_inline(self, label, call):
        return call()

    async def run(self, label, call, bound_seconds=60.0):
        return call()


def graph():
    gather = {"plan": PortSpec("plan"), "parts": PortSpec("parts", takes="gather", count="plan"), "residual": PortSpec("residual")}
    nodes = [
        Node("source", "source", "a", {}, {"x": PortSpec("x"), "routing": PortSpec("routing"), "residual": PortSpec("residual")}),
        Node(
            "dispatch", "dispatch", "a", {"x": PortSpec("x"), "routing": PortSpec("routing")},
            {name: PortSpec(name) for name in ("plan", "server0", "server1", "server2")},
        ),
        Node("combine", "combine", "a", gather, {"y": PortSpec("y")}),
        Node("end", "m:f", "a", {"y": PortSpec("y")}, {}),
        *(Node(f"experts.{s}", "experts", f"experts.{s}", {"rows": PortSpec("rows")}, {"results": PortSpec("results")}) for s in SERVERS),
    ]  # fmt: skip
    edges = [
        Edge("source", "x", "dispatch", "x"),
        Edge("source", "routing", "dispatch", "routing"),
        Edge("source", "residual", "combine", "residual"),
        Edge("dispatch", "plan", "combine", "plan"),
        Edge("combine", "y", "end", "y"),
    ]
    for server in SERVERS:
        edges.append(Edge("dispatch", f"server{server}", f"experts.{server}", "rows", credits=2))
        edges.append(
            Edge(f"experts.{server}", "results", "combine", "parts", response_to=f"dispatch.server{server} -> experts.{server}.rows")
        )
    return Graph.of(nodes, edges, model=ModelPart("", "float32"))


class Client:
    """A group's side with its runner; `requested[server]` are the requests on their way there."""

    def __init__(self, strict=False, fences=False, schemas=lambda client: {}):
        self.strict = strict
        self.graph = graph()
        self.client = ExpertClient(ExpertMap(servers_by_expert(SERVERS, NUM_EXPERTS)), [f"experts.{server}" for server in SERVERS])
        self.requested = {server: deque() for server in SERVERS}
        self.ends, self.suspects, self.blamed, self.failures = [], [], [], []
        functions = {"dispatch": Dispatch(self.client, strict), "combine": Combine(self.client, strict)}
        self.runner = Runner(
            self.graph,
            "a",
            functions,
            Inline(),
            RealClock(),
            self.post,
            self.end,
            lambda tag, error, has_sent: self.failures.append((tag, error)),
            on_unsent=lambda output: self.failover.on_unsent(output),
            on_response=lambda edge, tag, message: self.failover.on_response(edge, tag, message),
            schemas=schemas(self),
        )
        self.failover = Failover(self.graph, "dispatch", self.client, self.runner, self)
        if not fences:
            self.client.record_loss = lambda tag, number: 1

    def server(self, server):
        """The runner of an expert server, which only receives."""
        functions = {f"experts.{server}": lambda firings: [{} for _ in firings]}
        return Runner(self.graph, f"experts.{server}", functions, Inline(), RealClock(), self.post, self.end, pytest.fail)

    def post(self, edge, message):
        self.requested[int(edge.target.removeprefix("experts."))].append(message)

    def end(self, firing: Firing):
        self.ends.append((firing.tag, firing.inputs["y"].tensors[0]))

    def begin(self, step=0, epoch=0, value=None):
        """`value`: of the first column of the last input row."""
        x_TH = X_TH.clone()
        if value is not None:
            x_TH[-1, 0] = value
        outputs = {"x": Payload((x_TH, POSITIONS_T)), "routing": Payload((IDS_TA, WEIGHTS_TA)), "residual": Payload((X_TH,))}
        self.runner.emit("source", Tag("s@1", step=step, epoch=epoch), outputs)
        self.runner.settle()

    def request_edge(self, server):
        return self.graph.edges[f"dispatch.server{server} -> experts.{server}.rows"].id

    def response_edge(self, server):
        return self.graph.edges[f"experts.{server}.results -> combine.parts"].id

    def serve(self, server, count=1):
        for _ in range(count):
            request = self.requested[server].popleft()
            payload = from_message(request)
            assert set(payload.tensors[2].tolist()) <= set(SERVERS[server]), "a request for an expert that the server does not hold"
            y = respond(*payload.tensors, self.strict)
            self.runner.accept(f"experts.{server}", to_message(Payload((y,), payload.header), self.response_edge(server), request.tag))
            self.runner.settle()

    def serve_all(self):
        while waiting := [server for server, requests in self.requested.items() if requests]:
            self.serve(waiting[0])

    def fail_steps(self, tags, error):
        """As a group: the steps are given up."""
        self.suspects += [(tag, "again and again" in error) for tag in tags]
        for tag in tags:
            self.runner.roll_back(tag.source, tag.epoch + 1)
            self.client.roll_back(tag.source, tag.epoch + 1)

    def fail_row(self, tag, row, error):
        """As a group: the step is given up."""
        self.blamed.append((tag, row))
        self.runner.roll_back(tag.source, tag.epoch + 1)
        self.client.roll_back(tag.source, tag.epoch + 1)

    def row_counts(self, tag):
        """The first two rows are of one sequence, each other one is of its own."""
        return [2, *[1] * (ROWS - 2)]

    def die(self, server, **cause):
        """`cause`: fields of the launcher's DeathCause; without them it does not come in time."""
        name = f"experts.{server}"
        self.requested[server].clear()
        self.runner.end_peer(name)
        self.failover.mark_lost(name)
        self.failover.settle(name, DeathCause(name, "1", "died", **cause) if cause else None)

    def join(self, server):
        self.runner.join_peer(f"experts.{server}")
        self.failover.mark_joined(f"experts.{server}")

    def check(self, steps=(0,)):
        assert [tag.step for tag, _ in self.ends] == list(steps)
        for _, y in self.ends:
            assert torch.equal(y, expected())
        assert not self.client.tags
        assert not self.runner.waiting()


@pytest.fixture(params=[False, True], ids=["fast", "strict"])
def client(request):
    return Client(request.param)


def test_all_servers_alive(client):
    client.begin()
    client.serve_all()
    client.check()


@pytest.mark.parametrize("server", SERVERS)
@pytest.mark.parametrize("responded", [(), (0,), (1,), (0, 1), (1, 2)])
def test_parts_of_a_dead_server_are_redispatched(client, server, responded):
    client.begin()
    for other in responded:
        client.serve(other)
    client.die(server)
    assert not client.requested[server]
    client.serve_all()
    client.check()


def test_two_of_three_servers_die_in_turn_and_return(client):
    client.begin()
    client.die(0)
    client.serve_all()
    client.check()
    client.die(1)
    client.begin(1)  # experts 2 and 3 have no copy now
    client.serve_all()
    assert len(client.ends) == 1
    assert "experts 2, 3: experts.0, experts.1" in client.failover.unavailable_text()
    client.join(1)
    assert client.failover.unavailable_text() is None
    client.serve_all()
    client.check((0, 1))
    client.join(0)
    client.begin(2)
    assert all(client.requested.values())
    client.serve_all()
    client.check((0, 1, 2))


def test_parts_wait_for_a_replica_when_the_server_dies(client):
    client.begin()
    client.die(0)
    client.die(1)
    client.serve_all()
    assert not client.ends
    client.join(0)
    client.serve_all()
    client.check()


def test_a_part_cut_before_its_server_died_and_sent_after(client):
    """The dispatch node ran on the compute thread; its outputs leave when the server is known to be gone."""
    firing = Firing("dispatch", Tag("s@1"), {"x": Payload((X_TH, POSITIONS_T)), "routing": Payload((IDS_TA, WEIGHTS_TA))})
    client.runner.emit("source", Tag("s@1"), {"residual": Payload((X_TH,))})
    outputs = client.runner._subgraph.route(firing, Dispatch(client.client, client.strict)([firing])[0])
    client.die(1)
    client.runner._send_early(outputs)
    assert not client.requested[1]
    client.serve_all()
    client.check()


def test_part_dispatched_without_a_replica_and_known_after_the_replica_is_back(client):
    client.die(0)
    client.die(1)
    firing = Firing("dispatch", Tag("s@1"), {"x": Payload((X_TH, POSITIONS_T)), "routing": Payload((IDS_TA, WEIGHTS_TA))})
    client.runner.emit("source", Tag("s@1"), {"residual": Payload((X_TH,))})
    outputs = client.runner._subgraph.route(firing, Dispatch(client.client, client.strict)([firing])[0])
    client.join(1)
    client.runner._send_early(outputs)
    client.serve_all()
    assert not client.ends
    assert client.client.has_waiting_parts
    client.failover.redispatch_waiting()
    client.serve_all()
    client.check()
    assert not client.client.has_waiting_parts


def test_part_without_a_replica_when_another_server_dies_before_its_retry(client):
    """Server 0 is back, but the tag's plan came after the check for it; then server 1 dies, and the tag is partitioned again for that."""
    client.die(0)
    client.die(2)
    firing = Firing("dispatch", Tag("s@1"), {"x": Payload((X_TH, POSITIONS_T)), "routing": Payload((IDS_TA, WEIGHTS_TA))})
    client.runner.emit("source", Tag("s@1"), {"residual": Payload((X_TH,))})
    outputs = client.runner._subgraph.route(firing, Dispatch(client.client, client.strict)([firing])[0])
    client.join(0)
    client.join(2)
    client.runner._send_early(outputs)
    client.die(1)
    client.failover.redispatch_waiting()
    client.serve_all()
    client.check()


def test_a_tag_that_is_being_cut_by_an_older_map_may_wait(client):
    client.die(0)
    client.die(1)
    client.client.replica_table(0)
    client.join(1)
    assert client.client.has_waiting_parts
    client.client.add_tag(Tag("s@1"), X_TH, POSITIONS_T, ACTIVE, [])
    assert not client.client.has_waiting_parts


def test_redispatched_response_for_a_rolled_back_tag_is_not_an_error(client):
    responses = [Payload((X_TH,), PartHeader(7))]
    inputs = {"plan": Payload((WEIGHTS_TA, POSITIONS_T)), "parts": responses, "residual": Payload((X_TH,))}
    (outputs,) = Combine(client.client, client.strict)([Firing("combine", Tag("s@1"), inputs)])
    assert torch.equal(outputs["y"].tensors[0], X_TH)


def test_late_response_counts_if_first_and_is_dropped_otherwise(client):
    client.begin()
    late = client.requested[1].popleft()
    client.die(1)
    payload = from_message(late)
    client.join(1)  # its response comes on a credit of its new incarnation
    client.begin(1)
    client.serve_all()
    client.check((0, 1))
    client.runner._outbound.edges[client.request_edge(1)].free -= 1
    client.runner.accept(
        "experts.1", to_message(Payload((respond(*payload.tensors, client.strict),), payload.header), client.response_edge(1), late.tag)
    )
    client.check((0, 1))


def test_credits_of_an_earlier_incarnation_do_not_count(client):
    """Four tags take both credits of each server and wait; all continue after a death; the next incarnation has all its credits."""
    for step in range(4):
        client.begin(step)
    requests = client.runner._outbound.edges[client.request_edge(0)]
    assert requests.free == 0
    client.die(0)
    client.serve_all()
    client.check((0, 1, 2, 3))
    client.join(0)
    assert (requests.free, len(requests.pending)) == (2, 0)


def test_rolled_back_tags_are_removed(client):
    client.begin()
    client.runner.roll_back("s@1", 1)
    client.client.roll_back("s@1", 1)
    client.die(0)
    client.die(1)
    client.join(0)
    client.client.add_tag(Tag("s@1"), X_TH, POSITIONS_T, ACTIVE, [])  # it was being cut meanwhile
    assert not client.client.tags
    client.join(1)
    client.serve_all()
    client.begin(1, epoch=1)
    client.serve_all()
    client.check((1,))


def test_pairs_without_a_replica_form_a_part_without_server(client):
    client.die(0)
    client.die(1)
    client.begin()
    tag = Tag("s@1")
    assert UNAVAILABLE in {part.server for part in client.client.parts(tag, client.runner.missing("combine", "parts", tag))}


def timed(*response_seconds):
    """A client with a clock, and servers that have often responded in the given seconds each."""
    client = Client()
    clock = [0.0]
    client.client._now = lambda: clock[0]
    for _ in range(10):
        for server, seconds in enumerate(response_seconds):
            for rows in (1, 2, 3, 4, 5):
                client.client.hedging.record_response(server, rows, seconds)
    return client, clock


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


@pytest.fixture(params=[False, True], ids=["fast", "strict"])
def fencing(request):
    return Client(request.param, fences=True)


def test_a_part_that_was_lost_with_two_servers_is_not_sent_to_a_third(fencing):
    fencing.begin()
    fencing.die(0)
    assert fencing.requested[1]
    assert fencing.requested[2]
    fencing.die(1)
    assert fencing.suspects == [(Tag("s@1"), True)]
    assert not fencing.client.tags
    for server in (0, 1):
        fencing.join(server)
    assert not fencing.requested[0]
    assert not fencing.requested[1]


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
    fencing.serve_all()
    fencing.check()


def test_a_part_that_was_never_sent_is_not_lost(fencing):
    """Its server is known to be gone when it is to leave."""
    firing = Firing("dispatch", Tag("s@1"), {"x": Payload((X_TH, POSITIONS_T)), "routing": Payload((IDS_TA, WEIGHTS_TA))})
    fencing.runner.emit("source", Tag("s@1"), {"residual": Payload((X_TH,))})
    outputs = fencing.runner._subgraph.route(firing, Dispatch(fencing.client, fencing.strict)([firing])[0])
    fencing.die(1)
    fencing.runner._send_early(outputs)
    fencing.die(0)
    assert fencing.suspects == []


def test_pending_parts_wait_for_the_cause_of_the_death(fencing):
    fencing.begin()
    num_requested = {server: len(requests) for server, requests in fencing.requested.items()}
    assert fencing.failover.mark_lost("experts.1")
    assert {server: len(requests) for server, requests in fencing.requested.items()} == num_requested
    fencing.die(1, may_recur=False)
    fencing.serve_all()
    assert not fencing.suspects
    fencing.check()


def test_server_without_pending_parts_is_not_waited_for(fencing):
    fencing.begin()
    fencing.serve_all()
    assert not fencing.failover.mark_lost("experts.1")
    fencing.check()


def test_steps_with_parts_at_a_crashed_server_are_suspects(fencing):
    """Those of other steps go on. No part goes to a replica, which it might end too."""
    fencing.begin(0)
    fencing.begin(1)
    fencing.serve(1)  # of the first step
    sent = {server: len(fencing.requested[server]) for server in (0, 2)}
    fencing.die(1, may_recur=True)
    assert fencing.suspects == [(Tag("s@1", step=1), False)]
    assert {server: len(fencing.requested[server]) for server in (0, 2)} == sent


def alone(client):
    client.client.computes_alone = True
    client.begin()
    return [(server, from_message(request).header_as(PartHeader)) for server, requests in client.requested.items() for request in requests]


def test_parts_of_a_suspect_go_one_by_one_each_alone(fencing):
    (sent,) = alone(fencing)
    assert sent == (sent[0], PartHeader(sent[1].part, alone=True))
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
    fencing.serve_all()
    fencing.check()


def test_suspect_whose_part_was_computed_alone_is_the_cause(fencing):
    ((server, header),) = alone(fencing)
    fencing.die(server, may_recur=True, tag=Tag("s@1"), part=header.part)
    assert fencing.suspects == [(Tag("s@1"), False)]


@pytest.mark.parametrize(
    "named", [{"tag": Tag("other@1"), "part": 0}, {"tag": Tag("s@1"), "part": 99}, {"tag": Tag("s@1", layer=1), "part": 0}]
)
def test_suspect_whose_part_had_not_begun_is_not_the_cause(fencing, named):
    ((server, _),) = alone(fencing)
    for _ in range(3):
        fencing.die(server, may_recur=True, **named)
        fencing.join(server)
    fencing.serve_all()
    assert not fencing.suspects
    fencing.check()


def test_suspect_whose_parts_crash_servers_that_name_none_ends_at_the_second_loss_of_a_part(fencing):
    alone(fencing)
    for _ in range(len(SERVERS) + 1):  # each part once, and one of them again
        assert not fencing.suspects
        (server,) = (server for server, requests in fencing.requested.items() if requests)
        fencing.die(server, may_recur=True)
        fencing.join(server)
    assert fencing.suspects == [(Tag("s@1"), True)]


def test_suspects_part_that_waits_its_turn_is_not_overdue():
    client, clock = timed(0.1, 0.1, 0.1)
    ((server, _),) = alone(client)
    clock[0] = 3.0
    assert set(client.failover.overdue()) == {f"experts.{server}"}


def test_another_request_that_was_computed_alone_clears_all_parts(fencing):
    fencing.begin()
    fencing.die(1, may_recur=True, tag=Tag("other@1"), part=0)
    fencing.serve_all()
    assert not fencing.suspects
    fencing.check()


def test_suspects_part_that_waits_its_turn_for_a_lost_server_is_redispatched(fencing):
    ((server, _),) = alone(fencing)
    for other in set(SERVERS) - {server}:
        fencing.die(other, may_recur=False)
        fencing.join(other)
    fencing.serve_all()
    assert not fencing.suspects
    fencing.check()
