"""Decides which processes may hold messages of a call of a user's graph after one of its firings has failed. Pure."""

from __future__ import annotations

from collections.abc import Container, Iterable

from flowrt.graph.model import INPUT, Edge, Graph


class CallHolders:
    """The processes that must fence a failed call, by the node that failed.

    Without this, each failure would cost two messages per process of the graph. A node that certainly fires once per call sends nothing
    when it fails. So the nodes behind it hold nothing, and the nodes that fed it have fired; only others may hold messages of the call.
    """

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._all = frozenset(graph.process_names())
        self._into: dict[str, list[Edge]] = {name: [] for name in graph.nodes}
        for edge in graph.edges.values():
            self._into[edge.target].append(edge)
        self._requests = {edge.response_to for edge in graph.edges.values()}
        self._fires_once = self._find_fired_once()
        self._known: dict[str, frozenset[str]] = {}

    def after_failure(self, node: str) -> frozenset[str]:
        """The processes that may hold messages of a call after the only firing of `node` has failed; "" stands for an unknown node.

        The process of the node itself need not hold any, because it fences the call before it reports the failure.
        """
        if node not in self._fires_once:
            return self._all
        if node not in self._known:
            self._known[node] = self._find(node)
        return self._known[node]

    def _find(self, node: str) -> frozenset[str]:
        fired, reached = self._fired_before(node), self._reached_without(node)
        holding = [
            each
            for each in self._graph.nodes.values()
            if each.name != node and (each.stateful or (each.name in reached and not self._is_done(each.name, fired, node)))
        ]
        return self._all & {each.process for each in holding}

    def _is_done(self, name: str, fired: Container[str], failed: str) -> bool:
        """Whether a node has fired, and the receivers have consumed all its messages. A request to `failed` stays without a response."""
        return name in fired and all(
            edge.target in fired or (edge.target == failed and edge.name not in self._requests) for edge in self._graph.edges_from(name)
        )

    def _fired_before(self, node: str) -> set[str]:
        """The nodes that have certainly fired when `node` fires; a gather may wait for none of its senders."""
        fired: set[str] = set()
        waiting = [node]
        while waiting:
            name = waiting.pop()
            for edge in self._into[name]:
                if edge.source not in fired and self._graph.nodes[name].inputs[edge.target_port].takes == "one":
                    fired.add(edge.source)
                    waiting.append(edge.source)
        return fired

    def _reached_without(self, node: str) -> set[str]:
        """The nodes that messages of a call can reach although `node` sends none."""
        fed: dict[str, set[str]] = {}  # node -> its ports that messages can reach
        waiting = [INPUT]
        while waiting:
            for edge in self._graph.edges_from(waiting.pop()):
                ports = fed.setdefault(edge.target, set())
                if edge.target_port not in ports:
                    ports.add(edge.target_port)
                    needed = {port.name for port in self._graph.nodes[edge.target].inputs.values() if port.takes == "one"}
                    if edge.target != node and edge.target_port in needed and needed <= ports:
                        waiting.append(edge.target)
        return set(fed)

    def _find_fired_once(self) -> set[str]:
        """The nodes that fire at most once per call: at its own tag, without a cycle before them."""
        once: set[str] = set()
        missing = {name: len(edges) for name, edges in self._into.items()}  # incoming edges whose senders are not known to fire once
        waiting = [name for name in self._graph.nodes if not missing[name]]
        while waiting:
            name = waiting.pop()
            once.add(name)
            for edge in self._graph.edges_from(name):
                missing[edge.target] -= edge.tag.kind == "same" and edge.layers.layers is None
                if not missing[edge.target] and self._takes_one_each(edge.target, self._into[edge.target]):
                    waiting.append(edge.target)
        return once

    def _takes_one_each(self, name: str, edges: Iterable[Edge]) -> bool:
        ports = [edge.target_port for edge in edges if self._graph.nodes[name].inputs[edge.target_port].takes == "one"]
        return len(ports) == len(set(ports))
