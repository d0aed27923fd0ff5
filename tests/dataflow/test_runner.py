"""The runner without channels or threads: firing, credits, responses and rollback, with posted messages collected in a list."""

import asyncio
import contextlib
import re
import threading
import weakref
from dataclasses import replace
from functools import partial

import pytest
import torch
from dataflow.inline_compute import InlineCompute
from dataflow.owners import OwnerOf, ignore

from flowrt.actors.link import BadMessageError
from flowrt.dataflow.matching import Firing, MatchingTable
from flowrt.dataflow.outbound_edges import CreditHeader
from flowrt.dataflow.parts import FailedHeader, PartHeader, PlanHeader
from flowrt.dataflow.payload import Payload, from_message, to_message
from flowrt.dataflow.runner import Runner
from flowrt.dataflow.subgraph import FusedSubgraph, RoutedOutput
from flowrt.errors import OperatorError
from flowrt.graph.fuse import fuse
from flowrt.graph.model import Edge, Graph, ModelPart, Node, PortSpec
from flowrt.graph.settings import Batching
from flowrt.seams import RealClock
from flowrt.transports.wire.message import Message, Tag


def node(name, process, inputs=(), outputs=(), **more):
    ports = {port if isinstance(port, str) else port.name: PortSpec(port) if isinstance(port, str) else port for port in inputs}
    operator = "source" if name.startswith("in") else "m:f"
    return Node(name, operator, process, ports, {port: PortSpec(port) for port in outputs}, **more)


MODEL = ModelPart("", "float32")  # in a model graph an error is reported and not fenced


def graph_of(nodes, edges, model=None):
    return Graph.of(nodes, edges, model=model)


def line_graph(model=None):
    """One node between source and sink, in one process."""
    nodes = [node("in", "p", outputs=["x"]), node("a", "p", ["x"], ["y"]), node("end", "p", ["x"])]
    return graph_of(nodes, [Edge("in", "x", "a", "x"), Edge("a", "y", "end", "x")], model)


def id_of(graph, target, port="x"):
    """The id of the edge that leads to this port."""
    (edge,) = (edge for edge in graph.edges.values() if (edge.target, edge.target_port) == (target, port))
    return edge.id


def number(value):
    return Payload((torch.tensor([float(value)]),))


def value_of(payload):
    return payload.tensors[0].item()


def each(function):
    return lambda firings: [function(firing) for firing in firings]


class MovedClock:
    """Stands still until a test moves it; a sleep takes real time."""

    def __init__(self):
        self.time = 1.0
        self.sleep = RealClock().sleep

    def now(self):
        return self.time


@pytest.fixture(autouse=True, params=["modules", "compiled"])
def compiled(request, monkeypatch):
    """Every test here is one of the modules, and of the commonest case in C."""
    monkeypatch.setattr(Bench, "compiled", request.param == "compiled")


class Bench:
    """One runner, everything it posted, everything its sinks got."""

    compiled = False

    def __init__(self, graph, process, functions, on_failed=None, clock=None, on_unsent=None, on_response=None, **options):
        self.graph, self.process = graph, process
        self.posted: list[tuple[Edge, Message]] = []
        self.sunk = []
        self.failed = []
        self.runner = Runner(
            graph,
            process,
            functions,
            InlineCompute(),
            clock or RealClock(),
            OwnerOf(
                lambda edge, message: self.posted.append((edge, message)),
                self.sunk.append,
                on_failed or self.on_failed,
                on_unsent or ignore,
                on_response or ignore,
            ),
            compiled=self.compiled,
            **options,
        )

    def on_failed(self, tag, error):
        self.failed.append((tag.step, str(error)))

    def accept(self, message):
        """From the process at the other end of the message's edge."""
        edge = next((edge for edge in self.graph.edges.values() if edge.id == message.edge), None)
        (peer,) = (set() if edge is None else set(self.graph.ends_of(edge)) - {self.process}) or {"another"}
        self.runner.accept(peer, message)

    def deliver(self, message):
        self.accept(message)
        self.runner._wake()

    async def settle(self):
        task = asyncio.get_running_loop().create_task(self.runner.run())
        for _ in range(20):
            await asyncio.sleep(0)
        if task.done():
            task.result()
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    def data(self):
        return [(edge.target, value_of(from_message(message))) for edge, message in self.posted if message.kind == "data"]

    def credits(self):
        return [edge.target for edge, message in self.posted if message.kind == "credit"]


