"""Trampolines without channels: a group, and four servers, of which server 0 forwards to 0 and 2, and server 1 to 1 and 3.

Each process has its runner. Messages wait until a test delivers them, so that a hop can be lost at any moment.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import pytest
import torch
from dataflow.inline_compute import InlineCompute
from dataflow.owners import OwnerOf
from exchange.failover_client import ACTIVE, IDS_TA, WEIGHTS_TA, X_TH, expected, respond

from flowrt.actors.control import DeathCause
from flowrt.dataflow.matching import Firing
from flowrt.dataflow.parts import FAILED, FailedHeader, PartHeader
from flowrt.dataflow.payload import Payload, to_message
from flowrt.dataflow.runner import Runner
from flowrt.errors import FailureCause, OperatorError
from flowrt.exchange.dispatch import Combine, Dispatch
from flowrt.exchange.expert_client import ExpertClient
from flowrt.exchange.failover import Failover
from flowrt.exchange.servers import ServerState
from flowrt.exchange.trampoline import NO_REPLICA, Forward, Merge, Trampoline
from flowrt.graph.model import Edge, Graph, ModelPart, Node, PortSpec
from flowrt.reliability.expert_map import ExpertMap, servers_by_expert
from flowrt.seams import RealClock
from flowrt.transports.wire.message import Message, Tag

SERVERS = {0: (0, 1, 2), 1: (2, 3, 4), 2: (4, 5, 0), 3: (5, 1, 3)}  # two replicas of each expert
BEHIND = {4: (0, 2), 5: (1, 3)}  # servers 4 and 5 of the group are the trampolines in the processes of servers 0 and 1
HELD = SERVERS | {number: tuple(sorted({*SERVERS[one], *SERVERS[two]})) for number, (one, two) in BEHIND.items()}
NUM_EXPERTS = 6


def ports(*names: str) -> dict[str, PortSpec]:
    return {name: PortSpec(name) for name in names}


def gather(*names: str) -> dict[str, PortSpec]:
    return ports("plan", *names) | {"parts": PortSpec("parts", takes="gather", count="plan")}


def graph() -> Graph:
    nodes = [
        Node("source", "source", "a", {}, ports("x", "routing", "residual")),
        Node("dispatch", "dispatch", "a", ports("x", "routing"), ports("plan", *map("server{}".format, HELD))),
        Node("combine", "combine", "a", gather("residual"), ports("y")),
        Node("end", "m:f", "a", ports("y"), {}),
        *(Node(f"experts.{server}", "experts", f"experts.{server}", ports("rows"), ports("results")) for server in SERVERS),
    ]
    edges = [
        Edge("source", "x", "dispatch", "x"),
        Edge("source", "routing", "dispatch", "routing"),
        Edge("source", "residual", "combine", "residual"),
        Edge("dispatch", "plan", "combine", "plan"),
        Edge("combine", "y", "end", "y"),
    ]

    def connect(client: str, number: int, server: str, responder: str, receiver: str, num_credits: int) -> None:
        request = Edge(client, f"server{number}", server, "rows", credits=num_credits)
        edges.extend((request, Edge(responder, "results", receiver, "parts", response_to=request.name)))

    for server in SERVERS:
        connect("dispatch", server, f"experts.{server}", f"experts.{server}", "combine", 2)
    for number, behind in BEHIND.items():
        at = f"experts.{behind[0]}"
        nodes += [
            Node(f"{at}.forward", "forward", at, ports("rows"), ports("plan", "server0", "server1")),
            Node(f"{at}.merge", "merge", at, gather(), ports("results")),
        ]
        edges.append(Edge(f"{at}.forward", "plan", f"{at}.merge", "plan"))
        connect("dispatch", number, f"{at}.forward", f"{at}.merge", "combine", 2)
        for place, server in enumerate(behind):
            connect(f"{at}.forward", place, f"experts.{server}", f"experts.{server}", f"{at}.merge", 2 if place else 0)
    return Graph.of(nodes, edges, model=ModelPart("", "float32"), micro_batches=2)


class Run:
    """The runners of all processes. `sent[process]` are the messages on their way there, by sender; `ends` the results of the group."""

    def __init__(self, strict: bool = False) -> None:
        self.graph, self.strict, self.clock = graph(), strict, 0.0
        self.sent: dict[str, deque[tuple[str, Message]]] = {name: deque() for name in self.graph.process_names()}
        self.ends: list[tuple[Tag, torch.Tensor]] = []
        self.failures: list[str] = []
        self.crashed: list[Tag] = []
        self.epoch = 0  # of the group
        self.broken: set[int] = set()  # servers whose operator fails
        self.failovers: dict[str, Failover] = {}
        self.runners: dict[str, Runner] = {}
        for process in self.sent:
            self.start(process)
        self.client = self.failovers["a"].client

    def start(self, process: str) -> None:
        functions: dict[str, Any] = {}
        if process == "a":
            client = self.new_client(HELD, BEHIND)
            functions |= {"dispatch": Dispatch(client, self.strict), "combine": Combine(client, self.strict)}
        else:
            functions[process] = lambda firings: [self.compute(int(process[-1]), firing) for firing in firings]
        behind = next((behind for behind in BEHIND.values() if process == f"experts.{behind[0]}"), ())
        if behind:
            client = self.new_client({place: SERVERS[server] for place, server in enumerate(behind)}, {}, behind)
            functions[f"{process}.forward"] = Forward(client, ACTIVE, self.strict)
            functions[f"{process}.merge"] = Merge(client, self.strict)

        def post(edge: Edge, message: Message) -> None:
            (peer,) = {*self.graph.ends_of(edge)} - {process}
            self.sent[peer].append((process, message))

        def on_failed(tag: Tag, error: OperatorError) -> None:
            failover = self.failovers.get(process)
            failover.fail(tag, error) if isinstance(failover, Trampoline) else self.failures.append(str(error))

        owner = OwnerOf(
            post,
            lambda firing: self.ends.append((firing.tag, firing.inputs["y"].tensors[0])),
            on_failed,
            lambda output: self.failovers[process].on_unsent(output) if process in self.failovers else None,
            lambda edge, tag, message: self.failovers[process].on_response(edge, tag, message) if process in self.failovers else None,
        )
        runner = self.runners[process] = Runner(self.graph, process, functions, InlineCompute(), RealClock(), owner)
        if process == "a":
            self.failovers[process] = Failover(self.graph, "dispatch", client, runner, self)
        elif behind:
            self.failovers[process] = Trampoline(self.graph, f"{process}.forward", client, runner)

    def new_client(
        self, held: Mapping[int, Sequence[int]], behind: Mapping[int, Collection[int]], servers: Sequence[int] = (0, 1, 2, 3, 0, 1)
    ) -> ExpertClient:
        names = {number: f"experts.{server}" for number, server in enumerate(servers[: len(held)])}
        return ExpertClient(ExpertMap(servers_by_expert(held, NUM_EXPERTS)), names, now=lambda: self.clock, behind=behind)

    def compute(self, server: int, firing: Firing) -> dict[str, Payload]:
        payload = firing.inputs["rows"]
        assert {*payload.tensors[2].tolist()} <= {*SERVERS[server]}, "a request for an expert that the server does not hold"
        if server in self.broken:
            raise OperatorError("no room")
        return {"results": Payload((respond(*payload.tensors, self.strict),), payload.header_as(PartHeader))}

    def fail_steps(self, tags: Collection[Tag], error: str, *, crashed: bool = False, left: Collection[Tag] = ()) -> None:
        """As a group: a new epoch begins, and later news of the old one are ignored."""
        tags = [tag for tag in tags if tag.epoch == self.epoch]
        self.epoch += bool(tags)
        self.crashed += tags if crashed else []
        for tag in tags:
            self.runners["a"].roll_back(tag.source, tag.epoch + 1)
            self.client.roll_back(tag.source, tag.epoch + 1)

    def begin(self, step: int = 0, epoch: int = 0) -> None:
        outputs = {"x": Payload((X_TH,)), "routing": Payload((IDS_TA, WEIGHTS_TA)), "residual": Payload((X_TH,))}
        self.runners["a"].emit("source", Tag("source@1", epoch, step=step), outputs)
        self.runners["a"].settle()

    def accept_part(self, part: Payload, step: int = 0) -> None:
        """The trampoline in the process of server 0 gets a part."""
        edge = self.graph.edges["dispatch.server4 -> experts.0.forward.rows"].id
        self.runners["experts.0"].accept("a", to_message(part, edge, Tag("source@1", step=step)))
        self.runners["experts.0"].settle()

    def deliver(self, process: str, sender: str | None = None) -> None:
        """Deliver what waits for a process, from one sender or from all."""
        waiting, self.sent[process] = self.sent[process], deque()
        for peer, message in waiting:
            if sender is None or peer == sender:
                self.runners[process].accept(peer, message)
                self.runners[process].settle()
            else:
                self.sent[process].append((peer, message))

    def deliver_all(self, *besides: str) -> None:
        """Deliver until nothing is on its way, except to the processes `besides`."""
        while waiting := [process for process, messages in self.sent.items() if messages and process not in besides]:
            self.deliver(waiting[0])

    def requests(self, process: str, receiver: str) -> list[Message]:
        """The requests on their way to a process whose receiver is this node."""
        return [message for _, message in self.sent[process] if self.node_of(message) == receiver and message.kind == "data"]

    def node_of(self, message: Message) -> str:
        return next(edge.target for edge in self.graph.edges.values() if edge.id == message.edge)

    def lose(self, number: int, **cause: bool) -> None:
        """A server dies. `cause`: fields of the launcher's DeathCause."""
        self.notice_loss(number)
        del self.runners[f"experts.{number}"]
        self.failovers.pop(f"experts.{number}", None)
        for failover in self.failovers.values():
            failover.settle(f"experts.{number}", DeathCause(f"experts.{number}", "1", "died", **cause))

    def notice_loss(self, number: int, *, by: Collection[str] = ()) -> None:
        """All other processes, or these, learn of its death; its messages are gone."""
        lost = f"experts.{number}"
        self.sent[lost].clear()
        for process in self.runners:
            if process != lost and (process in by or not by):
                self.lose_at(process, lost)

    def lose_at(self, process: str, lost: str) -> None:
        self.sent[process] = deque((peer, message) for peer, message in self.sent[process] if peer != lost)
        self.runners[process].end_peer(lost)
        if process in self.failovers:
            self.failovers[process].mark_lost(lost)

    def join(self, number: int) -> None:
        joined = f"experts.{number}"
        self.start(joined)
        for process, runner in self.runners.items():
            if process != joined:
                runner.join_peer(joined)
                if process in self.failovers:
                    self.failovers[process].mark_joined(joined)

    def finish(self, steps: Sequence[int] = (0,)) -> None:
        """All messages arrive, and these steps have ended."""
        self.deliver_all()
        self.check(steps)

    def check(self, steps: Sequence[int] = (0,)) -> None:
        assert sorted(tag.step for tag, _ in self.ends) == sorted(steps)
        for _, y_TH in self.ends:
            assert torch.equal(y_TH, expected())
        self.check_empty()

    def check_empty(self) -> None:
        assert not self.failures
        assert not any(self.sent.values())
        for process, runner in self.runners.items():
            assert not runner.leftovers(), process
            assert all(free == size for free, size in runner.snapshot().credits.values()), process
        for process, failover in self.failovers.items():
            assert not failover.leftovers(), process


