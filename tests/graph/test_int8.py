"""`int8`: which edges of the short form carry INT8 rows, and where that is refused."""

from __future__ import annotations

import json

import pytest
import yaml

from flowrt.errors import GraphError
from flowrt.graph.model import Graph
from flowrt.graph.written import to_yaml

TRAMPOLINES = "flowrt: 1\nmodel: {path: m}\ndeploy: {experts: {servers: 3, trampoline: always, int8: none}}\n"
COLOCATED = "flowrt: 1\nmodel: {path: m}\ndeploy: {attention: {groups: 2}, experts: {servers: colocated, int8: both}}\n"


def int8_ports(graph: Graph) -> set[str]:
    return {edge.source_port.rstrip("0123456789") for edge in graph.edges.values() if edge.int8}


@pytest.mark.parametrize(
    ("choice", "ports"),
    [
        ("none", set()),
        ("dispatch", {"server"}),
        ("combine", {"results"}),
        ("both", {"server", "results"}),
    ],
)
def test_rows_of_a_choice_travel_as_int8(load, tmp_path, choice: str, ports: set[str]) -> None:
    graph = load(TRAMPOLINES, f"deploy.experts.int8={choice}")
    assert int8_ports(graph) == ports
    written = to_yaml(graph)
    assert load(written) == graph
    assert written.count("int8: true") == sum(edge.int8 for edge in graph.edges.values())


def test_rows_that_stay_in_their_process_are_exact(load) -> None:
    graph = load(COLOCATED)
    assert {graph.crosses(edge) for edge in graph.edges.values() if edge.int8} == {True}
    assert sum(edge.int8 for edge in graph.edges.values()) == 4


def test_kv_travels_as_int8_where_the_file_has_the_key(load) -> None:
    text = "flowrt: 1\nmodel: {path: m}\ndeploy: {prefill: {workers: 2, int8: true}, attention: {groups: 2}}\n"
    graph = load(text)
    assert int8_ports(graph) == {"chunk"}
    assert sum(edge.int8 for edge in graph.edges.values()) == 4
    assert load(to_yaml(graph)) == graph
    with pytest.raises(GraphError, match=r":3: deploy\.prefill\.int8: INT8 changes the numbers, and numerics are strict; write fast"):
        load(text + "numerics: strict\n")


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (TRAMPOLINES.replace("none", "both") + "numerics: strict\n", r"deploy\.experts\.int8: INT8 changes the numbers"),
        ("flowrt: 1\nmodel: {path: m}\ndeploy: {experts: {int8: combine}}\n", "with servers: 0 no rows travel; write int8: none"),
        (TRAMPOLINES.replace("none", "all"), "'all' is not possible; write none, dispatch, combine or both"),
    ],
)
def test_impossible_int8_is_refused(load, text: str, error: str) -> None:
    with pytest.raises(GraphError, match=error):
        load(text)


@pytest.mark.parametrize(
    ("edge", "error"),
    [
        ("attention.0.gate.routing -> attention.0.dispatch.routing", "INT8 is for rows between dispatch and experts"),
        ("attention.0.dispatch.server0 -> attention.0.experts.rows", "both ends are in process attention.0"),
    ],
)
def test_other_edges_are_refused(load, edge: str, error: str) -> None:
    document = yaml.safe_load(to_yaml(load(COLOCATED)))
    document["edges"][edge]["int8"] = True
    with pytest.raises(GraphError, match=error):
        load(json.dumps(document))