def tag(step=0, layer=0, epoch=0, source="src@1"):
    return Tag(source, epoch, 0, step, layer)


double = each(lambda firing: {"y": number(2 * value_of(firing.inputs["x"]))})


async def test_a_chain_in_one_process_runs_to_its_sink():
    nodes = [node("in", "p", outputs=["x"]), node("a", "p", ["x"], ["y"]), node("b", "p", ["x"], ["y"]), node("end", "p", ["x"])]
    edges = [Edge("in", "x", "a", "x"), Edge("a", "y", "b", "x"), Edge("b", "y", "end", "x")]
    bench = Bench(graph_of(nodes, edges), "p", {"a": double, "b": double})
    for step in range(3):
        bench.runner.emit("in", tag(step), {"x": number(step)})
    await bench.settle()
    assert [(firing.tag.step, value_of(firing.inputs["x"])) for firing in bench.sunk] == [(0, 0), (1, 4), (2, 8)]
    assert bench.posted == []


PIPE = graph_of(
    [node("in", "p", outputs=["x"]), node("a", "p", ["x"], ["y"]), node("b", "q", ["x"], ["y"]), node("end", "p", ["x"])],
    [Edge("in", "x", "a", "x"), Edge("a", "y", "b", "x", credits=2), Edge("b", "y", "end", "x", credits=2)],
)


async def test_a_firing_waits_until_its_edge_has_a_credit():
    bench = Bench(PIPE, "p", {"a": double}, clock=(clock := MovedClock()))
    for step in range(4):
        bench.runner.emit("in", tag(step), {"x": number(step)})
    await bench.settle()
    assert bench.data() == [("b", 0), ("b", 2)]
    assert bench.runner.num_waiting() == {"a": 2}
    clock.time += 2.0
    bench.deliver(Message("credit", edge=id_of(PIPE, "b"), header=CreditHeader(1)))
    await bench.settle()
    assert bench.data() == [("b", 0), ("b", 2), ("b", 4)]
    times = bench.runner.edge_times[id_of(PIPE, "b")]
    assert times.wait_seconds == 2.0
    assert times.latency.count == 0, "its messages are no requests"


async def test_credit_goes_back_when_the_message_is_consumed():
    bench = Bench(PIPE, "q", {"b": double})
    bench.deliver(to_message(number(3), id_of(PIPE, "b"), tag()))
    assert bench.credits() == []
    await bench.settle()
    assert bench.data() == [("end", 6)]
    assert bench.credits() == ["b"]


@pytest.mark.parametrize(
    ("message", "text"),
    [
        (Message("credit", edge=id_of(PIPE, "b"), header=CreditHeader(1)), "more than were outstanding"),
        (to_message(number(3), id_of(PIPE, "b"), tag()), "does not lead here"),
    ],
    ids=["more credits than were out", "an edge that does not lead here"],
)
async def test_messages_that_cannot_be_are_refused(message, text):
    bench = Bench(PIPE, "p", {"a": double})
    with pytest.raises(BadMessageError, match=text):
        bench.deliver(message)


def service_graph():
    """Two clients and one server that responds to the sender of each request."""
    nodes, edges = [], []
    for client in "01":
        parts = PortSpec("parts", takes="gather", count="plan")
        nodes += [
            node(f"cut{client}", f"client{client}", ["x"], ["plan", "server0"]),
            node(f"add{client}", f"client{client}", ["plan", parts], ["y"]),
            node(f"in{client}", f"client{client}", outputs=["x"]),
            node(f"end{client}", f"client{client}", ["y"]),
        ]
    nodes.append(node("serve", "server", ["rows"], ["results"], batches=Batching()))
    for client in "01":
        edges += [
            Edge(f"in{client}", "x", f"cut{client}", "x"),
            Edge(f"cut{client}", "plan", f"add{client}", "plan"),
            Edge(f"cut{client}", "server0", "serve", "rows", credits=2),
            Edge("serve", "results", f"add{client}", "parts", response_to=f"cut{client}.server0 -> serve.rows"),
            Edge(f"add{client}", "y", f"end{client}", "y"),
        ]
    return graph_of(nodes, edges, MODEL)


@each
def cut(firing):
    return {"plan": Payload((), PlanHeader((0,))), "server0": Payload(firing.inputs["x"].tensors, PartHeader(0))}


