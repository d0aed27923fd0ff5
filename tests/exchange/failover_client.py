"""The client of the expert servers without channels, with real tensors that expose mistakes, for tests of deaths, hedges and suspects."""

from collections import deque

import pytest
import torch
from dataflow.inline_compute import InlineCompute
from dataflow.owners import OwnerOf

from flowrt.actors.control import DeathCause
from flowrt.dataflow.matching import Firing
from flowrt.dataflow.payload import Payload, from_message, to_message
from flowrt.dataflow.runner import Runner
from flowrt.exchange.dispatch import Combine, Dispatch
from flowrt.exchange.expert_client import ExpertClient
from flowrt.exchange.failover import Failover
from flowrt.graph.model import Edge, Graph, ModelPart, Node, PortSpec
from flowrt.reliability.expert_map import ExpertMap, servers_by_expert
from flowrt.seams import RealClock
from flowrt.transports.wire.message import Tag

NUM_EXPERTS, ROWS, ACTIVE, WIDTH = 6, 5, 2, 4
SERVERS = {0: (0, 1, 2, 3), 1: (2, 3, 4, 5), 2: (0, 1, 4, 5)}  # two copies of each expert
IDS_TA = torch.tensor([[0, 2], [1, 4], [3, 5], [2, 4], [5, 0]])
X_TH = torch.arange(float(ROWS * WIDTH)).reshape(ROWS, WIDTH)
WEIGHTS_TA = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0], [7.0, 8.0], [9.0, 10.0]])


def respond(x_RH, row_P, expert_P, weight_P, strict):
    """An expert multiplies by its number + 1: whatever is lost, doubled or in a wrong row shows."""
    y_PH = x_RH[row_P] * (expert_P + 1).unsqueeze(1)
    return y_PH if strict else torch.zeros_like(x_RH).index_add_(0, row_P, y_PH * weight_P.unsqueeze(1))


def expected():
    return X_TH + sum(X_TH * (WEIGHTS_TA[:, slot] * (IDS_TA[:, slot] + 1)).unsqueeze(1) for slot in range(ACTIVE))


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
        self.client = ExpertClient(ExpertMap(servers_by_expert(SERVERS, NUM_EXPERTS)), {server: f"experts.{server}" for server in SERVERS})
        self.requested = {server: deque() for server in SERVERS}
        self.ends, self.suspects, self.failures = [], [], []
        functions = {"dispatch": Dispatch(self.client, strict), "combine": Combine(self.client, strict)}
        self.runner = Runner(
            self.graph,
            "a",
            functions,
            InlineCompute(),
            RealClock(),
            OwnerOf(
                self.post,
                self.end,
                lambda tag, error: self.failures.append((tag, error)),
                lambda output: self.failover.on_unsent(output),
                lambda edge, tag, message: self.failover.on_response(edge, tag, message),
            ),
            schemas=schemas(self),
        )
        self.failover = Failover(self.graph, "dispatch", self.client, self.runner, self)
        if not fences:
            self.client.record_loss = lambda tag, number: 1

    def server(self, server):
        """The runner of an expert server, which only receives."""
        functions = {f"experts.{server}": lambda firings: [{} for _ in firings]}
        return Runner(self.graph, f"experts.{server}", functions, InlineCompute(), RealClock(), OwnerOf(self.post, self.end, pytest.fail))

    def post(self, edge, message):
        self.requested[int(edge.target.removeprefix("experts."))].append(message)

    def end(self, firing: Firing):
        self.ends.append((firing.tag, firing.inputs["y"].tensors[0]))

    def begin(self, step=0, epoch=0, value=None):
        """`value`: of the first column of the last input row."""
        x_TH = X_TH.clone()
        if value is not None:
            x_TH[-1, 0] = value
        outputs = {"x": Payload((x_TH,)), "routing": Payload((IDS_TA, WEIGHTS_TA)), "residual": Payload((X_TH,))}
        self.runner.emit("source", Tag("s@1", step=step, epoch=epoch), outputs)
        self.runner.settle()

    def dispatch(self):
        """Outputs of the dispatch node on the compute thread, which have not left."""
        firing = Firing("dispatch", Tag("s@1"), {"x": Payload((X_TH,)), "routing": Payload((IDS_TA, WEIGHTS_TA))})
        self.runner.emit("source", firing.tag, {"residual": Payload((X_TH,))})
        return self.runner._subgraph.route(firing, Dispatch(self.client, self.strict)([firing])[0])

    def request_edge(self, server):
        return self.graph.edges[f"dispatch.server{server} -> experts.{server}.rows"].id

    def response_edge(self, server):
        return self.graph.edges[f"experts.{server}.results -> combine.parts"].id

    def response(self, server, request, change=lambda y: y):
        """Of this server; `change` is made to its rows."""
        payload = from_message(request)
        assert set(payload.tensors[2].tolist()) <= set(SERVERS[server]), "a request for an expert that the server does not hold"
        y = change(respond(*payload.tensors, self.strict))
        return to_message(Payload((y,), payload.header), self.response_edge(server), request.tag)

    def serve(self, server, count=1):
        for _ in range(count):
            self.runner.accept(f"experts.{server}", self.response(server, self.requested[server].popleft()))
            self.runner.settle()

    def serve_all(self):
        while waiting := [server for server, requests in self.requested.items() if requests]:
            self.serve(waiting[0])

    def finish(self, steps=(0,)):
        """The servers respond to everything, and these steps have ended."""
        self.serve_all()
        self.check(steps)

    def fail_steps(self, tags, error, *, crashed=False, left=()):
        """As a group: the steps are given up."""
        self.suspects += [(tag, crashed) for tag in tags]
        self.left = [*left]
        for tag in tags:
            self.runner.roll_back(tag.source, tag.epoch + 1)
            self.client.roll_back(tag.source, tag.epoch + 1)

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
