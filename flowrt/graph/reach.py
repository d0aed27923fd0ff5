"""Computes the flow of tags through a graph: the layers whose messages can reach each port.

`follow` is a fixpoint over (node, first or later step, layer). Layers that no edge distinguishes are alike, so the first layer of each run
of such layers stands for the run: a model of 61 layers costs no more than one of six.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field

from flowrt.graph.derived import derived
from flowrt.graph.model import Edge, Graph, Node

Point = tuple[bool, int]  # (a later step than the first, first layer of a run)

_SINGLE_LAYERS = 8  # first layers that are never merged, for graphs that mention no layer


@dataclass
class Flow:
    """`arrivals`: port -> point -> the edges that can carry a message there. `fires`: node -> points at which it can fire.

    `edge_origins`: edge -> the emitting nodes whose tags it carries.
    """

    layers: tuple[int, ...]  # the first layer of each run, ascending; the last run has no end
    arrivals: dict[tuple[str, str], dict[Point, set[str]]] = field(default_factory=dict)
    fires: dict[str, set[Point]] = field(default_factory=dict)
    edge_origins: dict[str, set[str]] = field(default_factory=dict)

    def after(self, layer: int) -> tuple[int, ...]:
        """The runs of the layers that follow those of the run at `layer`."""
        place = bisect_right(self.layers, layer)
        if place == len(self.layers):
            return (layer,)
        onward = self.layers[place]
        return (onward,) if onward == layer + 1 else (layer, onward)

    def at(self, node: str, port: str) -> Mapping[Point, set[str]]:
        return self.arrivals.get((node, port), {})


@derived
def follow(graph: Graph) -> Flow:
    """Every point that a message can reach, if each firing produced a message on every port."""
    flow = Flow(_runs(graph))
    waiting: list[tuple[str, Point, str | None]] = []
    for node in graph.nodes.values():
        flow.fires[node.name] = set()
        if node.kind.emits:
            layers = [layer for layer in flow.layers if layer < _emitted_layers(node)]
            emitted = [(layer, port) for layer in layers for port in node.outputs if node.kind.emits_at(port, layer)]
            waiting += [(node.name, (later, layer), port) for later in (False, True) for layer, port in emitted]
    while waiting:
        name, point, port = waiting.pop()
        flow.fires[name].add(point)
        for edge in graph.edges_from(name):
            if port is not None and edge.source_port != port:
                continue
            for target_point in _step(edge, point, flow):
                edges = flow.arrivals.setdefault((edge.target, edge.target_port), {}).setdefault(target_point, set())
                if edge.name in edges:
                    continue
                edges.add(edge.name)
                if target_point not in flow.fires[edge.target] and _complete(graph, flow, edge.target, target_point):
                    flow.fires[edge.target].add(target_point)
                    waiting.append((edge.target, target_point, None))
    _follow_origins(graph, flow)
    return flow


def _emitted_layers(node: Node) -> int:
    num_layers = node.options.get("num_layers", 1)
    return num_layers if type(num_layers) is int else 1


def _runs(graph: Graph) -> tuple[int, ...]:
    """The first layer of each run: every layer at which some edge begins or stops to carry or to deliver messages."""
    starts = set(range(_SINGLE_LAYERS + 1))
    for layers in {edge.layers for edge in graph.edges.values() if edge.layers.layers is not None}:
        members = layers.layers or frozenset()
        for layer in members:
            if layer - 1 not in members:
                starts |= {layer, layer + 1}
            if layer + 1 not in members:
                starts |= {layer + 1, layer + 2}
    for edge in graph.edges.values():
        if edge.tag.kind == "to_layer":
            starts |= {edge.tag.layer, edge.tag.layer + 1}
    starts |= {_emitted_layers(node) for node in graph.nodes.values() if node.kind.emits}
    return tuple(sorted(starts))


def _step(edge: Edge, point: Point, flow: Flow) -> list[Point]:
    later, layer = point
    if layer not in edge.layers:
        return []
    if edge.tag.kind == "next_step":
        return [(True, 0)]
    if edge.tag.kind == "to_layer":
        return [(later, edge.tag.layer)]
    if edge.tag.kind == "next_layer":
        return [(later, onward) for onward in flow.after(layer)]
    return [point]


def _complete(graph: Graph, flow: Flow, name: str, point: Point) -> bool:
    """Whether all inputs of the node can be there; a gather port may stay empty."""
    node = graph.nodes[name]
    if node.kind.emits:
        return False  # follow() adds it
    return all(port.takes == "gather" or point in flow.at(name, port.name) for port in node.inputs.values())


def _follow_origins(graph: Graph, flow: Flow) -> None:
    onward: dict[str, list[Edge]] = {}  # by the node whose tags the edge carries: a response carries only those of its request
    for edge in graph.edges.values():
        client = edge.source if edge.response_to is None else graph.edges[edge.response_to].source
        onward.setdefault(client, []).append(edge)
    sources = [node.name for node in graph.nodes.values() if node.kind.emits]
    for origin in sources:
        reached, waiting = {*sources}, [origin]
        while waiting:
            for edge in onward.get(waiting.pop(), ()):
                flow.edge_origins.setdefault(edge.name, set()).add(origin)
                if edge.target not in reached:
                    reached.add(edge.target)
                    waiting.append(edge.target)