@each
def add(firing):
    return {"y": number(sum(value_of(part) for part in firing.inputs["parts"]))}


async def test_server_responds_only_to_its_clients_and_may_take_all_requests_at_once():
    calls = []

    def serve(firings):
        calls.append(len(firings))
        return [
            {"results": Payload((firing.inputs["rows"].tensors[0] + 1,), firing.inputs["rows"].header_as(PartHeader))} for firing in firings
        ]

    service = service_graph()
    bench = Bench(service, "server", {"serve": serve})
    bench.deliver(
        to_message(Payload((torch.tensor([5.0]),), PartHeader(0)), service.edges["cut0.server0 -> serve.rows"].id, tag(source="in0@1"))
    )
    bench.deliver(
        to_message(Payload((torch.tensor([7.0]),), PartHeader(0)), service.edges["cut1.server0 -> serve.rows"].id, tag(source="in1@1"))
    )
    await bench.settle()
    assert calls == [2]
    assert bench.data() == [("add0", 6), ("add1", 8)]
    assert bench.credits() == []  # they come back with the responses


async def test_response_returns_the_credit_and_a_second_response_is_dropped():
    bench = Bench(service_graph(), "client0", {"cut0": cut, "add0": add})
    for step in range(3):
        bench.runner.emit("in0", tag(step), {"x": number(step)})
    await bench.settle()
    assert bench.data() == [("serve", 0), ("serve", 1)]
    response = to_message(Payload((torch.tensor([9.0]),), PartHeader(0)), id_of(service_graph(), "add0", "parts"), tag(0))
    bench.deliver(response)
    await bench.settle()
    assert bench.data() == [("serve", 0), ("serve", 1), ("serve", 2)]
    assert [value_of(firing.inputs["y"]) for firing in bench.sunk] == [9.0]
    assert [times.latency.count for times in bench.runner.edge_times.values()] == [1]
    bench.deliver(response)
    await bench.settle()
    assert len(bench.sunk) == 1
    assert bench.runner.statistics.num_dropped == 1


async def test_roll_back_drops_waiting_messages_and_rejects_the_old_epoch():
    bench = Bench(service_graph(), "client0", {"cut0": cut, "add0": add})
    bench.runner.emit("in0", tag(0), {"x": number(1)})
    await bench.settle()
    assert bench.runner.roll_back("src@1", epoch=1) == 1
    bench.deliver(to_message(Payload((torch.tensor([9.0]),), PartHeader(0)), id_of(service_graph(), "add0", "parts"), tag(0)))
    await bench.settle()
    assert bench.sunk == []
    assert bench.runner.waiting() == []
    for step in range(2):  # both credits are back
        bench.runner.emit("in0", tag(step, epoch=1), {"x": number(step)})
    await bench.settle()
    assert len(bench.data()) == 3


async def test_a_firing_that_is_rolled_back_while_it_is_computed_leaves_no_row():
    """What is fused behind it is matched within the call, after the rollback has looked."""
    nodes = [node("in", "p", outputs=["x", "z"]), node("a", "p", ["x"], ["y"]), node("b", "p", ["y", "z"], ["y"]), node("end", "p", ["x"])]
    edges = [Edge("in", "x", "a", "x"), Edge("a", "y", "b", "y"), Edge("in", "z", "b", "z"), Edge("b", "y", "end", "x")]

    def roll_back(firing):
        bench.runner.roll_back("src@1", 1)
        return {"y": number(1)}

    graph = graph_of(nodes, edges)
    bench = Bench(graph, "p", {"a": each(roll_back), "b": double})
    assert "b" in fuse(graph, "p").fused
    bench.runner.emit("in", tag(), {"x": number(1)})
    await bench.settle()
    assert (bench.runner.waiting(), bench.sunk) == ([], [])


async def test_an_operator_that_raises_is_named_with_its_edges():
    bench = Bench(line_graph(), "p", {"a": lambda firings: 1 / 0})
    bench.runner.emit("in", tag(4), {"x": number(1)})
    await bench.settle()
    ((step, error),) = bench.failed
    assert step == 4
    place = r"test_runner\.py:\d+"
    assert re.fullmatch(rf"a failed at step 4, layer 0, fed by in\.x -> a\.x: {place}: ZeroDivisionError: division by zero", error)