@pytest.fixture(params=[False, True], ids=["fast", "strict"])
def run(request: pytest.FixtureRequest) -> Run:
    return Run(request.param)


@pytest.fixture
def fast():
    return Run()


def failed(run: Run, cause: FailureCause) -> list[tuple[int, str]]:
    """Step and text of the failures on their way to the group."""
    messages = [message for _, message in run.sent["a"] if message.kind == FAILED]
    headers = [(message.tag, message.decode_header(FailedHeader)) for message in messages]
    assert all(header.cause == cause for _, header in headers)
    return [(tag.step, header.error) for tag, header in headers]


def test_group_sends_one_message_per_trampoline_and_gets_one_back(run):
    run.begin()
    assert [len(messages) for messages in run.sent.values()] == [0, 1, 1, 0, 0]
    assert len(run.sent["experts.0"][0][1].tensors[0].data) <= X_TH.nbytes, "each row once"
    run.deliver_all("a")
    assert [run.node_of(message) for _, message in run.sent["a"]] == ["combine", "combine"]
    run.deliver("a")
    run.check()


def test_parts_of_several_tags_are_forwarded_at_once(run):
    run.begin(0)
    run.begin(1)
    run.finish((0, 1))


def test_lost_trampoline_is_bypassed_until_it_is_back(run):
    """Its part may have been on its way, forwarded, or half computed."""
    for number, moment in enumerate(("on its way", "forwarded", "half computed")):
        run.begin(step := 2 * number)
        if moment != "on its way":
            run.deliver("experts.0")
        if moment == "half computed":
            run.deliver("experts.2")
        run.lose(0)
        run.finish(range(step + 1))
        run.begin(step + 1)
        assert not run.sent["experts.0"]
        run.deliver_all()
        run.join(0)
        run.check(range(step + 2))
    run.begin(9)
    assert run.requests("experts.0", "experts.0.forward")
    run.deliver_all()


