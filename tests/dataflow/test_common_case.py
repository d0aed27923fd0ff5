"""The commonest case of a runner in C: drawn messages have the same effect with it and without it."""

from __future__ import annotations

import gc
import random
import weakref

import msgspec
import pytest
import torch
from dataflow.inline_compute import InlineCompute
from dataflow.owners import OwnerOf

from flowrt.actors.link import BadMessageError
from flowrt.dataflow.common_case import CommonCase
from flowrt.dataflow.outbound_edges import CreditHeader
from flowrt.dataflow.payload import Payload
from flowrt.dataflow.runner import Runner
from flowrt.dataflow.schemas import MessageSchema, parse_spec
from flowrt.dataflow.subgraph import FusedSubgraph
from flowrt.errors import OperatorError
from flowrt.graph.model import Edge, Graph, ModelPart, Node, PortSpec
from flowrt.graph.notation import TagStep
from flowrt.transports.wire.message import Message, Tag, Tensor, TensorSpec

pytestmark = pytest.mark.skipif(CommonCase is None, reason="the C module was not built")

FAILING, STRANGE, LISTLESS, WITHOUT, TOO_LARGE = 13.0, 14.0, 15.0, 16.0, 17.0
SOURCES = ("src@1", "other@1")


def node(name, process, inputs=(), outputs=(), **more):
    ports = {port: PortSpec(port) for port in inputs}
    return Node(name, "source" if name == "src" else "m:f", process, ports, {port: PortSpec(port) for port in outputs}, **more)


def graph_of(in_order: bool, model: bool) -> Graph:
    """`one` sends to two workers and to `joined`, which waits for a second message; `last` is a sink."""
    nodes = [
        node("src", "a", outputs=("x", "z")),
        node("plain", "w", ("x",), ("y",)),
        node("end", "c", ("x",)),
        node("other_end", "b", ("x",)),
        node("one", "w", ("x",), ("y", "z"), stateful=in_order),
        node("joined", "w", ("x", "z"), ("y",)),
        node("last", "w", ("x",)),
        node("there", "b", ("x",), ("y",)),
        node("beyond", "c", ("x",)),
    ]
    edges = [
        Edge("src", "x", "one", "x", credits=4),
        Edge("src", "z", "joined", "z", credits=3),
        Edge("src", "x", "plain", "x", credits=8),
        Edge("plain", "y", "end", "x", credits=4, tag=TagStep("next_layer")),
        Edge("plain", "y", "other_end", "x", credits=8),
        Edge("one", "y", "there", "x", credits=3, tag=TagStep("next_layer")),
        Edge("one", "y", "beyond", "x", credits=8),
        Edge("one", "z", "joined", "x"),
        Edge("joined", "y", "beyond", "x", credits=2, tag=TagStep("next_step")),
        Edge("there", "y", "last", "x", credits=1),
    ]
    return Graph.of(nodes, edges, model=ModelPart("", "float32") if model else None)


class Recorded:
    """A runner, and all that it does to others."""

    def __init__(self, graph: Graph, compiled: bool, with_schemas: bool) -> None:
        self.graph, self.events, self.time = graph, [], 0.0
        self.clock = self
        schema = MessageSchema((parse_spec("float32[n]"),), frozenset({"src"}), 2)
        ids = [edge.id for edge in graph.edges.values() if edge.target in ("one", "joined", "plain") and edge.source == "src"]
        owner = OwnerOf(self._post, self._sink, self._failed)
        self.runner = Runner(
            graph,
            "w",
            {"one": self._one, "plain": self._one, "joined": self._joined},
            InlineCompute(),
            self,
            owner,
            schemas=dict.fromkeys(ids, schema) if with_schemas else {},
            compiled=compiled,
        )

    def now(self) -> float:
        self.time += 1.0
        return self.time

    async def sleep(self, seconds: float) -> None:
        raise NotImplementedError

    def _post(self, edge, message):
        if message.tensors and bytes(memoryview(message.tensors[0].data).cast("B"))[:4] == msgspec.msgpack.encode("no"):
            raise OverflowError("full")
        header = msgspec.msgpack.encode(message.header)
        tensors = [(each.spec, bytes(memoryview(each.data).cast("B"))) for each in message.tensors]
        self.events.append(("post", edge.id, message.kind, message.tag, message.edge, header, tensors))

    def _sink(self, firing):
        self.events.append(("sink", firing.node, firing.tag, firing.via, value_of(firing.inputs["x"])))

    def _failed(self, tag, error):
        self.events.append(("failed", tag, str(error)))

    def _one(self, firings):
        results = []
        for firing in firings:
            value = value_of(firing.inputs["x"])
            assert torch.is_inference_mode_enabled()
            if value == FAILING:
                raise ValueError("a bad value")
            if value == STRANGE:
                return [{"unknown": number(1)}]
            if value == LISTLESS:
                return []
            if value == TOO_LARGE:
                results.append({"y": Payload((torch.zeros(1).expand(1 << 30),))})
            else:
                only = value == WITHOUT or firing.node == "plain"
                results.append({"y": number(value + 1)} if only else {"y": number(value + 1), "z": number(-value)})
        return results

    def _joined(self, firings):
        return tuple({"y": number(value_of(each.inputs["x"]) * value_of(each.inputs["z"]))} for each in firings)

    def attempt(self, call):
        try:
            self.events.append(("returned", call(self.runner)))
        except (BadMessageError, OperatorError) as error:
            self.events.append(("raised", type(error), str(error)))

    def state(self):
        counts = {name: (each.num_calls, each.num_firings) for name, each in self.runner.statistics.nodes.items()}
        sent, failure = self.runner.statistics.sent, repr(self.runner._failure)
        return self.runner.snapshot(), self.runner.waiting(), self.runner.leftovers(), counts, sent, failure, self.runner._ready.wake_at


