"""Draws changes of the running graph: copies of processes join, and processes leave, while requests run and faults occur."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from flowrt.errors import GraphError
from flowrt.graph.delta import check_change, require_valid
from flowrt.graph.facts import ModelFacts
from flowrt.graph.model import Edge, Graph, Node, PortSpec, edge_name, role_of
from flowrt.graph.recovery import attention_groups, expert_servers
from flowrt.launcher.transport_choice import choose_transports


@dataclass(frozen=True)
class DrawnChange:
    """The graph that the run is to have, so long after the first request."""

    at_seconds: float
    graph: Graph


def add_copy(graph: Graph, process: str, name: str) -> Graph:
    """The graph with a copy of an expert server or of a group, under this name, which ends in a number that no server has."""
    names = {node.name: f"{name}{node.name.removeprefix(process)}" for node in graph.nodes_of(process)}
    number = name.rpartition(".")[2]
    nodes = dict(graph.nodes)
    for node in graph.nodes_of(process):
        nodes[names[node.name]] = replace(node, name=names[node.name], process=name)
    renamed: dict[str, Edge] = {}
    ports: dict[str, str] = {}  # dispatch node -> its port to the server
    for edge in graph.edges.values():
        if edge.source not in names and edge.target not in names:
            continue
        source, target, port = names.get(edge.source, edge.source), names.get(edge.target, edge.target), edge.source_port
        if edge.source not in names and graph.nodes[edge.source].kind.dispatches and port.startswith("server"):
            ports[edge.source], port = port, f"server{number}"
        end = f"{source}.{port}", f"{target}.{edge.target_port}"
        renamed[edge.name] = replace(edge, source=source, target=target, source_port=port, name=edge_name(*end))
    added = [replace(edge, response_to=edge.response_to and renamed[edge.response_to].name) for edge in renamed.values()]
    for dispatch, port in ports.items():
        node = nodes[dispatch]
        servers = node.options["servers"] | {number: node.options["servers"][port.removeprefix("server")]}
        outputs = {**node.outputs, f"server{number}": PortSpec(f"server{number}")}
        nodes[dispatch] = replace(node, options={**node.options, "servers": servers}, outputs=outputs)
    settings = {key: _with_copy_of(getattr(graph, key), process, name) for key in ("devices", "threads", "cores")}
    nodes = {each: _with_domain_of(node, names) for each, node in nodes.items()}
    return graph.replace(nodes=nodes, edges=graph.edges | {edge.name: edge for edge in added}, **settings)


def _with_copy_of(settings: Mapping[str, Any], process: str, name: str) -> dict[str, Any]:
    return {**settings, **({name: settings[process]} if process in settings else {})}


def _with_domain_of(node: Node, names: Mapping[str, str]) -> Node:
    """A node at which the source of a copy takes turns with that of the original."""
    if node.batches is None or not node.batches.domains:
        return node
    domains = tuple((*domain, *(names[source] for source in domain if source in names)) for domain in node.batches.domains)
    return replace(node, batches=node.batches.replace(domains=domains))


def remove_process(graph: Graph, process: str) -> Graph:
    """The graph without this process."""
    edges = {edge.name: edge for edge in graph.edges.values() if process not in graph.ends_of(edge)}
    nodes = {name: _without_domain(node, graph, process) for name, node in graph.nodes.items() if node.process != process}
    for edge in graph.edges.values():
        if edge.name not in edges and edge.source in nodes and (node := nodes[edge.source]).kind.dispatches:
            outputs = {name: port for name, port in node.outputs.items() if name != edge.source_port}
            number = edge.source_port.removeprefix("server")
            servers = {key: held for key, held in node.options["servers"].items() if key != number}
            nodes[edge.source] = replace(node, outputs=outputs, options={**node.options, "servers": servers})
    settings = {
        key: {name: each for name, each in getattr(graph, key).items() if name != process} for key in ("devices", "threads", "cores")
    }
    return graph.replace(nodes=nodes, edges=edges, **settings)


def _without_domain(node: Node, graph: Graph, process: str) -> Node:
    if node.batches is None or not node.batches.domains:
        return node
    domains = (tuple(source for source in domain if graph.nodes[source].process != process) for domain in node.batches.domains)
    return replace(node, batches=node.batches.replace(domains=tuple(domain for domain in domains if domain)))


def _is_available(scheme: str) -> None:
    """The simulated network stands in for every transport."""


def draw_changes(chance: random.Random, graph: Graph, facts: Callable[[], ModelFacts]) -> tuple[DrawnChange, ...]:
    """Up to three changes, one after another or at once; none where the graph cannot change."""
    changes: list[DrawnChange] = []
    if any(node.kind.forwards for node in graph.nodes.values()):
        return ()
    at, number = float(10 ** chance.uniform(-3.3, -0.3)), 100
    for _ in range(chance.choice((1, 2, 2, 3))):
        after = graph
        for _ in range(chance.choice((1, 1, 2))):
            after = _draw_change(chance, after, f"{number}")
            number += 1
        if {*after.process_names()} == {*graph.process_names()}:
            continue
        try:
            require_valid(after, facts())
            check_change(choose_transports(graph, _is_available), choose_transports(after, _is_available))
        except GraphError:
            continue
        changes.append(DrawnChange(at, after))
        graph, at = after, at + chance.choice((0.0, 10 ** chance.uniform(-3, 0.3)))
    return tuple(changes)


def _draw_change(chance: random.Random, graph: Graph, number: str) -> Graph:
    groups, servers = attention_groups(graph), [each for each in expert_servers(graph) if each not in attention_groups(graph)]
    if not (roles := [each for each in (groups, servers) if each]):
        return graph
    process = chance.choice(chance.choice(roles))
    return add_copy(graph, process, f"{role_of(process)}.{number}") if chance.random() < 0.5 else remove_process(graph, process)
