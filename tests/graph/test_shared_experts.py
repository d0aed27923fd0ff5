"""Models with shared experts: a separate fused node on the residual path, present only for models that have them."""

from __future__ import annotations

import pytest

from flowrt.errors import GraphError
from flowrt.graph.fuse import fuse
from flowrt.graph.model import Edge, Graph
from flowrt.graph.written import to_yaml

SHORT = "flowrt: 1\nmodel: {path: m}\ndeploy: {attention: {groups: 2}, experts: {servers: 2}}\n"


def into(graph: Graph, node: str) -> dict[str, Edge]:
    return {edge.target_port: edge for edge in graph.edges.values() if edge.target == node}


def test_the_residual_goes_by_way_of_the_shared_experts(load) -> None:
    graph = load(SHORT, shared_experts=True, moe_layers=(1, 2, 3))
    for group in ("attention.0", "attention.1"):
        node = graph.nodes[f"{group}.shared"]
        assert (node.operator, node.process) == ("shared", group)
        edges = into(graph, node.name)
        assert {port: f"{edge.source}.{edge.source_port}" for port, edge in edges.items()} == {
            "x": f"{group}.attention.normed",
            "residual": f"{group}.attention.residual",
        }
        assert all(edge.layers.layers == {1, 2, 3} for edge in edges.values())
        assert into(graph, f"{group}.combine")["residual"].source == node.name
        assert into(graph, f"{group}.mlp")["residual"].source == f"{group}.attention"
        assert node.name in fuse(graph, group).fused


def test_models_without_have_no_such_node(load) -> None:
    graph = load(SHORT)
    assert not [node for node in graph.nodes.values() if node.operator == "shared"]
    assert into(graph, "attention.0.combine")["residual"].source == "attention.0.attention"


@pytest.mark.parametrize(
    ("made_for", "error"), [(True, "the graph has shared experts, the model has none"), (False, "the model has shared")]
)
def test_an_expanded_file_fits_models_of_its_kind_only(load, made_for: bool, error: str) -> None:
    text = to_yaml(load(SHORT, shared_experts=made_for))
    assert load(text, name="same.yaml", shared_experts=made_for).nodes
    with pytest.raises(GraphError, match=f"{error}.*expand it again for this model"):
        load(text, name="other.yaml", shared_experts=not made_for)
