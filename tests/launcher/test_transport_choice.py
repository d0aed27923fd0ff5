"""Which process hosts each worker, and which transport carries each edge."""

import pytest

from flowrt.errors import GraphError
from flowrt.graph.model import GATEWAY, Edge, Graph, Node
from flowrt.launcher.transport_choice import choose_transports, host_name, num_threads, pack

ALL = {"inproc": None, "shm": None, "zmq": None}


def graph_of(*transports: str, processes: str | int = "many", line: int = 0) -> Graph:
    """Four workers of two nodes in a row (a0 -> a1, b0 -> b1 ...), each linked to the next by an edge of the given transport."""
    nodes = {f"{name}{index}": Node(f"{name}{index}", "nothing", name) for name in "abcd" for index in range(2)}
    inside = [Edge(f"{name}0", "out", f"{name}1", "in") for name in "abcd"]
    links = [
        Edge(f"{source}1", "out", f"{target}0", "in", transport=transport, line=line)
        for source, target, transport in zip("abc", "bcd", transports, strict=False)
    ]
    return Graph.of(nodes.values(), (*inside, *links), processes=processes)


def test_pack() -> None:
    assert pack(graph_of()) == [["a"], ["b"], ["c"], ["d"]]
    assert pack(graph_of(processes=3)) == [["a", "d"], ["b"], ["c"]]
    assert pack(graph_of(processes=9)) == [["a"], ["b"], ["c"], ["d"]]
    assert pack(graph_of(processes="one")) == []


def test_host_name() -> None:
    assert host_name(["a"]) == "a"
    assert host_name(["a", "b"]) == "a+b"
    assert host_name(["a", "b", "c", "d"]) == "a+3 others"


def test_threads_share_the_cores_unless_the_graph_says() -> None:
    graph = Graph(graph_of().nodes, {}, threads={"a": 3, "b": "auto"})
    each = [["a"], ["b"], ["c"], ["d"]]
    assert num_threads(graph, ["a"], each, 8) == 3
    assert num_threads(graph, ["b"], each, 8) == 2
    assert num_threads(graph, ["c"], each, 2) == 1
    assert num_threads(graph, ["a", "b"], [["a", "b"]], 8) == 8  # one process: the most that any of its workers may use


@pytest.mark.parametrize(("shape", "attention", "experts"), [({}, 8, 4), ({"groups": 2}, 2, 2), ({"micro_batches": 2}, 2, 2)])
def test_processes_that_take_turns_do_not_share_the_cores(shape: dict[str, int], attention: int, experts: int) -> None:
    groups = range(shape.get("groups", 1))
    nodes = [Node(f"{operator}.{group}", operator, f"attention.{group}") for group in groups for operator in ("source", "attention")]
    nodes += [Node(f"experts.{server}", "experts", f"experts.{server}") for server in range(2)]
    graph = Graph.of(nodes, micro_batches=shape.get("micro_batches", 1))
    hosts = pack(graph)
    assert num_threads(graph, ["attention.0"], hosts, 8) == attention
    assert num_threads(graph, ["experts.1"], hosts, 8) == experts


@pytest.mark.parametrize(
    ("processes", "available", "chosen"),
    [
        ("many", ALL, ["shm", "shm", "zmq"]),
        ("many", ALL | {"shm": "no compiler"}, ["zmq", "zmq", "zmq"]),
        ("many", {"inproc": None, "zmq": None}, ["zmq", "zmq", "zmq"]),
        (3, ALL, ["shm", "shm", "zmq"]),
        ("one", ALL | {"shm": "no compiler"}, ["inproc", "inproc", "zmq"]),
        (1, ALL, ["inproc", "inproc", "zmq"]),
    ],
)
def test_transports(processes: str | int, available: dict[str, str | None], chosen: list[str]) -> None:
    graph = choose_transports(graph_of("auto", "auto", "zmq", processes=processes), available)
    assert [edge.transport for edge in graph.edges.values()] == ["local"] * 4 + chosen


def test_edges_of_the_gateway() -> None:
    nodes = {"input": Node("input", "input", GATEWAY), "a": Node("a", "nothing", "a")}
    edges = (Edge("input", "x", "a", "x"), Edge("a", "y", "output", "y"))
    assert [edge.transport for edge in choose_transports(Graph.of(nodes.values(), edges), ALL).edges.values()] == ["shm", "shm"]
    assert [edge.transport for edge in choose_transports(Graph.of(nodes.values(), edges, processes="one"), ALL).edges.values()] == [
        "inproc",
        "inproc",
    ]
    assert [edge.transport for edge in choose_transports(Graph.of(nodes.values(), edges, processes=1), ALL).edges.values()] == [
        "shm",
        "shm",
    ]


@pytest.mark.parametrize(
    ("transport", "available", "text"),
    [
        ("inproc", ALL, "line 7: edge a1.out -> b0.in: inproc reaches only inside one OS process, and a and b are two"),
        ("smoke", ALL, "line 7: edge a1.out -> b0.in: unknown transport 'smoke'; known here: auto, inproc, shm, zmq"),
        ("shm", ALL | {"shm": "no compiler"}, "line 7: edge a1.out -> b0.in: transport shm cannot be used here: no compiler"),
        ("auto", {"inproc": None, "shm": "no compiler"}, "(shm: no compiler; zmq: not installed)"),
    ],
)
def test_an_edge_without_a_transport_is_the_users(transport: str, available: dict[str, str | None], text: str) -> None:
    with pytest.raises(GraphError) as caught:
        choose_transports(graph_of(transport, line=7), available)
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)


def test_auto_keeps_the_others_as_fallbacks_and_says_why() -> None:
    both, zmq_only = {"shm": None, "zmq": None}, {"shm": "no atomics", "zmq": None}
    edges = [edge for edge in choose_transports(graph_of("auto", "auto", "auto"), both).edges.values() if edge.transport == "shm"]
    assert edges
    assert {edge.fallbacks for edge in edges} == {("zmq",)}
    assert {edge.why for edge in edges} == {"shm, the fastest that both ends have; when it breaks, zmq carries on"}
    edges = [edge for edge in choose_transports(graph_of("auto", "auto", "auto"), zmq_only).edges.values() if edge.transport == "zmq"]
    assert {(edge.fallbacks, edge.why) for edge in edges} == {((), "zmq, the fastest that both ends have; not shm: no atomics")}
