"""Derives which processes compute with strict numerics, where roles differ. Pure.

Numerics belong to the roles that compute sequences: prefill workers and attention groups. Expert servers follow their clients, since strict
results are valid fast ones: servers that any strict client reaches compute strictly, and all their clients use the strict form of messages.
"""

from __future__ import annotations

from flowrt.graph.derived import derived
from flowrt.graph.kinds import Keeps
from flowrt.graph.model import GATEWAY, Graph, role_of


def is_strict(graph: Graph, process: str) -> bool:
    """Whether the role of the process has strict numerics. Those of expert servers are `strict_exchanges`."""
    return graph.role_numerics.get(role_of(process), graph.numerics) == "strict"


@derived
def strict_exchanges(graph: Graph) -> frozenset[str]:
    """The processes whose rows to and from experts have the strict form: strict clients, their servers, and all clients of these."""
    if "strict" not in (graph.numerics, *graph.role_numerics.values()):
        return frozenset()  # before all edges are looked at, of which a large graph has 400,000
    into = [(graph.nodes[edge.source], graph.nodes[edge.target]) for edge in graph.edges.values()]
    pairs = [(source.process, target.process) for source, target in into if target.kind.serves]
    clients = (source.process for source, target in into if target.kind.serves and not source.kind.serves)
    found = {process for process in clients if is_strict(graph, process)}
    while grown := {process for pair in pairs if not found.isdisjoint(pair) for process in pair} - found:
        found |= grown
    return frozenset(found)


@derived
def strict_processes(graph: Graph) -> frozenset[str]:
    """The processes that compute anything strictly. All of these need the CPU and one number of threads."""
    exchanges = strict_exchanges(graph)
    nodes = [node for node in graph.nodes.values() if node.process != GATEWAY]
    return frozenset(
        node.process
        for node in nodes
        if (node.process in exchanges if node.kind.keeps == Keeps.NOTHING else is_strict(graph, node.process))
    )


def processes_of_one_thread_count(graph: Graph) -> frozenset[str]:
    """Strict processes, and with them those that may share an operating system process with one, as torch has one number there."""
    strict = strict_processes(graph)
    return frozenset(graph.process_names()) if strict and graph.processes != "many" else strict


@derived
def numerics_text(graph: Graph) -> str:
    """ "strict", "fast", or both by role: "attention fast and prefill strict"."""
    roles = {role_of(node.process) for node in graph.nodes.values() if node.kind.schedules}
    by_role = {role: graph.role_numerics.get(role, graph.numerics) for role in sorted(roles)}
    found = set(by_role.values()) or {graph.numerics}
    return found.pop() if len(found) == 1 else " and ".join(" ".join(each) for each in by_role.items())


def is_exact(graph: Graph) -> bool:
    """Whether no failure changes a token: all roles that compute sequences are strict."""
    return numerics_text(graph) == "strict"
