"""Trampolines without channels: bundles are split into the direct parts, and a client survives the loss of each hop.

Two groups' worth of messages are not needed: one client, four servers, of which server 0 forwards to 0 and 2, and server 1 to 1 and 3.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping
from typing import Any

import pytest
import torch
from dataflow.inline_compute import InlineCompute
from dataflow.owners import OwnerOf
from exchange.failover_client import ACTIVE, IDS_TA, WEIGHTS_TA, X_TH, expected, respond

from flowrt.actors.control import DeathCause
from flowrt.actors.link import BadMessageError
from flowrt.dataflow.matching import Firing
from flowrt.dataflow.parts import FAILED, BundledPart, BundleHeader, FailedHeader, PartHeader, PlanHeader
from flowrt.dataflow.payload import Payload, from_message, to_message
from flowrt.dataflow.runner import Runner
from flowrt.dataflow.selection import Siblings
from flowrt.exchange.dispatch import Combine, Dispatch
from flowrt.exchange.expert_client import ExpertClient
from flowrt.exchange.failover import Failover
from flowrt.exchange.trampoline import Collect, Forwarder, Return, Trampolines, bundle, forward, merge, split_bundle
from flowrt.graph.model import Edge, Graph, ModelPart, Node, PortSpec
from flowrt.operators.dispatch import partition
from flowrt.operators.replica_table import ReplicaTable
from flowrt.reliability.expert_map import ExpertMap, servers_by_expert
from flowrt.seams import RealClock
from flowrt.transports.contract import Identity
from flowrt.transports.wire.message import Message, Tag

SERVERS = {0: (0, 1, 2), 1: (2, 3, 4), 2: (4, 5, 0), 3: (5, 1, 3)}  # two replicas of each expert
BEHIND = {0: (0, 2), 1: (1, 3)}
TAG = Tag("source@1")
PLACEMENT = servers_by_expert(SERVERS, 6)


def ports(*names: str) -> dict[str, PortSpec]:
    return {name: PortSpec(name) for name in names}


def graph() -> Graph:
    gather = ports("plan", "residual") | {"parts": PortSpec("parts", takes="gather", count="plan")}
    nodes = [
        Node("source", "source", "a", {}, ports("x", "routing", "residual")),
        Node("dispatch", "dispatch", "a", ports("x", "routing"), ports("plan", *map("server{}".format, SERVERS), "via0", "via1")),
        Node("collect", "collect", "a", ports("bundle"), ports("part0", "part1")),
        Node("combine", "combine", "a", gather, ports("y")),
        Node("end", "m:f", "a", ports("y"), {}),
    ]
    nodes += [Node(f"experts.{server}", "experts", f"experts.{server}", ports("rows"), ports("results")) for server in SERVERS]
    edges = [
        Edge("source", "x", "dispatch", "x"),
        Edge("source", "routing", "dispatch", "routing"),
        Edge("source", "residual", "combine", "residual"),
        Edge("dispatch", "plan", "combine", "plan"),
        Edge("combine", "y", "end", "y"),
        Edge("collect", "part0", "combine", "parts"),
        Edge("collect", "part1", "combine", "parts"),
    ]

    def served(source: str, server: int, target: str, port: str, num_credits: int) -> None:
        request = Edge(source, f"server{server}", f"experts.{server}", "rows", credits=num_credits)
        edges.extend((request, Edge(f"experts.{server}", "results", target, port, response_to=request.name)))

    for server in SERVERS:
        served("dispatch", server, "combine", "parts", 2)
    for trampoline, behind in BEHIND.items():
        at = f"experts.{trampoline}"
        nodes += [
            Node(f"{at}.forward", "forward", at, ports("bundle"), ports(*map("server{}".format, behind))),
            Node(f"{at}.return", "return", at, ports("results"), ports("group0")),
        ]
        edges += [
            Edge("dispatch", f"via{trampoline}", f"{at}.forward", "bundle", credits=4),
            Edge(f"{at}.return", "group0", "collect", "bundle"),
        ]
        for server in behind:
            served(f"{at}.forward", server, f"{at}.return", "results", 0 if server == trampoline else 2)
    return Graph.of(nodes, edges, model=ModelPart("", "float32"), micro_batches=2)


def poster(graph: Graph, process: str, sent: Mapping[str, Any]) -> Callable[[Edge, Message], None]:
    """Of the runner of a process: appends each message to those of its receiver."""

    def post(edge: Edge, message: Message) -> None:
        (peer,) = {*graph.ends_of(edge)} - {process}
        sent[peer].append(message)

    return post


class Group:
    """A group with its runner. `sent[process]` are the messages on their way there, `ends` the results."""

    def __init__(self, strict: bool = False) -> None:
        self.graph, self.strict = graph(), strict
        trampolines = Trampolines(BEHIND, {0: "experts.0", 1: "experts.1"}, {0: 4, 1: 4})
        self.client = ExpertClient(ExpertMap(PLACEMENT), [f"experts.{server}" for server in SERVERS], trampolines=trampolines)
        self.sent: dict[str, deque[Message]] = {f"experts.{server}": deque() for server in SERVERS}
        self.ends: list[tuple[Tag, torch.Tensor]] = []
        self.failures: list[str] = []
        functions = {
            "dispatch": Dispatch(self.client, strict),
            "collect": Collect(self.client.parts, strict),
            "combine": Combine(self.client, strict),
        }
        self.runner = Runner(
            self.graph, "a", functions, InlineCompute(), RealClock(),
            OwnerOf(
                poster(self.graph, "a", self.sent),
                lambda firing: self.ends.append((firing.tag, firing.inputs["y"].tensors[0])),
                lambda tag, error: self.failures.append(str(error)),
                lambda output: self.failover.on_unsent(output),
                lambda edge, tag, message: self.failover.on_response(edge, tag, message),
            ),
        )  # fmt: skip
        self.client.trampolines.num_outstanding = lambda number: self.runner.num_outstanding(self.via(number))
        self.failover = Failover(self.graph, "dispatch", self.client, self.runner, self)
        self.incarnations = dict.fromkeys(self.sent, "1")
        self.failover.incarnation_of = lambda process: Identity(process, self.incarnations[process])

    def fail_steps(self, tags: Collection[Tag], error: str, *, crashed: bool = False) -> None:
        assert not tags, error

    def via(self, trampoline: int) -> int:
        return self.graph.edges[f"dispatch.via{trampoline} -> experts.{trampoline}.forward.bundle"].id

    def begin(self, step: int = 0) -> None:
        outputs = {"x": Payload((X_TH,)), "routing": Payload((IDS_TA, WEIGHTS_TA)), "residual": Payload((X_TH,))}
        self.runner.emit("source", Tag("source@1", step=step), outputs)
        self.runner.settle()

    def responses(self, message: Message) -> dict[int, Payload]:
        """The responses to the parts of a bundle, or to a direct part."""
        payload = from_message(message)
        requests = split_bundle(payload) if isinstance(payload.header, BundleHeader) else {"": payload}
        return {
            request.header_as(PartHeader).part: Payload((respond(*request.tensors, self.strict),), request.header)
            for request in requests.values()
        }

    def accept(self, peer: str, payload: Payload, edge: str, tag: Tag, kind: str = "data") -> None:
        self.runner.accept(peer, to_message(payload, self.graph.edges[edge].id, tag, kind))
        self.runner.settle()

    def serve(self, process: str) -> None:
        """The next message of a process: a part, or a bundle, whose responses come merged."""
        message = self.sent[process].popleft()
        if message.kind != "data":
            return
        responses = self.responses(message)
        if isinstance(message.header, BundleHeader):
            self.accept(process, merge(list(responses.values())), f"{process}.return.group0 -> collect.bundle", message.tag)
        else:
            self.accept(process, *responses.values(), f"{process}.results -> combine.parts", message.tag)

    def serve_all(self) -> None:
        while waiting := [process for process, messages in self.sent.items() if messages]:
            self.serve(waiting[0])

    def lose(self, number: int, cause: Mapping[str, bool] | None = None) -> None:
        """`cause`: fields of the launcher's DeathCause; None: it does not come in time."""
        process = f"experts.{number}"
        self.sent[process].clear()
        self.runner.end_peer(process)
        self.failover.mark_lost(process)
        self.failover.settle(process, DeathCause(process, "1", "died", **cause) if cause else None)

    def join(self, number: int, incarnation: str = "2") -> None:
        process = f"experts.{number}"
        self.incarnations[process] = incarnation
        self.runner.join_peer(process)
        self.failover.mark_joined(process)

    def notify(self, message: Message, number: int, incarnation: str) -> None:
        """The trampoline of a bundle has lost the server of its part `number`."""
        header = FailedHeader("lost", number, incarnation)
        peer = self.graph.nodes[next(edge.target for edge in self.graph.edges.values() if edge.id == message.edge)].process
        self.accept(peer, Payload((), header), f"{peer}.return.group0 -> collect.bundle", message.tag, FAILED)

    def check(self, steps: tuple[int, ...] = (0,)) -> None:
        assert sorted(tag.step for tag, _ in self.ends) == sorted(steps)
        for _, y_TH in self.ends:
            torch.testing.assert_close(y_TH, expected())
        assert not self.client.tags
        assert not self.failures


