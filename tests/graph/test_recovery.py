"""The survivable processes follow from operator state, in one table for code, docs and simulation."""

from __future__ import annotations

import re
from pathlib import Path

from flowrt.graph.model import FORK_SERVER, GATEWAY, MONITOR, Edge, Graph, Node
from flowrt.graph.recovery import RULES, Recovery, neighbours, rule_of, survivable_processes, survives
from flowrt.graph.settings import ReliabilitySettings

PAGE = Path(__file__).parents[2] / "docs" / "reliability.md"


def graph_of(**operators: tuple[str, ...]) -> Graph:
    """process -> the operators it holds"""
    return Graph.of(Node(f"{process}.{operator}", operator, process) for process, held in operators.items() for operator in held)


def test_a_process_recovers_as_its_operator_with_the_most_state() -> None:
    graph = graph_of(one=("experts",), two=("experts", "combine"), three=("experts", "ops:x"), experts=("source", "attention"))
    recoveries = {process: rule_of(graph, process).recovery for process in graph.process_names()}
    assert recoveries == {"one": "redispatch", "two": "replay", "three": "fatal", "experts": "replay"}
    assert survivable_processes(graph) == {"one", "experts"}, "the group of two has no source: part of it is elsewhere"


def test_a_group_in_several_processes_is_not_replayed() -> None:
    nodes = [Node("s", "source", "a"), Node("attend", "attention", "a"), Node("gate", "gate", "b"), Node("e", "experts", "c")]
    edges = [Edge("attend", "normed", "gate", "x"), Edge("attend", "residual", "e", "rows")]
    assert survivable_processes(Graph.of(nodes, edges)) == {"c"}
    assert survivable_processes(Graph.of([nodes[0], nodes[1], nodes[3]], edges[1:])) == {"a", "c"}


def test_no_name_of_a_process_or_node_makes_it_survivable() -> None:
    nodes = [Node("experts.0", "ops:experts", "experts.0"), Node("any", "experts", "left")]
    assert survivable_processes(Graph.of(nodes)) == {"left"}


def test_no_process_of_user_operators_is_survivable() -> None:
    assert survivable_processes(graph_of(left=("ops:scale",), right=("ops:experts",))) == frozenset()


def test_no_process_is_survivable_with_recovery_off() -> None:
    graph = graph_of(attention=("source",), one=("experts",)).replace(reliability=ReliabilitySettings(recovery="off"))
    assert survivable_processes(graph) == frozenset()
    assert survives(graph, MONITOR)


def test_processes_of_flowrt_have_rules_of_their_own() -> None:
    graph = graph_of(one=("experts",))
    assert [rule_of(graph, process).recovery for process in (MONITOR, FORK_SERVER, GATEWAY)] == ["restart", "restart", "fatal"]
    assert [survives(graph, process) for process in (MONITOR, FORK_SERVER, GATEWAY)] == [True, True, False]


def test_the_table_in_the_docs_is_the_table_in_the_code() -> None:
    rows = re.findall(r"^\| ([^|]+) \| ([^|]+) \| `(\w+)`: ([^|]+) \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert rows == [(rule.keeps, rule.lost, rule.recovery, rule.effect) for rule in RULES.values()]
    assert {rule.recovery for rule in RULES.values()} == set(Recovery)


def test_neighbours_are_those_that_share_an_edge() -> None:
    nodes = {name: Node(name, "ops:x", process) for name, process in (("a", "one"), ("b", "two"), ("c", "two"), ("d", "three"))}
    edges = [Edge(source, "y", target, "x") for source, target in ("ab", "ba", "bc", "ac", "da")]
    assert neighbours(Graph.of(nodes.values(), edges)) == {"one": ("two", "three"), "two": ("one",), "three": ("one",)}
