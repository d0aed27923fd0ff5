"""Failed calls of a user's graph in the runner: their rows, firings and credits go, those of other calls stay."""

from __future__ import annotations

import asyncio
import re
import threading

import pytest
import torch
from dataflow.owners import OwnerOf
from dataflow.test_runner import Bench, BesideCompute, double, each, graph_of, id_of, node, number, value_of

from flowrt.actors.link import BadMessageError
from flowrt.dataflow import fences
from flowrt.dataflow.fences import MAX_ENDED, MAX_FAILED, Fences
from flowrt.dataflow.matching import MatchingTable
from flowrt.dataflow.outbound_edges import CreditHeader
from flowrt.dataflow.payload import Payload, to_message
from flowrt.dataflow.runner import Runner
from flowrt.dataflow.schemas import MessageSchema
from flowrt.graph.fuse import fuse
from flowrt.graph.model import Edge, PortSpec
from flowrt.graph.settings import Batching
from flowrt.seams import RealClock
from flowrt.transports.wire.message import Message, Tag

SOURCE = "in@1"


def tag(step=0, layer=0):
    return Tag(SOURCE, 0, 0, step, layer)


def fails_below_zero(firing):
    value = value_of(firing.inputs["x"])
    if value < 0:
        raise ValueError("below zero")
    return {"y": number(value)}


JOIN = graph_of(
    [
        node("in", "p", outputs=["x"]),
        node("a", "p", ["x"], ["y"]),
        node("b", "q", ["x"], ["y"]),
        node("join", "r", ["left", "right"], ["y"]),
        node("end", "p", ["x"]),
    ],
    [
        Edge("in", "x", "a", "x"),
        Edge("in", "x", "b", "x", credits=2),
        Edge("a", "y", "join", "left", credits=2),
        Edge("b", "y", "join", "right", credits=2),
        Edge("join", "y", "end", "x", credits=2),
    ],
)


def left(step):
    return to_message(number(step), id_of(JOIN, "join", "left"), tag(step))


def right(step):
    return to_message(number(step), id_of(JOIN, "join", "right"), tag(step))


async def test_error_fences_its_call_and_no_other():
    bench = Bench(JOIN, "q", {"b": each(fails_below_zero)})
    for step, value in enumerate((1, -2, 3)):
        bench.accept(to_message(number(value), id_of(JOIN, "b"), tag(step)))
        bench.runner.settle()
        bench.deliver(Message("credit", edge=id_of(JOIN, "join", "right"), header=CreditHeader(1))) if value > 0 else None
    ((step, error),) = bench.failed
    assert step == 1
    assert re.fullmatch(r"b failed at step 1, layer 0, fed by in\.x -> b\.x: \w+\.py:\d+: ValueError: below zero", error)
    assert bench.data() == [("join", 1), ("join", 3)]
    assert bench.credits() == ["b"] * 3
    assert bench.runner.waiting() == []


async def test_fence_frees_the_row_and_drops_what_arrives_later():
    bench = Bench(JOIN, "r", {"join": each(lambda firing: {"y": firing.inputs["left"]})})
    bench.deliver(left(0))
    bench.deliver(left(1))
    assert len(bench.runner.waiting()) == 2
    bench.runner.fence(SOURCE, [0])
    assert len(bench.runner.waiting()) == 1
    assert bench.credits() == ["join"]
    bench.deliver(right(0))
    bench.deliver(right(1))
    await bench.settle()
    assert bench.data() == [("end", 1)]
    assert bench.runner.waiting() == []
    inbound = bench.runner._inbound.edges.values()
    assert [(edge.received, edge.consumed) for edge in inbound] == [(0, 0), (0, 0)]
    assert bench.runner.statistics.num_dropped == 1


async def test_fence_drops_ready_firings_and_pending_outputs():
    bench = Bench(JOIN, "p", {"a": double})
    for step in range(4):
        bench.runner.emit("in", tag(step), {"x": number(step)})
    await bench.settle()
    assert bench.data() == [("b", 0), ("b", 1), ("join", 0), ("join", 2)]  # two credits; firings 2 and 3 wait, as their inputs for b do
    bench.runner.fence(SOURCE, [2])
    for target, port in (("b", "x"), ("join", "left")):
        bench.deliver(Message("credit", edge=id_of(JOIN, target, port), header=CreditHeader(2)))
    await bench.settle()
    assert bench.data()[4:] == [("b", 3), ("join", 6)]


async def test_firing_that_runs_during_the_fence_ends_without_effect():
    bench = None

    def fence(firing):
        bench.runner.fence(SOURCE, [0])
        return {"y": number(1)}

    bench = Bench(JOIN, "q", {"b": each(fence)})
    bench.deliver(to_message(number(1), id_of(JOIN, "b"), tag()))
    await bench.settle()
    assert bench.data() == []
    assert bench.credits() == ["b"]
    assert bench.failed == []