def test_part_that_was_split_before_the_loss_of_its_trampoline(run):
    split = run.client.replica_table

    def split_and_lose(layer: int) -> Any:
        table = split(layer)
        run.lose(1)
        return table

    run.client.replica_table = split_and_lose
    run.begin()
    run.deliver_all()
    run.join(1)
    run.check()


def test_trampoline_redispatches_to_a_replica_that_it_reaches():
    """Expert 0 is on both servers; the number of the step decides which one gets the first part."""
    run, zero = Run(), torch.zeros(1, dtype=torch.int64)
    for step in range(2):
        run.accept_part(Payload((X_TH[:1], zero, zero, torch.ones(1)), PartHeader(7)), step)
    assert len(run.sent["experts.2"]) == 1
    run.lose(2)
    assert run.failovers["experts.0"].client.num_redispatched == 1
    run.runners["experts.0"].settle()
    responses = [(message.kind, message.tag.step, message.decode_header(PartHeader).part) for _, message in run.sent["a"]]
    assert sorted(responses) == [("data", 0, 7), ("data", 1, 7)]


def test_part_of_a_server_that_its_trampoline_has_lost_goes_past_it(run):
    """Whether the group learns of the death before or after."""
    for step, first in enumerate(("experts.0", "a")):
        run.begin(step)
        run.deliver("experts.0")
        run.notice_loss(2, by=(first,))
        run.notice_loss(2, by=({"experts.0", "a"} - {first}))
        for process in ("experts.0", "a"):
            run.failovers[process].settle("experts.2", DeathCause("experts.2", "1", "died"))
        assert failed(run, FailureCause.LOST) == [(step, NO_REPLICA)]
        run.deliver_all()
        run.join(2)
        run.check(range(step + 1))
        assert not run.crashed