def fails_for(*values):
    def run(firing):
        if value_of(firing.inputs["x"]) in values:
            raise MemoryError("no room")
        return {"y": number(2 * value_of(firing.inputs["x"]))}

    return each(run)


SERVICE = graph_of(
    [
        node("in", "p", outputs=["x"]),
        node("b", "q", ["x"], ["y"], batches=Batching()),
        node("end", "p", ["x"]),
    ],
    [Edge("in", "x", "b", "x", credits=4), Edge("b", "y", "end", "x", response_to="in.x -> b.x")],
    MODEL,
)


async def test_a_batch_waits_for_enough_tags_or_for_its_time():
    sizes, served = [], asyncio.Event()

    def serve(firings):
        sizes.append(len(firings))
        if sum(sizes) == 4:
            served.set()
        return [{"y": firing.inputs["x"]} for firing in firings]

    nodes = [node("in", "p", outputs=["x"]), node("end", "p", ["x"])]
    nodes.append(node("b", "p", ["x"], ["y"], batches=Batching(min_tags=3, max_wait_seconds=0.05)))
    bench = Bench(graph_of(nodes, [Edge("in", "x", "b", "x"), Edge("b", "y", "end", "x")], MODEL), "p", {"b": serve})
    task = asyncio.get_running_loop().create_task(bench.runner.run())
    for step in range(4):
        bench.runner.emit("in", tag(step), {"x": number(step)})
        bench.runner.settle()  # leaves the node to `run`, which waits for the third
        await asyncio.sleep(0)
    async with asyncio.timeout(60):
        await served.wait()
    task.cancel()
    await asyncio.wait([task])
    assert sizes == [3, 1]


@pytest.mark.parametrize("same_layer", [False, True])
async def test_the_responses_of_a_layer_leave_before_the_next_layer_is_computed(same_layer):
    calls = []

    def serve(firings):
        calls.append(([firing.tag.layer for firing in firings], len(bench.data())))
        return [{"y": firing.inputs["x"]} for firing in firings]

    nodes = [SERVICE.nodes["in"], node("b", "q", ["x"], ["y"], batches=Batching(same_layer=same_layer)), SERVICE.nodes["end"]]
    graph = graph_of(nodes, SERVICE.edges.values(), MODEL)
    bench = Bench(graph, "q", {"b": serve})
    for step, layer in enumerate((3, 4, 3)):
        bench.accept(to_message(number(step), id_of(graph, "b"), tag(step, layer=layer)))
    await bench.settle()
    assert calls == [([3, 3], 0), ([4], 2)]
    assert bench.data() == [("end", 0), ("end", 2), ("end", 1)]


@pytest.mark.parametrize("settles", [False, True])
async def test_a_failed_firing_is_reported_and_the_runner_goes_on(settles):
    failed = []
    bench = Bench(line_graph(MODEL), "p", {"a": fails_for(1)}, on_failed=lambda tag, error: failed.append((tag, str(error))))
    for step in range(3):
        bench.runner.emit("in", tag(step), {"x": number(step)})
    if settles:
        bench.runner.settle()
    await bench.settle()
    assert failed == [(tag(1), "a failed at step 1, layer 0: MemoryError: no room")]
    assert [value_of(firing.inputs["x"]) for firing in bench.sunk] == [0, 4]


async def test_failed_request_alone_gets_an_error_response():
    """Requests of a batch are computed one by one when the batch fails; each response brings its credit back."""
    failed = []
    server = Bench(SERVICE, "q", {"b": fails_for(1, 3)}, on_failed=lambda tag, error: failed.append(tag))
    client = Bench(SERVICE, "p", {}, on_failed=lambda tag, error: failed.append((tag.step, str(error))))
    for step in range(4):
        client.runner.emit("in", tag(step), {"x": number(step)})
    requests = [message for _, message in client.posted]
    assert len(requests) == 4
    for message in requests:
        server.deliver(message)
    await server.settle()
    assert failed == []
    assert [message.kind for _, message in server.posted] == ["data", "failed", "data", "failed"]
    for _, message in server.posted:
        client.deliver(message)
    assert failed == [(step, f"b failed at step {step}, layer 0: MemoryError: no room") for step in (1, 3)]
    assert [value_of(firing.inputs["x"]) for firing in client.sunk] == [0, 4]
    client.posted.clear()
    for step in range(4, 8):  # all four credits are back
        client.runner.emit("in", tag(step), {"x": number(step)})
    assert len(client.posted) == 4


