from __future__ import annotations

from flowrt.graph.derived import derived
from flowrt.graph.model import Edge, Graph, Node, PortSpec, from_json, to_json

GRAPH = Graph.of(
    [Node("a", "m:f", "left", outputs={"y": PortSpec("y")}), Node("b", "m:g", "right", inputs={"x": PortSpec("x")})],
    [Edge("a", "y", "b", "x")],
)


def test_result_is_computed_once_per_graph_and_arguments() -> None:
    calls: list[tuple[int, str]] = []

    @derived
    def nodes_of(graph: Graph, process: str) -> list[str]:
        calls.append((len(graph.nodes), process))
        return [node.name for node in graph.nodes_of(process)]

    one, other = GRAPH.replace(), GRAPH.replace(nodes={**GRAPH.nodes, "c": Node("c", "m:h", "left")})
    assert nodes_of(one, "left") is nodes_of(one, "left")
    assert [nodes_of(one, "right"), nodes_of(other, "left")] == [["b"], ["a", "c"]]
    assert calls == [(2, "left"), (2, "right"), (3, "left")]


def test_derived_results_do_not_travel() -> None:
    graph, data = GRAPH.replace(), to_json(GRAPH)
    derived(lambda graph: object())(graph)
    assert to_json(graph) == data
    assert from_json(data) == graph


def test_workers_of_one_process_share_a_graph() -> None:
    data = to_json(GRAPH)
    assert from_json(data) is from_json(bytes(bytearray(data)))