def test_trampoline_that_has_lost_a_server_before_its_group_reports_its_parts_lost(run):
    run.notice_loss(2, by=("experts.0",))
    run.begin()
    run.deliver("experts.0")
    assert failed(run, FailureCause.LOST) == [(0, NO_REPLICA)]
    run.notice_loss(2, by=("a",))
    run.deliver_all()
    run.join(2)
    run.check()


def test_group_uses_a_trampoline_without_its_lost_server(run):
    run.lose(2)
    run.begin()
    assert run.requests("experts.0", "experts.0.forward")
    run.deliver_all()
    assert run.client.num_redispatched == 0
    run.join(2)
    run.check()


@pytest.mark.parametrize("steps", [(0,), (0, 1)])
def test_crash_of_a_server_behind_a_trampoline_fails_all_steps_with_parts_there(run, steps):
    """Each has a report of its own."""
    for step in steps:
        run.begin(step)
    run.deliver("experts.0")
    run.lose(2, may_recur=True)
    assert failed(run, FailureCause.CRASHED) == [(step, "experts.2 died") for step in steps]
    run.deliver_all()
    assert run.crashed == [Tag("source@1", step=step) for step in steps]
    run.join(2)
    run.begin(epoch=1)
    run.finish()


@pytest.mark.parametrize("first", ["group", "trampoline"])
def test_crash_fails_steps_with_parts_behind_a_trampoline_and_past_it_together(run, first):
    """The notice of the death and the report of the trampoline come one after the other, and the first one rolls all steps back."""
    run.begin(0)
    run.client.servers.note_late(4)
    run.begin(1)
    run.client.servers.note_response(4)
    run.deliver("experts.0")
    run.notice_loss(2)
    del run.runners["experts.2"]
    for process in ("experts.0", "a") if first == "trampoline" else ("a", "experts.0"):
        run.failovers[process].settle("experts.2", DeathCause("experts.2", "1", "died", may_recur=True))
        run.deliver("a")
    assert sorted(tag.step for tag in run.crashed) == [0, 1]
    run.deliver_all()
    assert sorted(tag.step for tag in run.crashed) == [0, 1]


