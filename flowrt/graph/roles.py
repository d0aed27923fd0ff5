"""Which processes of a graph may die while the run goes on, and who must hear of it. Pure.

Here: `may_die`, `neighbours`. Not here: who is alive (the detector), what is done when one dies (flowrt/cluster, flowrt/workers). Called
by the launcher, and by workers to know whose loss they outlive: all of them come to the same answer from the same graph.
"""

from __future__ import annotations

from flowrt.graph.model import Graph

_STATELESS = frozenset({"experts"})  # operators that keep nothing between two calls: another copy gives the same answer


def may_die(graph: Graph) -> frozenset[str]:
    """The expert servers: processes that hold `experts` nodes and nothing else. None when the graph wants no failover."""
    if not graph.reliability.failover:
        return frozenset()
    operators: dict[str, set[str]] = {}
    for node in graph.nodes.values():
        operators.setdefault(node.process, set()).add(node.operator)
    return frozenset(process for process, held in operators.items() if held <= _STATELESS)


def is_watched(graph: Graph) -> bool:
    """Whether a monitor watches the processes: those that can be restarted, and groups, whose requests can end without the run."""
    return graph.reliability.detector and bool(may_die(graph) or graph.model is not None)


def neighbours(graph: Graph) -> dict[str, tuple[str, ...]]:
    """process -> the others that share an edge with it, in the graph's order; a process without any is left out."""
    found: dict[str, dict[str, None]] = {}
    for edge in graph.edges.values():
        source, target = graph.nodes[edge.source].process, graph.nodes[edge.target].process
        if source != target:
            found.setdefault(source, {})[target] = None
            found.setdefault(target, {})[source] = None
    return {process: tuple(others) for process, others in found.items()}