def ordered_graph():
    return graph_of(
        [node("in", "q", outputs=["x"]), node("count", "p", ["x"], ["y"], stateful=True), node("end", "q", ["x"])],
        [Edge("in", "x", "count", "x", credits=8), Edge("count", "y", "end", "x", credits=8)],
    )


@pytest.mark.parametrize("fences_first", [False, True])
async def test_stateful_node_does_not_wait_for_failed_calls(fences_first):
    graph = ordered_graph()
    fired = []
    bench = Bench(graph, "p", {"count": each(lambda firing: fired.append(firing.tag.step) or {"y": firing.inputs["x"]})})
    if fences_first:
        for step in (0, 2, 3):
            bench.runner.fence(SOURCE, [step])
    for step in (5, 1, 4):
        bench.deliver(to_message(number(step), id_of(graph, "count"), tag(step)))
    await bench.settle()
    if not fences_first:
        assert fired == []
        bench.runner.fence(SOURCE, [0])
        bench.runner.fence(SOURCE, [3])
        await bench.settle()
        assert fired == [1]
        bench.runner.fence(SOURCE, [2])
    await bench.settle()
    assert fired == [1, 4, 5]
    assert len(bench.runner._table) == 0


async def test_stateful_node_drops_a_held_firing_of_a_fenced_call():
    graph = ordered_graph()
    fired = []
    bench = Bench(graph, "p", {"count": each(lambda firing: fired.append(firing.tag.step) or {})})
    for step in (1, 2):
        bench.deliver(to_message(number(step), id_of(graph, "count"), tag(step)))
    bench.runner.fence(SOURCE, [1])
    bench.deliver(to_message(number(0), id_of(graph, "count"), tag(0)))
    await bench.settle()
    assert fired == [0, 2]
    (inbound,) = bench.runner._inbound.edges.values()
    assert inbound.received == inbound.consumed


async def test_fence_during_a_call_in_the_thread_releases_held_firings_at_its_end():
    graph = ordered_graph()
    computing, may_end, both, fired = threading.Event(), threading.Event(), threading.Event(), []

    def count(firings):
        fired.append(firings[0].tag.step)
        computing.set()
        if len(fired) == 2:
            both.set()
        assert may_end.wait(10)
        return [{}]

    runner = Runner(graph, "p", {"count": count}, BesideCompute(), RealClock(), OwnerOf(on_sink=pytest.fail, on_failed=pytest.fail))
    task = asyncio.get_running_loop().create_task(runner.run())
    for step in (0, 2):
        runner.accept("q", to_message(number(step), id_of(graph, "count"), tag(step)))
    runner._wake()
    async with asyncio.timeout(20):
        await asyncio.to_thread(computing.wait, 10)
        runner.fence(SOURCE, [1])
        assert len(runner._table) == 1
        may_end.set()
        await asyncio.to_thread(both.wait, 10)
    assert fired == [0, 2]
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_error_behind_an_early_output_sends_no_output_twice():
    """Tags of one batch: the first node has sent its outputs when a node fused behind it fails for one of them."""
    nodes = [
        node("in", "o", outputs=["x"]),
        node("a", "p", ["x"], ["y"], batches=Batching()),
        node("b", "p", ["x"], ["y"]),
        node("far", "q", ["x"], ["y"]),
        node("end", "o", ["x"]),
        node("end2", "o", ["x"]),
    ]
    edges = [
        Edge("in", "x", "a", "x", credits=4),
        Edge("a", "y", "b", "x"),
        Edge("a", "y", "far", "x", credits=4),
        Edge("b", "y", "end", "x", credits=4),
        Edge("far", "y", "end2", "x", credits=4),
    ]
    graph = graph_of(nodes, edges)
    assert fuse(graph, "p").fused == ("b",)
    bench = Bench(graph, "p", {"a": each(lambda firing: {"y": firing.inputs["x"]}), "b": each(fails_below_zero)}, early=True)
    for step, value in enumerate((1, -2, 3)):
        bench.accept(to_message(number(value), id_of(graph, "a"), tag(step)))
    bench.runner._wake()
    await bench.settle()
    assert [step for step, _ in bench.failed] == [1]
    assert sorted(bench.data()) == [("end", 1), ("end", 3), ("far", -2), ("far", 1), ("far", 3)]


async def test_output_that_cannot_be_sent_fails_its_call_and_keeps_no_credit():
    bench = Bench(JOIN, "q", {"b": each(lambda firing: {"y": Payload((torch.eye(2).to_sparse(),))})})
    for step in range(3):
        bench.deliver(to_message(number(1), id_of(JOIN, "b"), tag(step)))
        await bench.settle()
    assert [step for step, _ in bench.failed] == [0, 1, 2]
    assert "b failed at step 0, layer 0: a message on b.y -> join.right cannot be sent: a torch.sparse_coo tensor" in bench.failed[0][1]
    assert all(edge.free == edge.size for edge in bench.runner._outbound.edges.values())