@pytest.mark.parametrize("first", ["crash", "trampoline"])
def test_crash_behind_a_trampoline_that_is_lost_before_it_reports_fails_the_step(run, first):
    """As a recovery policy does that ends all servers of a role with the one that crashed."""
    run.begin()
    run.deliver("experts.0")
    if first == "trampoline":
        run.notice_loss(0, by=["a"])
    run.notice_loss(2, by=["a"])
    run.failovers["a"].settle("experts.2", DeathCause("experts.2", "1", "died", may_recur=True))
    run.lose(0, is_on_purpose=True)
    assert run.crashed == [Tag("source@1")]
    del run.runners["experts.2"]
    run.join(0)
    run.join(2)
    run.begin(epoch=1)
    run.finish()


def test_parts_that_came_to_a_trampoline_after_a_crash_behind_it_go_to_replicas(run):
    run.lose(2, may_recur=True)
    run.begin()
    run.lose(0, is_on_purpose=True)
    assert run.crashed == []


def test_parts_of_a_suspect_pass_no_trampoline(fast):
    fast.client.computes_alone = True
    fast.begin()
    for process in SERVERS:
        assert not fast.requests(f"experts.{process}", f"experts.{process}.forward")
    fast.finish()


def test_error_of_a_server_behind_a_trampoline_is_passed_on(run):
    run.broken |= {0, 2}  # the own server of the trampoline, and another
    run.begin()
    run.deliver_all()
    assert run.failures == ["no room"]
    run.failures.clear()
    run.fail_steps([Tag("source@1")], "")
    run.check_empty()


@pytest.mark.parametrize("state", [ServerState.LATE, ServerState.AVOIDED, ServerState.SLOW])
@pytest.mark.parametrize("server", [0, 2, 4])
def test_trampoline_forwards_nothing_while_it_or_a_server_behind_it_is_not_usable(state, server, fast: Run):
    servers = fast.client.servers
    {
        ServerState.LATE: servers.note_late,
        ServerState.AVOIDED: servers.avoid,
        ServerState.SLOW: lambda server: setattr(servers.hedging, "slow", frozenset({server})),
    }[state](server)
    fast.begin()
    assert not fast.requests("experts.0", "experts.0.forward")
    assert fast.requests("experts.1", "experts.1.forward")
    fast.deliver_all()
    assert len(fast.ends) == 1


