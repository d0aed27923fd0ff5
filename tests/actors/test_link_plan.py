"""The capacity and transports of a worker's links follow from the graph alone."""

import pytest

from flowrt.actors.link_plan import MAX_RING_BYTES, RING_BYTES, plan_links
from flowrt.graph.model import Edge, Graph, Node, PortSpec


def node(name, process):
    return Node(name, "m:f", process)


def test_the_requester_of_an_edge_connects_and_a_pair_has_a_link_per_transport():
    nodes = [node("b", "q"), node("a", "p"), node("c", "p")]
    edges = [
        Edge("a", "y", "b", "x", transport="shm", credits=4),
        Edge("b", "w", "c", "w", transport="shm", response_to="a.y -> b.x"),
        Edge("b", "y", "c", "x", transport="zmq", credits=2),
        Edge("a", "z", "c", "z", transport="local"),
    ]
    graph = Graph.of(nodes, edges)
    first = {(plan.peer, plan.scheme): plan for plan in plan_links(graph, "p")}
    second = {(plan.peer, plan.scheme): plan for plan in plan_links(graph, "q")}
    assert set(first) == {("q", "shm"), ("q", "zmq")}
    assert set(second) == {("p", "shm"), ("p", "zmq")}
    assert {key[1]: plan.connects for key, plan in first.items()} == {"shm": True, "zmq": False}
    assert {key[1]: plan.connects for key, plan in second.items()} == {"shm": False, "zmq": True}
    assert {key[1]: plan.limits for key, plan in first.items()} == {key[1]: plan.limits for key, plan in second.items()}


def test_a_link_opens_at_its_first_use_unless_one_of_its_edges_opens_at_start():
    nodes = [node("a", "p"), node("b", "q"), node("c", "r")]
    edges = [
        Edge("a", "y", "b", "x", transport="shm"),
        Edge("b", "y", "a", "x", transport="shm", open="start"),
        Edge("a", "z", "b", "z", transport="zmq"),
        Edge("a", "y", "c", "x", transport="shm"),
    ]
    graph = Graph.of(nodes, edges)
    planned = {(plan.peer, plan.scheme): plan.is_lazy for worker in "pqr" for plan in plan_links(graph, worker) if plan.peer != "p"}
    assert planned == {("q", "shm"): False, ("q", "zmq"): True, ("r", "shm"): True}


def test_responses_need_as_much_room_as_their_requests_on_any_link():
    nodes = [node("client", "p"), node("serve", "q")]
    edges = [
        Edge("client", "y", "serve", "x", transport="shm", credits=64),
        Edge("serve", "y", "client", "x", transport="zmq", response_to="client.y -> serve.x"),
    ]
    graph = Graph.of(nodes, edges)
    plans = {plan.scheme: plan for plan in plan_links(graph, "q")}
    assert plans["zmq"].capacity_messages >= 64
    assert plans["zmq"].limits.capacity_messages >= 64


@pytest.mark.parametrize(
    ("tensors", "capacity_bytes"),
    [
        ((), RING_BYTES),
        (("float32[rows,4096]",), RING_BYTES),
        (("bfloat16[512,7168]",), 4 * 2 * 512 * 7168),
        (("float32[512,1024]", "int64[512]"), 4 * (4 * 512 * 1024 + 8 * 512)),
        (("float64[4096,4096]",), MAX_RING_BYTES),
    ],
)
def test_a_ring_holds_four_messages_of_declared_size(tensors, capacity_bytes):
    """At either end of the edge, and of the largest on the link."""
    small, large = PortSpec("y", ("float32[4]",)), PortSpec("x", tensors)
    nodes = [Node("a", "m:f", "p", outputs={"y": small, "z": PortSpec("z")}), Node("b", "m:f", "q", inputs={"x": large})]
    graph = Graph.of(nodes, [Edge("a", "z", "b", "x", transport="shm", credits=1), Edge("a", "y", "b", "w", transport="shm", credits=1)])
    assert {plan.limits.capacity_bytes for worker in "pq" for plan in plan_links(graph, worker)} == {max(RING_BYTES, capacity_bytes)}