async def test_pending_output_that_cannot_be_sent_fails_its_call_when_its_credit_comes():
    bench = Bench(JOIN, "p", {"a": double})
    for step in range(3):
        bench.runner.emit("in", tag(step), {"x": number(step) if step < 2 else Payload((torch.empty(1, device="meta"),))})
    bench.deliver(Message("credit", edge=id_of(JOIN, "b"), header=CreditHeader(1)))
    assert [step for step, _ in bench.failed] == [2]
    assert "in.x -> b.x cannot be sent" in bench.failed[0][1]


async def test_second_message_for_a_port_fails_its_call():
    bench = Bench(JOIN, "r", {"join": double})
    bench.deliver(left(0))
    bench.deliver(left(0))
    assert [step for step, _ in bench.failed] == [0]
    assert "a message on a.y -> join.left: join.left got a second message" in bench.failed[0][1]
    assert bench.runner.waiting() == []
    inbound = bench.runner._inbound.edges[id_of(JOIN, "join", "left")]
    assert inbound.received == inbound.consumed


@pytest.mark.parametrize("count", [torch.tensor(-1), torch.zeros(2)])
async def test_nonsense_on_a_count_port_fails_its_call(count):
    parts = PortSpec("parts", takes="gather", count="count")
    graph = graph_of(
        [node("in", "q", outputs=["count", "part"]), node("join", "p", ["count", parts], ["y"]), node("end", "q", ["x"])],
        [
            Edge("in", "count", "join", "count", credits=2),
            Edge("in", "part", "join", "parts", credits=2),
            Edge("join", "y", "end", "x", credits=2),
        ],
    )
    bench = Bench(graph, "p", {"join": double})
    bench.deliver(to_message(number(1), id_of(graph, "join", "parts"), tag()))
    bench.deliver(to_message(Payload((count,)), id_of(graph, "join", "count"), tag()))
    assert [step for step, _ in bench.failed] == [0]
    assert bench.runner.waiting() == []
    assert all(edge.received == edge.consumed for edge in bench.runner._inbound.edges.values())


def service():
    return graph_of(
        [node("in", "p", outputs=["x"]), node("b", "q", ["x"], ["y"]), node("end", "p", ["x"])],
        [Edge("in", "x", "b", "x", credits=2), Edge("b", "y", "end", "x", response_to="in.x -> b.x")],
    )


async def test_fenced_request_returns_its_credit_and_a_late_response_is_dropped():
    graph = service()
    schemas = {edge.id: MessageSchema((None,), frozenset({"in"}), 1) for edge in graph.edges.values()}
    client, server = Bench(graph, "p", {}, schemas=schemas), Bench(graph, "q", {"b": double}, schemas=schemas)
    for step in range(2):
        client.runner.emit("in", tag(step), {"x": number(step)})
    first, second = [message for _, message in client.posted]
    server.deliver(first)
    await server.settle()  # responded before the fence
    server.deliver(second)
    for step in range(2):
        client.runner.fence(SOURCE, [step])
        server.runner.fence(SOURCE, [step])
    await server.settle()
    assert [message.kind for _, message in server.posted] == ["data", "credit"]
    for _, message in server.posted:
        client.deliver(message)
    (edge,) = client.runner._outbound.edges.values()
    assert (edge.free, edge.outstanding, client.sunk) == (2, {}, [])
    with pytest.raises(BadMessageError):
        client.deliver(server.posted[0][1])  # a second time


def test_fences_remember_the_latest_failed_calls(monkeypatch):
    monkeypatch.setattr(fences, "MAX_FAILED", 3)
    found = Fences()
    assert not found.is_active
    assert [found.fail(SOURCE, steps) for steps in ([0], [0, 1], [1], [2, 3])] == [True, True, False, True]
    assert [found.is_stale(tag(step)) for step in range(5)] == [False, True, True, True, False]


def test_many_sources_that_end_together_are_all_remembered():
    fences = Fences()
    sources = [f"attention.{number}.source@{incarnation}" for incarnation in "ab" for number in range(100)]
    for source in sources:
        fences.end_source(source)
        fences.end_source(source)
    assert all(fences.has_ended(source) for source in sources)
    for incarnation in range(MAX_ENDED):
        fences.end_source(f"attention.0.source@{incarnation}")
    assert not fences.has_ended("attention.0.source@a")
    assert fences.has_ended("attention.1.source@a")


def test_a_stateful_node_goes_on_behind_more_failed_calls_than_are_remembered():
    known, edge = Fences(), Edge("in", "x", "order", "x")
    table = MatchingTable([node("order", "p", ["x"], ["y"], stateful=True)], [edge], len, len, known.failed, known.forgotten)

    def arrive(step):
        return [firing.tag.step for firing in table.arrive(edge, Tag("src", 0, 0, step), number(step)).firings]

    assert arrive(0) == [0]
    for step in range(1, MAX_FAILED + 3):
        known.fail("src", [step])
        table.release()
    assert arrive(MAX_FAILED + 3) == [MAX_FAILED + 3]