def test_late_trampoline_is_bypassed_until_it_responds(run):
    run.begin()
    run.deliver_all("experts.0")
    run.clock = 2.0
    run.failovers["a"].hedge()
    assert run.client.servers.late == [4]
    sent = [edge for messages in run.sent.values() for _, message in messages if (edge := run.node_of(message)).endswith("forward")]
    assert sent == ["experts.0.forward"], "what is sent again passes no trampoline"
    late = run.requests("experts.0", "experts.0.forward")
    run.sent["experts.0"] = deque(each for each in run.sent["experts.0"] if each[1] not in late)
    run.deliver_all()
    run.begin(1)
    assert not run.requests("experts.0", "experts.0.forward")
    run.deliver_all()
    run.sent["experts.0"].extend(("a", message) for message in late)
    run.deliver_all()
    assert not run.client.servers.late
    run.check((0, 1))


def test_hedge_avoids_all_servers_behind_a_late_trampoline(fast):
    fast.begin()
    fast.deliver_all("experts.0")
    fast.clock = 2.0
    fast.failovers["a"].hedge()
    experts = {expert for _, message in fast.sent["experts.2"] for expert in message.tensors[2].data}
    assert not experts & ({*SERVERS[1]} | {*SERVERS[3]})


def test_stalled_server_holds_up_no_part_of_another(fast):
    for step in range(2):
        fast.begin(step)
    fast.deliver_all("experts.2")
    assert len(fast.requests("experts.2", "experts.2")) == 2
    assert not fast.runners["experts.0"].num_waiting()
    fast.finish((0, 1))


def test_nothing_is_kept_of_a_group_that_has_ended(run):
    run.begin()
    run.deliver("experts.0")
    run.sent["a"].clear()
    for name in ("experts.0", "experts.1", "experts.2", "experts.3"):
        run.runners[name].end_peer("a", ["source@1"])
        if name in run.failovers:
            run.failovers[name].mark_lost("a", ["source@1"])
    assert not run.failovers["experts.0"].client.tags
    run.sent["experts.1"].clear()
    run.deliver_all()
    assert not run.ends
    for name in ("experts.0", "experts.1", "experts.2", "experts.3"):
        assert not run.runners[name].leftovers()


@pytest.mark.parametrize(
    ("rows", "expert"),
    [([1, 0], 0), ([0, 0, 0], 0), ([0, 7], 0), ([0, -1], 0), ([], 0), ([0], 99)],
    ids=["descending", "too many pairs of a row", "no such row", "negative", "none", "no such expert"],
)
def test_part_that_cannot_be_split_fails_alone(rows, expert, fast: Run):
    row_P = torch.tensor(rows, dtype=torch.int64)
    fast.accept_part(Payload((X_TH[:2], row_P, torch.full_like(row_P, expert), torch.ones(len(rows))), PartHeader(7)))
    assert len(failed(fast, FailureCause.ERROR)) == 1
    assert fast.sent["a"][0][1].decode_header(FailedHeader).part == 7
    assert not fast.failovers["experts.0"].client.tags
    assert not fast.runners["experts.0"].leftovers()
    fast.sent["a"].clear()
    fast.begin()
    fast.finish()


def test_second_part_of_a_tag_is_refused(fast):
    fast.begin()
    ((_, message),) = fast.sent["experts.0"]
    fast.runners["experts.0"].accept("a", message)
    fast.runners["experts.0"].accept("a", message)
    fast.runners["experts.0"].settle()
    ((_, text),) = failed(fast, FailureCause.ERROR)
    assert "a second part of a tag" in text


def test_server_drops_the_requests_of_a_trampoline_that_has_ended(fast):
    """Its next incarnation has all credits and does not know these requests."""
    fast.begin()
    fast.deliver("experts.0")
    ((peer, request),) = fast.sent["experts.2"]
    server = fast.runners["experts.2"]
    server.accept(peer, request)
    server.end_peer("experts.0")
    server.settle()
    assert not fast.sent["experts.0"]


def test_parts_for_a_server_may_be_at_the_trampoline_in_front_of_it(run):
    assert [run.failovers["a"].ways_to(f"experts.{server}") for server in (0, 2)] == [{"experts.0"}, {"experts.0", "experts.2"}]
    assert run.failovers["experts.0"].ways_to("experts.2") == {"experts.2"}