@pytest.mark.parametrize("settles", [False, True])
async def test_a_failed_request_of_a_peer_that_came_back_gets_its_response(settles):
    """Only a call during which its sender ended sends no response; the next one, short or long, belongs to the new incarnation."""
    graph = graph_of([*(replace(each, batches=None) for each in SERVICE.nodes.values())], SERVICE.edges.values(), MODEL)
    server = Bench(graph, "q", {"b": fails_for(1)})
    server.runner.end_peer("p", ["src@0"])
    server.runner.join_peer("p")
    server.accept(to_message(number(1), id_of(graph, "b"), tag(1)))
    if settles:
        server.runner.settle()
    await server.settle()
    assert [message.kind for _, message in server.posted] == ["failed"]


async def test_a_lent_response_is_copied_when_it_is_sent():
    """Its header is made by the copy."""
    server, client = Bench(SERVICE, "q", {}), Bench(SERVICE, "p", {})
    for step in range(2):
        client.runner.emit("in", tag(step), {"x": number(step)})
    for _, message in client.posted:
        server.deliver(message)
    rows = torch.tensor([7.0])

    def copy_into(targets):
        targets[0].copy_(rows)
        return FailedHeader("made by the copy")

    for firing, copy in zip(server.sunk, (copy_into, None), strict=True):
        server.runner.respond(firing, {"y": Payload((rows,), copy_into=copy)})
    (_, first), (_, second) = server.posted
    assert second.lent is None
    copied = bytearray(4)
    assert first.lent.copy_into([memoryview(copied)]) == FailedHeader("made by the copy")
    assert torch.frombuffer(copied, dtype=torch.float32) == rows
    client.deliver(second)
    assert [value_of(firing.inputs["x"]) for firing in client.sunk] == [7.0]


async def test_the_failure_of_an_older_epoch_is_dropped():
    failed = []
    client = Bench(SERVICE, "p", {}, on_failed=lambda tag, error: failed.append(tag))
    client.runner.emit("in", tag(), {"x": number(1)})
    client.runner.roll_back("src@1", 1)
    client.deliver(Message("failed", tag(), id_of(SERVICE, "end"), FailedHeader("too late")))
    assert failed == []
    with pytest.raises(BadMessageError, match="kind 'failed' with a tag on"):
        Bench(SERVICE, "q", {"b": double}, on_failed=failed.append).deliver(
            Message("failed", tag(), id_of(SERVICE, "b"), FailedHeader("nonsense"))
        )


async def test_an_output_no_edge_takes_is_an_error():
    bench = Bench(line_graph(), "p", {"a": each(lambda firing: {"z": number(1)})})
    bench.runner.emit("in", tag(), {"x": number(1)})
    await bench.settle()
    assert [text.partition("in.x -> a.x: ")[2] for _, text in bench.failed] == ["a gave an output 'z' that no edge takes"]


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64, torch.bfloat16, torch.float16, torch.float64, torch.complex64])
@pytest.mark.parametrize("shape", [(), (0, 3), (1,), (2, 3)])
def test_payloads_survive_the_way_through_buffers(dtype, shape):
    tensor = (torch.arange(24).reshape(4, 6)[::2, ::2][: shape[0] if shape else 1] if shape and shape[0] else torch.zeros(shape)).to(dtype)
    tensor = tensor.reshape(shape) if tensor.numel() == torch.Size(shape).numel() else tensor
    back = from_message(to_message(Payload((tensor,)), 0, tag())).tensors[0]
    assert back.dtype == dtype
    assert torch.equal(back, tensor)


def test_a_sparse_tensor_cannot_travel():
    with pytest.raises(TypeError, match="dense"):
        to_message(Payload((torch.eye(2).to_sparse(),)), 0, tag())


async def test_a_runner_that_sleeps_holds_no_tensor():
    """One held for no reason would keep its transport's memory, and all that was received after it."""
    bench = Bench(PIPE, "q", {"b": each(lambda firing: {"y": firing.inputs["x"]})})
    tensor = torch.zeros(3)
    gone = weakref.ref(tensor)
    bench.deliver(to_message(Payload((tensor,)), id_of(PIPE, "b"), tag()))
    task = asyncio.get_running_loop().create_task(bench.runner.run())
    for _ in range(5):
        await asyncio.sleep(0)
    assert [edge.target for edge, message in bench.posted] == ["end", "b"]
    bench.posted.clear()
    del tensor
    assert gone() is None
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