def number(value):
    return Payload((torch.tensor([float(value)]),))


def value_of(payload):
    return payload.tensors[0][0].item()


def drawn_call(chance: random.Random, graph: Graph, calm: bool):
    """A call of a runner; most are of the commonest case. `calm`: no call fails, and none is fenced: then the C code goes on."""
    tag = Tag(chance.choice(SOURCES[: 1 + (chance.random() < 0.05)]), 0, chance.choice((0, 0, 0, 5)), chance.randrange(20), 0)
    edges = [edge for edge in graph.edges.values() if graph.crosses(edge)]
    kind = chance.choices(
        ("data", "credit", "settle", "strange", "fence", "roll back"), (10, 6, 8, 1, 0 if calm else 0.1, 0 if calm else 0.1)
    )[0]
    if kind == "settle":
        return lambda runner: runner.settle()
    if kind == "fence":
        return lambda runner: runner.fence(tag.source, (tag.step,))
    if kind == "roll back":
        return lambda runner: runner.roll_back("other@1", 1)
    if kind == "credit":
        edge = chance.choice([edge for edge in edges if graph.ends_of(edge)[0] == "w"])
        message = Message("credit", edge=edge.id, header=msgspec.msgpack.encode(CreditHeader(chance.choice((1, 1, 2)))))
        return lambda runner: runner.accept(graph.ends_of(edge)[1], message)
    edge = chance.choice([edge for edge in edges if graph.ends_of(edge)[1] == "w"])
    unusual = chance.random() < 0.04 and not calm
    value = chance.choice((FAILING, STRANGE, LISTLESS, WITHOUT, TOO_LARGE) if unusual else (1.0, 2.0, 3.0, 4.0, 5.0))
    buffer = bytearray(torch.tensor([value, 0.0]).numpy().tobytes())
    fields = {"kind": "data", "tag": tag, "edge": edge.id, "tensors": (Tensor(TensorSpec("float32", (2,)), buffer),)}
    peer = graph.ends_of(edge)[0]
    if kind == "strange":
        which = chance.randrange(6)
        peer = "unknown" if which == 0 else peer
        fields |= [{}, {"kind": "other"}, {"tag": None}, {"edge": 99}, {"header": b"\x01"}, {"tensors": ()}][which]
        if which == 5:
            fields["tensors"] = (Tensor(TensorSpec("int8", (2,)), bytearray(2)),) if edge.target == "last" else ()
    return lambda runner: runner.accept(peer, Message(**fields))


@pytest.mark.parametrize("seed", range(40))
def test_drawn_messages_have_the_same_effect(seed: int) -> None:
    chance = random.Random(seed)
    graph = graph_of(in_order=chance.random() < 0.3, model=chance.random() < 0.3)
    with_schemas = chance.random() < 0.5
    modules, compiled = (Recorded(graph, each, with_schemas) for each in (False, True))
    assert modules.runner._common is None
    assert compiled.runner._common is not None
    for step in range(300):
        call = drawn_call(chance, graph, calm=seed % 2 == 0)
        for recorded in (modules, compiled):
            recorded.attempt(call)
        assert compiled.events == modules.events, step
        assert compiled.state() == modules.state(), step
        if modules.runner._failure is not None:
            break


def test_the_commonest_case_calls_no_interpreted_method(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = graph_of(in_order=False, model=False)
    recorded = Recorded(graph, compiled=True, with_schemas=False)
    (edge,) = (edge for edge in graph.edges.values() if edge.target == "plain")
    for name in ("_match", "_fire", "_finish", "_emit"):
        monkeypatch.delattr(Runner, name)
    monkeypatch.delattr(FusedSubgraph, "run")
    for step in range(2):
        tensors = (Tensor(TensorSpec("float32", (1,)), bytearray(4)),)
        recorded.runner.accept("a", Message("data", Tag("src@1", step=step), edge.id, None, tensors))
    recorded.runner.settle()
    assert [event[3] for event in recorded.events] == [
        Tag("src@1", step=0, layer=1),
        Tag("src@1"),
        Tag("src@1", step=1, layer=1),
        Tag("src@1", step=1),
    ]


def test_plans_follow_the_graph() -> None:
    graph = graph_of(in_order=False, model=False)
    recorded = Recorded(graph, compiled=True, with_schemas=False)
    (edge,) = (edge for edge in graph.edges.values() if edge.target == "one")
    assert recorded.runner._plans.plan_arrival(edge.id, 0) is not None
    assert recorded.runner._plans.plan_firing("joined", 0) is not None
    assert recorded.runner._plans.plan_firing("one", 0) is None  # `joined`, in the same process, gets one of its outputs
    made = []
    plan = recorded.runner._plans.plan_arrival
    recorded.runner._plans.plan_arrival = lambda *of: made.append(of) or plan(*of)
    tensors = (Tensor(TensorSpec("float32", (1,)), bytearray(4)),)
    for changed in (False, False, True):
        if changed:
            recorded.runner.use(graph)
        recorded.runner.accept("a", Message("data", Tag("src@1", step=int(changed)), edge.id, None, tensors))
    assert made == [(edge.id, 0)] * 2


def test_a_runner_in_a_cycle_with_its_common_case_is_freed() -> None:
    recorded = Recorded(graph_of(in_order=False, model=False), compiled=True, with_schemas=False)
    runner = weakref.ref(recorded.runner)
    del recorded
    gc.collect()
    assert runner() is None
