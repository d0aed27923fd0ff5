"""Which layers' messages can reach which port: the flow of tags through a graph, followed on paper.

Here: `follow`, a fixpoint over (node, first or later step, layer). Not here: what is wrong with the result (checks.py), what it
means for fusion (fuse.py). Layers beyond every number that the graph mentions behave alike, so the last one stands for all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from flowrt.graph.builtin import SOURCE
from flowrt.graph.model import INPUT, Edge, Graph

Point = tuple[bool, int]  # (a later step than the first, layer)

_SPARE_LAYERS = 8  # single layers kept apart in a graph that mentions none


@dataclass
class Flow:
    """`arrivals`: port -> point -> the edges that can bring a message there. `fires`: node -> points at which it can fire.

    `origins`: node -> the minting nodes whose tags reach it; an edge that answers brings only those of its request.
    """

    num_layers: int
    arrivals: dict[tuple[str, str], dict[Point, set[int]]] = field(default_factory=dict)
    fires: dict[str, set[Point]] = field(default_factory=dict)
    origins: dict[str, set[str]] = field(default_factory=dict)
    edge_origins: dict[int, set[str]] = field(default_factory=dict)

    def at(self, node: str, port: str) -> Mapping[Point, set[int]]:
        return self.arrivals.get((node, port), {})


def follow(graph: Graph) -> Flow:
    """Every point that any message can reach, if each firing gave a message on every port."""
    flow = Flow(_num_layers(graph))
    edges_from: dict[str, list[Edge]] = {}
    for edge in graph.edges:
        edges_from.setdefault(edge.source, []).append(edge)
    waiting: list[tuple[str, Point, str | None]] = []
    for node in graph.nodes.values():
        flow.fires[node.name] = set()
        if node.operator == INPUT:
            waiting += [(node.name, (later, 0), None) for later in (False, True)]
        elif node.operator == SOURCE:
            layers = node.options.get("num_layers", 1)
            count = layers if type(layers) is int else 1
            for later in (False, True):
                waiting += [(node.name, (later, 0), "tokens"), (node.name, (later, 0), "sampling")]
                waiting += [(node.name, (later, min(layer, flow.num_layers - 1)), "layout") for layer in range(count)]
    while waiting:
        name, point, port = waiting.pop()
        flow.fires[name].add(point)
        for edge in edges_from.get(name, ()):
            if port is not None and edge.source_port != port:
                continue
            for target_point in _step(edge, point, flow.num_layers):
                edges = flow.arrivals.setdefault((edge.target, edge.target_port), {}).setdefault(target_point, set())
                if edge.id in edges:
                    continue
                edges.add(edge.id)
                if target_point not in flow.fires[edge.target] and _complete(graph, flow, edge.target, target_point):
                    flow.fires[edge.target].add(target_point)
                    waiting.append((edge.target, target_point, None))
    _follow_origins(graph, flow)
    return flow


def mints(operator: str) -> bool:
    """Whether a node of this operator makes tags instead of waiting for them."""
    return operator in (SOURCE, INPUT)


def _num_layers(graph: Graph) -> int:
    mentioned = [_SPARE_LAYERS]
    for edge in graph.edges:
        mentioned += [edge.tag.layer, *(edge.layers.layers or ())]
    for node in graph.nodes.values():
        if node.operator == SOURCE and type(node.options.get("num_layers")) is int:
            mentioned.append(node.options["num_layers"])
    return max(mentioned) + 2


def _step(edge: Edge, point: Point, num_layers: int) -> list[Point]:
    later, layer = point
    if layer not in edge.layers:
        return []
    if edge.tag.kind == "next_step":
        return [(True, 0)]
    if edge.tag.kind == "to_layer":
        return [(later, edge.tag.layer)]
    if edge.tag.kind == "next_layer":
        return [(later, min(layer + 1, num_layers - 1))]
    return [point]


def _complete(graph: Graph, flow: Flow, name: str, point: Point) -> bool:
    """Whether all that the node waits for can be there; a gather port may stay empty."""
    node = graph.nodes[name]
    if mints(node.operator):
        return False  # it is there from the start
    return all(port.takes == "gather" or point in flow.at(name, port.name) for port in node.inputs.values())


def _follow_origins(graph: Graph, flow: Flow) -> None:
    flow.origins = {node.name: {node.name} if mints(node.operator) else set() for node in graph.nodes.values()}
    edges_from: dict[str, list[Edge]] = {}
    for edge in graph.edges:
        flow.edge_origins[edge.id] = set()
        edges_from.setdefault(edge.source, []).append(edge)
        if edge.answers is not None:
            asking = graph.edges[edge.answers].source
            if asking != edge.source:
                edges_from.setdefault(asking, []).append(edge)
    waiting = [name for name, origins in flow.origins.items() if origins]
    while waiting:
        name = waiting.pop()
        for edge in edges_from.get(name, ()):
            giver = edge.source if edge.answers is None else graph.edges[edge.answers].source
            if giver != name:
                continue
            flow.edge_origins[edge.id] |= flow.origins[name]
            target = flow.origins[edge.target]
            if not mints(graph.nodes[edge.target].operator) and not flow.origins[name] <= target:
                target |= flow.origins[name]
                waiting.append(edge.target)
