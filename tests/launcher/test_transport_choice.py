"""Which process hosts each worker, and which transport carries each edge."""

from collections.abc import Mapping

import pytest

from flowrt.errors import GraphError
from flowrt.graph.model import GATEWAY, Edge, Graph, Node
from flowrt.graph.settings import HostSettings
from flowrt.launcher.transport_choice import UnavailableReason, choose_transports, num_threads, pack, process_name
from flowrt.transports.errors import AddressError

ALL: dict[str, str | None] = {"inproc": None, "shm": None, "zmq": None}


def reasons(available: Mapping[str, str | None]) -> UnavailableReason:
    def reason(scheme: str) -> str | None:
        if scheme not in available:
            raise AddressError(f"unknown transport {scheme!r}; known: {', '.join(available)}")
        return available[scheme]

    return reason


def graph_of(*transports: str, processes: str | int = "many") -> Graph:
    """Four workers of two nodes in a row (a0 -> a1, b0 -> b1 ...), each linked to the next by an edge of the given transport."""
    nodes = {f"{name}{index}": Node(f"{name}{index}", "nothing", name) for name in "abcd" for index in range(2)}
    inside = [Edge(f"{name}0", "out", f"{name}1", "in") for name in "abcd"]
    links = [
        Edge(f"{source}1", "out", f"{target}0", "in", transport=transport)
        for source, target, transport in zip("abc", "bcd", transports, strict=False)
    ]
    places = {"edges.a1.out -> b0.in.transport": ("g.yaml:7", "links.a-b.transport")}
    return Graph.of(nodes.values(), (*inside, *links), processes=processes, places=places)


def test_pack() -> None:
    assert pack(graph_of()) == [["a"], ["b"], ["c"], ["d"]]
    assert pack(graph_of(processes=3)) == [["a", "d"], ["b"], ["c"]]
    assert pack(graph_of(processes=9)) == [["a"], ["b"], ["c"], ["d"]]
    assert pack(graph_of(processes="one")) == []


def test_process_name() -> None:
    assert process_name(["a"]) == "a"
    assert process_name(["a", "b"]) == "a+b"
    assert process_name(["a", "b", "c", "d"]) == "a+3 others"


def test_threads_share_the_cores_by_default() -> None:
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
        (3, ALL, ["shm", "shm", "zmq"]),
        ("one", ALL | {"shm": "no compiler"}, ["inproc", "inproc", "zmq"]),
        (1, ALL, ["inproc", "inproc", "zmq"]),
    ],
)
def test_transports(processes: str | int, available: dict[str, str | None], chosen: list[str]) -> None:
    graph = choose_transports(graph_of("auto", "auto", "zmq", processes=processes), reasons(available))
    assert [edge.transport for edge in graph.edges.values()] == ["local"] * 4 + chosen


def test_edges_of_the_gateway() -> None:
    nodes = {"input": Node("input", "input", GATEWAY), "a": Node("a", "nothing", "a")}
    edges = (Edge("input", "x", "a", "x"), Edge("a", "y", "output", "y"))
    for processes, scheme in (("many", "shm"), ("one", "inproc"), (1, "shm")):
        graph = choose_transports(Graph.of(nodes.values(), edges, processes=processes), reasons(ALL))
        assert [edge.transport for edge in graph.edges.values()] == [scheme, scheme]


@pytest.mark.parametrize(
    ("transport", "available", "text"),
    [
        ("inproc", ALL, "g.yaml:7: links.a-b.transport: inproc reaches only inside one OS process, and a and b are two"),
        ("smoke", ALL, "g.yaml:7: links.a-b.transport: unknown transport 'smoke'; known: inproc, shm, zmq"),
        ("shm", ALL | {"shm": "no compiler"}, "g.yaml:7: links.a-b.transport: transport shm cannot be used here: no compiler"),
        ("auto", {"inproc": None, "shm": "no compiler", "zmq": "not installed"}, "(shm: no compiler; zmq: not installed)"),
    ],
)
def test_an_edge_without_a_transport_is_the_users(transport: str, available: dict[str, str | None], text: str) -> None:
    with pytest.raises(GraphError) as caught:
        choose_transports(graph_of(transport), reasons(available))
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)


def test_auto_chooses_the_first_that_works_and_explains_it() -> None:
    both: dict[str, str | None] = {"shm": None, "zmq": None}
    for available, scheme, why in (
        (both, "shm", "shm, the fastest that both ends have"),
        (both | {"shm": "no atomics"}, "zmq", "zmq, the fastest that both ends have; not shm: no atomics"),
    ):
        edges = choose_transports(graph_of("auto", "auto", "auto"), reasons(available)).edges.values()
        assert {(edge.transport, edge.why) for edge in edges if edge.transport != "local"} == {(scheme, why)}


def on_two_hosts(transport: str, *trusted: str) -> Graph:
    process_hosts = {"a": "host.0", "b": "host.1", "c": "host.1", "d": "host.1"}
    return graph_of(transport).replace(hosts=HostSettings(engine="local", trusted=trusted), process_hosts=process_hosts)


def test_between_hosts_auto_is_encrypted_unless_the_network_is_trusted() -> None:
    available = ALL | {"ucx": None}
    edge = choose_transports(on_two_hosts("auto"), reasons(available)).edges["a1.out -> b0.in"]
    assert (edge.transport, edge.why) == ("zmq", "zmq, encrypted, between host.0 and host.1")
    edge = choose_transports(on_two_hosts("auto", "10.1.0.0/16"), reasons(available)).edges["a1.out -> b0.in"]
    assert (edge.transport, edge.why) == ("ucx", "ucx, in a network named as trusted, between host.0 and host.1")
    edge = choose_transports(on_two_hosts("auto", "10.1.0.0/16"), reasons(ALL | {"ucx": "no ucxx"})).edges["a1.out -> b0.in"]
    assert (edge.transport, edge.why) == ("zmq", "zmq, encrypted, between host.0 and host.1; not ucx: no ucxx")


def test_between_hosts_a_transport_must_encrypt_or_the_network_be_trusted() -> None:
    available = ALL | {"ucx": None, "faulty+ucx": None}
    for scheme in ("ucx", "faulty+ucx"):
        assert choose_transports(on_two_hosts(scheme, "10.1.0.0/16"), reasons(available)).edges["a1.out -> b0.in"].transport == scheme
        with pytest.raises(
            GraphError, match=r"ucx does not encrypt: a is on host\.0, b on host\.1; use auto, or name the network .* hosts\.trusted"
        ):
            choose_transports(on_two_hosts(scheme), reasons(available))
    with pytest.raises(GraphError, match=r"shm does not reach other hosts: a is on host\.0, b on host\.1; use auto"):
        choose_transports(on_two_hosts("shm", "10.1.0.0/16"), reasons(available))
