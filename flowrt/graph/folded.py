"""Counts the processes and edges for which those of a folded graph stand.

A large deployment is checked and shown as a folded graph: it has one process of each kind of equal ones (`expand.equal_ranks`), and
`Graph.folded` says how many each stands for. Of any other graph, each process and edge counts once.
"""

from __future__ import annotations

from collections.abc import Iterable

from flowrt.graph.model import Edge, Graph, role_of

MAX_WHOLE = 128  # processes of a deployment that is checked as a whole


def num_processes(graph: Graph, processes: Iterable[str]) -> int:
    return sum(graph.folded.get(process, 1) for process in processes)


def num_nodes(graph: Graph) -> int:
    return num_processes(graph, (node.process for node in graph.nodes.values()))


def num_edges(graph: Graph, edges: Iterable[Edge]) -> int:
    return sum(_num_like(graph, edge) if graph.folded else 1 for edge in edges)


def num_clients(graph: Graph, request: Edge) -> int:
    """The processes for which the sender of an edge between processes stands at one receiver."""
    if not graph.folded or graph.nodes[request.source].kind.forwards:  # a server is behind one trampoline
        return 1
    client, server = graph.ends_of(request)
    if role_of(client) == role_of(server):  # each to each other one
        return num_processes(graph, (process for process in graph.folded if role_of(process) == role_of(server))) - 1
    return graph.folded[client]


def _num_like(graph: Graph, edge: Edge) -> int:
    request = edge if edge.response_to is None else graph.edges[edge.response_to]
    _, server = graph.ends_of(request)
    return graph.folded[server] * (num_clients(graph, request) if graph.crosses(request) else 1)
