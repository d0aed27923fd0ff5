"""Decides which nodes of a process continue the firing that feeds them, without waiting in the matching table.

A node is *fused* when, at any tag, all its inputs come from one earlier firing of the same process: from one node, or from several that
certainly fired in that firing. Otherwise it is an *entry*, which the runner matches. The process's source emits its messages before any
firing of a step, so they never separate nodes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from graphlib import TopologicalSorter

from flowrt.graph.derived import derived
from flowrt.graph.model import Edge, Graph, Node
from flowrt.graph.reach import Flow, Point, follow


@dataclass(frozen=True)
class Fusion:
    """The nodes of one process: `entries` wait in the matching table, `fused` continue a firing. Sources are neither.

    `chains` has a tuple per entry: the entry and the nodes that can fire after it, in order. A node may be in several chains.
    """

    entries: tuple[str, ...]
    fused: tuple[str, ...]
    chains: tuple[tuple[str, ...], ...]


@derived
def fuse(graph: Graph, process: str) -> Fusion:
    """The fusion of one process."""
    edges = [edge for edge in graph.edges.values() if graph.nodes[edge.target].process == process]
    return _ProcessFusion(graph, graph.nodes_of(process), edges, follow(graph)).fusion()


def fuse_all(graph: Graph) -> dict[str, Fusion]:
    """process -> its fusion, for every process but the gateway's."""
    flow = follow(graph)
    nodes: dict[str, list[Node]] = {}
    into: dict[str, list[Edge]] = {}
    for node in graph.nodes.values():
        nodes.setdefault(node.process, []).append(node)
    for edge in graph.edges.values():
        into.setdefault(graph.nodes[edge.target].process, []).append(edge)
    return {process: _ProcessFusion(graph, nodes[process], into.get(process, ()), flow).fusion() for process in graph.process_names()}


class _ProcessFusion:
    """The fusion of a process with these nodes; `edges` lead to them. Its time is proportional to the nodes, edges and chains."""

    def __init__(self, graph: Graph, nodes: Sequence[Node], edges: Iterable[Edge], flow: Flow) -> None:
        self._graph, self._flow = graph, flow
        self._sources = {node.name for node in nodes if node.kind.schedules}
        self._names = [node.name for node in nodes if not node.kind.emits]
        self._all_local = set(self._names) | self._sources
        self._into: dict[str, list[Edge]] = {name: [] for name in self._names}
        self._from: dict[str, list[Edge]] = {name: [] for name in self._names}
        for edge in edges:
            if edge.target in self._into:
                self._into[edge.target].append(edge)
                if edge.source in self._from:
                    self._from[edge.source].append(edge)
        self._order = {name: place for place, name in enumerate(self._topological())}
        # By node: the first node of the part of its firing that certainly ran before it, at the same tag. Of two nodes with the same root,
        # both ran in the firing of the root; with different roots, no node certainly ran before both.
        self._roots: dict[str, str] = {}
        for name in self._order:
            self._roots[name] = self._find_root(name)

    def fusion(self) -> Fusion:
        fused = {name: None for name in self._names if self._is_fused(name)}
        entries = tuple(name for name in self._names if name not in fused)
        return Fusion(entries, tuple(fused), tuple(self._chain(entry, fused) for entry in entries))

    def _is_fused(self, name: str) -> bool:
        edges = self._into[name]
        if any(edge.source not in self._all_local for edge in edges):
            return False
        edges = [edge for edge in edges if edge.source not in self._sources]
        if not edges:
            return False  # only the source feeds it: a firing begins here
        return all(self._one_firing(needed) for needed in self._alternatives(name, edges))

    def _alternatives(self, name: str, edges: list[Edge]) -> list[list[Edge]]:
        """For each point at which the node can fire, the edges whose messages it waits for there."""
        node, ids = self._graph.nodes[name], {edge.name: edge for edge in edges}
        found: dict[frozenset[str], list[Edge]] = {}
        for point in sorted(self._flow.fires[name]):
            arriving = self._arriving(name, point)
            needed = frozenset(arriving & ids.keys())
            if any(port.takes == "one" and len(self._flow.at(name, port.name).get(point, ())) > 1 for port in node.inputs.values()):
                return [edges]  # several edges may feed a port at once: no firing is certain
            if needed:
                found[needed] = [ids[edge] for edge in sorted(needed)]
        return list(found.values()) or [edges]

    def _arriving(self, name: str, point: Point) -> set[str]:
        ports = self._graph.nodes[name].inputs
        return {edge for port in ports for edge in self._flow.at(name, port).get(point, ())}

    def _one_firing(self, edges: list[Edge]) -> bool:
        """Whether one firing certainly produces all these messages, at one tag."""
        producers = {edge.source for edge in edges}
        if len(edges) == 1:
            return True
        if len({edge.tag for edge in edges}) > 1:
            return False
        return len({self._roots[name] for name in producers}) == 1

    def _find_root(self, name: str) -> str:
        edges = [edge for edge in self._into[name] if edge.source not in self._sources]
        if all(edge.tag.kind == "same" for edge in edges) and self._is_fused(name):
            roots = {self._roots[needed[0].source] for needed in self._alternatives(name, edges)}
            if len(roots) == 1:
                return roots.pop()
        return name

    def _chain(self, entry: str, fused: Collection[str]) -> tuple[str, ...]:
        found, waiting = {entry}, [entry]
        while waiting:
            fresh = {edge.target for edge in self._from[waiting.pop()] if edge.target in fused} - found
            found |= fresh
            waiting += fresh
        return (entry, *sorted(found - {entry}, key=self._order.__getitem__))

    def _topological(self) -> list[str]:
        """The nodes in an order in which, at one tag, each comes after the nodes that feed it."""
        feeding = {name: [e.source for e in self._into[name] if e.tag.kind == "same" and e.source in self._into] for name in self._names}
        return list(TopologicalSorter(feeding).static_order())