async def test_settle_fires_what_is_short_without_a_turn_of_the_loop():
    bench = Bench(PIPE, "q", {"b": double})
    for step in range(3):
        bench.accept(to_message(number(step), id_of(PIPE, "b"), tag(step)))
        assert bench.posted == []
        bench.runner.settle()
        bench.deliver(Message("credit", edge=id_of(PIPE, "end"), header=CreditHeader(1)))
        assert bench.data() == [("end", 2 * step)]
        bench.posted.clear()


async def test_what_on_failed_raises_in_settle_is_raised_by_run():
    def raise_on(tag, error):
        raise error

    bench = Bench(PIPE, "q", {"b": lambda firings: 1 / 0}, on_failed=raise_on)
    bench.accept(to_message(number(1), id_of(PIPE, "b"), tag()))
    bench.runner.settle()
    with pytest.raises(OperatorError, match="b failed at step 0"):
        await bench.settle()


async def test_credits_go_back_together_but_never_later_than_a_sender_could_need_one():
    """Of eight credits half may gather; with all eight out, each one is needed at once."""
    nodes = [node("in", "p", outputs=["x"]), node("b", "q", ["x"], ["y"]), node("end", "p", ["x"])]
    graph = graph_of(nodes, [Edge("in", "x", "b", "x", credits=8), Edge("b", "y", "end", "x", credits=100)])
    bench = Bench(graph, "q", {"b": double})

    def returned():
        return [message.header.count for edge, message in bench.posted if message.kind == "credit"]

    for step in range(8):
        bench.accept(to_message(number(step), id_of(graph, "b"), tag(step)))
        bench.runner.settle()
    assert returned() == [4, 4]
    bench.posted.clear()
    for step in range(8, 16):
        bench.accept(to_message(number(step), id_of(graph, "b"), tag(step)))
    bench.runner.settle()
    assert returned() == [1, 4]  # three wait: the sender has five


async def test_credits_that_are_held_back_go_with_the_last_message_of_a_sender():
    """The others wait here for one that the sender cannot send without a credit."""
    nodes = [node("in", "p", outputs=["x", "w"]), node("b", "q", ["x", "w"], ["y"]), node("c", "q", ["x"], ["y"]), node("end", "p", ["x"])]
    edges = [Edge("in", "x", "b", "x", credits=8), Edge("in", "w", "b", "w", credits=8), Edge("b", "y", "end", "x", credits=100)]
    graph = graph_of(nodes, [*edges, Edge("in", "x", "c", "x", credits=8)])
    bench = Bench(graph, "q", {"b": lambda firings: [{"y": firing.inputs["x"]} for firing in firings], "c": double})
    (x,), (w,) = ([edge.id for edge in graph.edges.values() if (edge.source_port, edge.target) == (port, "b")] for port in ("x", "w"))
    for edge in (x, w):
        bench.accept(to_message(number(0), edge, tag(0)))
    bench.runner.settle()
    assert bench.credits() == []
    for step in range(1, 8):
        assert bench.credits() == []
        bench.accept(to_message(number(step), x, tag(step)))
    assert [message.header.count for _, message in bench.posted if message.kind == "credit"] == [1]


async def test_a_call_waits_until_none_runs():
    class Blocked(InlineCompute):
        def is_short(self, label):
            return False

        async def run(self, label, call, bound_seconds=60.0):
            await ended.wait()
            return call()

    ended, called = asyncio.Event(), []
    bench = Bench(PIPE, "q", {"b": double})
    bench.runner._compute = Blocked()
    bench.runner.when_idle(partial(called.append, "at once"))
    bench.deliver(to_message(number(3), id_of(PIPE, "b"), tag()))
    running = asyncio.create_task(bench.runner.run())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    late = partial(called.append, "late")
    for _ in range(2):
        bench.runner.when_idle(late)
    assert called == ["at once"]
    ended.set()
    for _ in range(20):
        await asyncio.sleep(0)
    assert called == ["at once", "late"]
    running.cancel()