@pytest.fixture(params=[False, True], ids=["fast", "strict"])
def group(request: pytest.FixtureRequest) -> Group:
    return Group(request.param)


def test_bundle_is_cut_into_the_parts_that_dispatch_sends_directly():
    parts = dict(enumerate(partition(IDS_TA, WEIGHTS_TA, ReplicaTable.from_lists(PLACEMENT, 4))))
    direct = ExpertClient(ExpertMap(PLACEMENT), ["a", "b", "c", "d"]).add_tag(TAG, X_TH, ACTIVE, list(parts.values()))
    sent = from_message(to_message(bundle(X_TH, parts), 1, TAG))
    assert len(sent.tensors[0]) == len(X_TH), "each row once"
    forwarded = split_bundle(sent)
    assert forwarded.keys() == direct.keys()
    for port, payload in forwarded.items():
        assert payload.header_as(PartHeader).part == direct[port].header_as(PartHeader).part
        assert payload.header_as(PartHeader).siblings == len(parts) - 1
        for one, other in zip(payload.tensors, direct[port].tensors, strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("change", ["rows", "pairs", "index", "negative"])
def test_bundle_that_contradicts_itself_is_refused(change):
    header = BundleHeader((BundledPart(0, 0, 1 if change != "negative" else -1, 1), BundledPart(1, 1, 2, 1)))
    row_S = torch.tensor([0, 1] if change == "rows" else [9, 0, 1] if change == "index" else [0, 1, 1])
    row_P = torch.zeros(3 if change == "pairs" else 2, dtype=torch.int64)
    bad = Payload((torch.zeros(2, 4), row_S, row_P, row_P, row_P.float()), header)
    with pytest.raises((ValueError, IndexError, RuntimeError)):
        split_bundle(bad)


def test_responses_are_merged_for_the_group_that_emitted_their_tag():
    def response(source: str, part: int) -> Firing:
        return Firing("return", Tag(source), {"results": Payload((torch.full((2, 4), float(part)),), PartHeader(part, siblings=1))})

    failed = Firing("return", Tag("b.source@7"), {"results": Payload((), FailedHeader("no", 9))})
    batch = [response("a.source@1", 0), response("b.source@7", 1), failed, response("a.source@1", 2)]
    found = Return({"a.source": "group0", "b.source": "group1"})(batch)
    assert [list(outputs) for outputs in found] == [["group0"], ["group1"], ["group1"], []]
    assert found[0]["group0"].header == PlanHeader((0, 2))
    assert found[0]["group0"].tensors[0][:, 0].tolist() == [0.0, 0.0, 2.0, 2.0]
    assert found[2]["group1"].header == FailedHeader("no", 9)


def test_responses_to_a_bundle_wait_for_each_other_for_a_bounded_time():
    def response(step: int, siblings: int) -> Firing:
        return Firing("return", Tag("s@1", step=step), {"results": Payload((), PartHeader(0, siblings=siblings))})

    policy = Siblings(0.5)
    first, second, other = response(0, 1), response(0, 1), response(1, 2)
    assert policy.select([first], 10.0) == 10.5
    assert policy.select([first, other, second], 10.2) == [first, second]
    assert policy.select([other], 10.3) == 10.7
    assert policy.select([other], 10.7) == [other]
    assert policy.select([response(2, 1), response(3, 0)], 11.0) == [response(3, 0)]


def test_group_sends_one_message_per_trampoline(group):
    group.begin()
    assert [len(messages) for messages in group.sent.values()] == [1, 1, 0, 0]
    group.serve_all()
    group.check()
    assert [group.runner.num_outstanding(group.via(number)) for number in BEHIND] == [0, 0]


def test_credit_of_a_bundle_returns_with_the_last_response_to_its_parts(group):
    group.begin()
    bundled = group.sent["experts.0"].popleft()
    edge = group.runner._outbound.edges[group.via(0)]
    *first, last = group.responses(bundled).values()
    assert first
    for responses, num_free in ((first, 3), ([last], 4)):
        group.accept("experts.0", merge(responses), "experts.0.return.group0 -> collect.bundle", bundled.tag)
        assert edge.free == num_free
    group.serve_all()
    group.check()
    assert not any(group.sent.values()), "no message returns a credit"


def test_lost_trampoline_is_bypassed_until_it_is_back(group):
    """Its parts go directly, to the same living servers or to replicas; the bundle may have been held, split, or half returned."""
    for is_half_returned in (False, True):
        group.begin(step := len(group.ends))
        (message,) = group.sent["experts.0"]
        if is_half_returned:
            response = next(iter(group.responses(message).values()))
            group.accept("experts.0", merge([response]), "experts.0.return.group0 -> collect.bundle", message.tag)
        group.lose(0)
        assert not any(message.kind == "data" and isinstance(message.header, BundleHeader) for message in group.sent["experts.2"])
        group.serve_all()
        group.check(tuple(range(step + 1)))
        group.begin(step + 1)
        assert not group.sent["experts.0"]
        group.serve_all()
        group.join(0, str(step + 2))
        group.begin(step + 2)
        assert isinstance(group.sent["experts.0"][0].header, BundleHeader)
        group.serve_all()
        group.check(tuple(range(step + 3)))


def test_parts_that_were_split_before_the_loss_of_their_trampoline(group):
    route = group.client.trampolines.route

    def route_and_lose(*arguments):
        found = route(*arguments)
        group.lose(1)
        return found

    group.client.trampolines.route = route_and_lose
    group.begin()
    group.client.trampolines.route = route
    group.serve_all()
    group.check()


def test_part_whose_server_the_trampoline_has_lost_is_redispatched(group):
    """The group uses a later incarnation of the server already, or has settled its loss."""
    group.lose(2)
    group.join(2, "2")
    group.begin()
    bundled = group.sent["experts.0"].popleft()
    numbers = {part.server: part.part for part in bundled.header.parts}
    group.notify(bundled, numbers[2], "1")
    assert group.client.num_redispatched == 1
    rest = merge([response for number, response in group.responses(bundled).items() if number != numbers[2]])
    group.accept("experts.0", rest, "experts.0.return.group0 -> collect.bundle", bundled.tag)
    group.serve_all()
    group.check()


def test_loss_that_the_launcher_has_yet_to_announce_is_settled_once(group):
    group.begin()
    bundled = group.sent["experts.0"].popleft()
    numbers = {part.server: part.part for part in bundled.header.parts}
    group.notify(bundled, numbers[2], "1")
    assert group.client.num_redispatched == 0
    group.lose(2)
    assert group.client.num_redispatched == 1
    rest = merge([response for number, response in group.responses(bundled).items() if number != numbers[2]])
    group.accept("experts.0", rest, "experts.0.return.group0 -> collect.bundle", bundled.tag)
    group.serve_all()
    group.check()


@pytest.mark.parametrize("kind", ["twice", "unknown", "other trampoline"])
def test_response_that_was_not_requested_ends_the_link(group, kind):
    group.begin()
    bundled = group.sent["experts.0"].popleft()
    number, response = next(iter(group.responses(bundled).items()))
    other = next(number for number in group.responses(group.sent["experts.1"][0]))
    wrong = {"twice": number, "unknown": 99, "other trampoline": other}[kind]
    group.accept("experts.0", merge([response]), "experts.0.return.group0 -> collect.bundle", bundled.tag)
    bad = Payload(response.tensors, PlanHeader((wrong,)))
    with pytest.raises(BadMessageError, match="no outstanding request"):
        group.accept("experts.0", bad, "experts.0.return.group0 -> collect.bundle", bundled.tag)


def test_error_of_a_part_fails_its_step(group):
    group.begin()
    bundled = group.sent["experts.0"].popleft()
    header = FailedHeader("no room", bundled.header.parts[0].part)
    group.accept("experts.0", Payload((), header), "experts.0.return.group0 -> collect.bundle", bundled.tag, FAILED)
    assert group.failures == ["no room"]
    group.accept("experts.0", Payload((), FailedHeader("nonsense")), "experts.0.return.group0 -> collect.bundle", bundled.tag, FAILED)
    assert group.runner.num_outstanding(group.via(0)) == 0


def test_parts_go_directly_when_a_trampoline_has_too_many(group):
    """Two micro-batches may be in flight: a trampoline with two servers holds four parts of this group at most."""
    group.client.trampolines.num_outstanding = lambda number: 3 if number == 0 else 0
    group.begin()
    assert not any(isinstance(message.header, BundleHeader) for message in group.sent["experts.0"])
    assert isinstance(group.sent["experts.1"][0].header, BundleHeader)
    group.serve_all()
    group.check()


def test_late_trampoline_is_bypassed_and_its_servers_are_not_blamed(group):
    clock = [0.0]
    group.client._now = lambda: clock[0]
    group.begin()
    late = group.sent["experts.0"].popleft()
    group.serve("experts.1")
    clock[0] = 2.0
    group.failover.hedge()
    assert group.client.servers.late == ["via experts.0"]
    group.serve_all()
    group.begin(1)
    assert not any(isinstance(message.header, BundleHeader) for message in group.sent["experts.0"])
    group.serve_all()
    merged = merge(list(group.responses(late).values()))
    group.accept("experts.0", merged, "experts.0.return.group0 -> collect.bundle", late.tag)
    assert not group.client.servers.late
    group.check((0, 1))


def test_late_server_behind_a_trampoline_is_blamed_alone(group):
    clock = [0.0]
    group.client._now = lambda: clock[0]
    group.begin()
    bundled = group.sent["experts.0"].popleft()
    numbers = {part.server: part.part for part in bundled.header.parts}
    responses = group.responses(bundled)
    group.serve("experts.1")
    late = responses.pop(numbers[2])
    group.accept("experts.0", merge(list(responses.values())), "experts.0.return.group0 -> collect.bundle", bundled.tag)
    clock[0] = 2.0
    group.failover.hedge()
    assert group.client.servers.late == ["experts.2"]
    group.serve_all()
    group.check()
    group.accept("experts.0", merge([late]), "experts.0.return.group0 -> collect.bundle", bundled.tag)
    assert not group.client.servers.late


class Relay:
    """The runner of experts.0 as a trampoline. `sent[process]` are the messages on their way there."""

    def __init__(self) -> None:
        self.graph = graph()
        self.sent: dict[str, list[Message]] = {"a": [], "experts.2": []}
        functions = {
            "experts.0": lambda firings: [{"results": Payload((torch.zeros(1, 4),), each.inputs["rows"].header)} for each in firings],
            "experts.0.forward": forward,
            "experts.0.return": Return({"source": "group0"}),
        }
        self.runner = Runner(
            self.graph, "experts.0", functions, InlineCompute(), RealClock(),
            OwnerOf(
                poster(self.graph, "experts.0", self.sent),
                pytest.fail,
                lambda tag, error: self.forwarder.fail(tag, error),
                lambda output: self.forwarder.on_unsent(output),
            ),
        )  # fmt: skip
        self.forwarder = Forwarder(self.graph, "experts.0", self.runner)

    def accept(self, step: int = 0, header: BundleHeader | None = None) -> None:
        header = header or BundleHeader((BundledPart(0, 0, 1, 1), BundledPart(1, 2, 1, 1)))
        zero = torch.zeros(2, dtype=torch.int64)
        payload = Payload((torch.zeros(1, 4), zero, zero, zero, zero.float()), header)
        edge = self.graph.edges["dispatch.via0 -> experts.0.forward.bundle"].id
        self.runner.accept("a", to_message(payload, edge, Tag("source@1", step=step)))
        self.runner.settle()

    def notices(self) -> list[tuple[int, FailedHeader]]:
        return [(message.tag.step, message.header) for message in self.sent["a"] if message.kind == FAILED]

    def data(self, process: str) -> list[Message]:
        return [message for message in self.sent[process] if message.kind == "data"]


def test_trampoline_answers_parts_of_a_lost_server_with_its_incarnation():
    """Those that it has sent, that wait for a credit, and that come later."""
    relay = Relay()
    for step in range(3):
        relay.accept(step)
    assert len(relay.data("experts.2")) == 2, "two credits"
    relay.forwarder.mark_lost("experts.2", "7", relay.runner.end_peer("experts.2"))
    relay.accept(3)
    assert [(step, header.part, header.lost) for step, header in relay.notices()] == [(step, 1, "7") for step in range(4)]
    relay.runner.join_peer("experts.2")
    relay.accept(4)
    assert len(relay.data("experts.2")) == 3


def test_stalled_server_holds_up_no_other_part_of_a_bundle():
    relay = Relay()
    for step in range(5):
        relay.accept(step)
    assert len(relay.data("experts.2")) == 2
    assert [message.tag.step for message in relay.data("a")] == [0, 1, 2, 3, 4]
    assert {message.kind for message in relay.sent["a"]} == {"data"}, "no message returns a credit"


def test_parts_of_a_group_that_has_ended_are_not_answered():
    relay = Relay()
    relay.accept()
    relay.accept(1)
    relay.runner.end_peer("a", ["source@1"])
    request = relay.graph.edges["experts.0.forward.server2 -> experts.2.rows"].id
    assert relay.runner.num_outstanding(request) == 0, "servers drop the requests of the group, too"
    response = relay.graph.edges["experts.2.results -> experts.0.return.results"].id
    late = Payload((torch.zeros(1, 4),), PartHeader(1, siblings=1))
    relay.runner.accept("experts.2", to_message(late, response, Tag("source@1")))
    relay.runner.settle()
    assert not relay.runner._ready
    relay.forwarder.mark_lost("experts.2", "7", relay.runner.end_peer("experts.2"))
    assert relay.notices() == []


def test_bundle_that_cannot_be_cut_fails_all_its_parts():
    relay = Relay()
    relay.accept(header=BundleHeader((BundledPart(0, 0, 1, 1), BundledPart(1, 2, 4, 1))))
    ((_, header),) = relay.notices()
    assert (header.part, header.lost) == (None, None)
    assert not relay.data("experts.2")


def test_error_of_a_server_is_passed_on_and_releases_its_credit():
    relay = Relay()
    relay.accept()
    edge = relay.graph.edges["experts.2.results -> experts.0.return.results"].id
    relay.runner.accept("experts.2", Message(FAILED, Tag("source@1"), edge, FailedHeader("no room", 1)))
    relay.runner.settle()
    assert relay.notices() == [(0, FailedHeader("no room", 1))]
    assert relay.runner._outbound.edges[relay.graph.edges["experts.0.forward.server2 -> experts.2.rows"].id].free == 2


def test_server_drops_the_requests_of_a_trampoline_that_has_ended():
    """Its next incarnation has all credits and does not know these requests."""
    relay_graph, posted = graph(), []
    runner = Runner(
        relay_graph, "experts.2", {"experts.2": lambda firings: [{} for _ in firings]}, InlineCompute(), RealClock(),
        OwnerOf(lambda edge, message: posted.append(message), pytest.fail, pytest.fail),
    )  # fmt: skip
    zero = torch.zeros(1, dtype=torch.int64)
    request = Payload((torch.zeros(1, 4), zero, zero, zero.float()), PartHeader(1))
    for process, source in (("experts.0", "experts.0.forward"), ("a", "dispatch")):
        edge = relay_graph.edges[f"{source}.server2 -> experts.2.rows"].id
        runner.accept(process, to_message(request, edge, Tag("source@1", step=len(process))))
    runner.end_peer("experts.0")
    assert [firing.tag.step for firing in runner._ready["experts.2"]] == [1]
    assert posted == []
