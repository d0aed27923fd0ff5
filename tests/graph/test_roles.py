"""Which processes may die."""

from __future__ import annotations

from dataclasses import replace

from flowrt.graph.model import Edge, Graph, Node, ReliabilitySettings
from flowrt.graph.roles import may_die, neighbours


def graph_of(**operators: tuple[str, ...]) -> Graph:
    """process -> the operators it holds"""
    nodes = [Node(f"{process}.{operator}", operator, process) for process, held in operators.items() for operator in held]
    return Graph.of(nodes, ())


def test_servers_that_hold_experts_and_nothing_else_may_die() -> None:
    graph = graph_of(attention=("source", "attention", "dispatch"), one=("experts",), two=("experts",), both=("experts", "combine"))
    assert may_die(graph) == {"one", "two"}


def test_nobody_may_in_a_graph_of_own_operators() -> None:
    assert may_die(graph_of(left=("ops:scale",), right=("ops:experts",))) == frozenset()


def test_nobody_may_without_failover() -> None:
    graph = graph_of(attention=("source",), one=("experts",))
    assert may_die(replace(graph, reliability=ReliabilitySettings(failover=False))) == frozenset()


def test_neighbours_are_those_that_share_an_edge() -> None:
    nodes = {name: Node(name, "ops:x", process) for name, process in (("a", "one"), ("b", "two"), ("c", "two"), ("d", "three"))}
    edges = [Edge(source, "y", target, "x") for source, target in ("ab", "ba", "bc", "ac", "da")]
    assert neighbours(Graph.of(nodes.values(), edges)) == {"one": ("two", "three"), "two": ("one",), "three": ("one",)}