def model_like_graph():
    """An entry that feeds what leaves for another worker and what does not, the latter first."""
    nodes = [
        node("in", "p", outputs=["x"]),
        node("gate", "p", ["x"], ["y"]),
        node("shared", "p", ["x"], ["y"]),
        node("cut", "p", ["x"], ["y"]),
        node("far", "q", ["x"], ["y"]),
        node("end", "p", ["x"]),
        node("end2", "p", ["x"]),
    ]
    edges = [
        Edge("in", "x", "gate", "x"),
        Edge("gate", "y", "shared", "x"),
        Edge("gate", "y", "cut", "x"),
        Edge("cut", "y", "far", "x", credits=2),
        Edge("shared", "y", "end", "x"),
        Edge("far", "y", "end2", "x", credits=2),
    ]
    return graph_of(nodes, edges, MODEL)


def run_gate(graph, function_of, sent_early):
    """The fused subgraph of `gate`, and what a firing leaves; `sent_early` gets the targets of what leaves before its end."""
    functions = {name: function_of(name) for name in ("gate", "shared", "cut")}
    table = MatchingTable(graph.nodes_of("p"), graph.edges.values(), lambda value: 0, lambda value: None)
    subgraph = FusedSubgraph(graph, "p", frozenset({"shared", "cut"}), functions, table)
    firing = Firing("gate", tag(), {"x": number(1)}, (0,))
    return subgraph, subgraph.run([firing], lambda outputs: sent_early.extend(output.edge.target for output in outputs))


def test_what_may_leave_is_computed_first_and_leaves_while_the_rest_is_computed():
    fired, sent_early = [], []

    def noted(name):
        def run(firings):
            fired.append((name, len(sent_early)))
            return double(firings)

        return run

    subgraph, rest = run_gate(model_like_graph(), noted, sent_early)
    assert fired == [("gate", 0), ("cut", 0), ("shared", 1)]
    assert sent_early == ["far"]
    assert [output.edge.target for output in rest] == ["end"]
    assert [output.edge.target for output in subgraph.run([Firing("gate", tag(), {"x": number(1)}, (0,))])] == ["far", "end"]


def test_what_was_given_before_it_leaves_with_it():
    """A response may arrive while the rest is computed: the plan that counts it must exist by then."""
    graph = model_like_graph()
    graph.nodes["sum"] = node("sum", "p", ["plan"])
    graph.edges["plan"] = Edge("gate", "y", "sum", "plan", "plan")
    sent_early = []
    _, rest = run_gate(graph, lambda name: double, sent_early)
    assert sent_early == ["sum", "far"]
    assert [output.edge.target for output in rest] == ["end"]


class BesideCompute(InlineCompute):
    """Computes on a thread, as what is long does."""

    def is_short(self, label):
        return False

    async def run(self, label, call, bound_seconds=60.0):
        return await asyncio.to_thread(call)


async def test_a_long_firing_posts_what_leaves_before_it_ends():
    """The rest of the firing goes on only when the message has been posted."""
    posted = threading.Event()
    sent = []
    ended = asyncio.get_running_loop().create_future()

    def post(edge, message):
        sent.append(edge.target)
        posted.set()

    def shared(firings):
        assert posted.wait(10)
        return double(firings)

    functions = {"gate": double, "cut": double, "shared": shared}
    runner = Runner(
        model_like_graph(), "p", functions, BesideCompute(), RealClock(), OwnerOf(post, ended.set_result, pytest.fail), early=True
    )
    runner.emit("in", tag(), {"x": number(1)})
    task = asyncio.get_running_loop().create_task(runner.run())
    async with asyncio.timeout(20):
        assert (await ended).node == "end"
    assert sent == ["far"]
    assert runner.statistics.sent[id_of(model_like_graph(), "far")][0] == 1
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


async def test_roll_back_stops_early_outputs_and_unsendable_ones_are_reported():
    bench = Bench(model_like_graph(), "p", {"gate": double, "cut": double, "shared": double})
    output = RoutedOutput(model_like_graph().edges["cut.y -> far.x"], tag(), number(1))
    bench.runner._send_early([output])
    assert bench.data() == [("far", 1)]
    bench.runner.roll_back("src@1", epoch=1)
    bench.runner._send_early([output])
    assert bench.data() == [("far", 1)]
    bench.runner._send_early([RoutedOutput(output.edge, tag(epoch=1), Payload((torch.eye(2).to_sparse(),)))])
    with pytest.raises(OperatorError, match="cannot be sent"):
        await bench.settle()
