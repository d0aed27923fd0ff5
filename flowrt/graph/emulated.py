"""`emulate:` of a graph: what it means as data, and what must hold for it. Pure.

Here: `emulation_of` and `check_emulation`. Not here: the smallest dilation, which the machine decides (flowrt/emulation.py), the numbers
behind a link's name (transports/emulation/profiles.py). Called by file.py.
"""

from __future__ import annotations

from collections.abc import Iterator

from flowrt.graph.checks import Problem
from flowrt.graph.model import Edge, Emulation, Graph
from flowrt.graph.notation import LINK_PROFILES
from flowrt.graph.schema import EmulateSection

_KEYS = {"attention": "attention_seconds", "experts": "expert_seconds"}


def emulation_of(section: EmulateSection | None) -> Emulation | None:
    """What the section says, as a part of the graph."""
    if section is None:
        return None
    compute = section.compute
    return Emulation(section.dilation, compute.attention_seconds, compute.expert_seconds, section.processes_per_nic)


def check_emulation(graph: Graph) -> Iterator[Problem]:
    """All problems of `graph.emulation` with the rest of the graph; none where nothing is emulated."""
    emulation = graph.emulation
    if emulation is None:
        return
    charges = emulation.charges()
    for operator in charges:
        if not any(node.operator == operator for node in graph.nodes.values()):
            path = ("emulate", "compute", _KEYS[operator])
            yield Problem(path, f"no node of this graph is an {operator!r} operator, so nothing would take this time; remove the key")
    crossing = [edge for edge in graph.edges.values() if graph.crosses(edge)]
    linked = [edge for edge in crossing if edge.link is not None]
    if not linked and not charges:
        text = "there is nothing to emulate; name the link of an edge between processes (link: ub), write compute:, or remove emulate"
        yield Problem(("emulate",), text)
    for edge in linked:
        if edge.link not in LINK_PROFILES and _is_instant(edge.link or ""):
            text = f"the link of {edge} takes no time for a message without bytes; give it latency_seconds or message_seconds above 0"
            yield Problem(("edges", edge.name, "link"), text)
    yield from _check_pairs(graph, crossing)


def _is_instant(link: str) -> bool:
    numbers = dict(part.partition("=")[::2] for part in link.split(","))
    return not any(float(numbers[key]) for key in ("latency_seconds", "message_seconds"))


def _check_pairs(graph: Graph, crossing: list[Edge]) -> Iterator[Problem]:
    """What travels between two processes keeps its order, so it takes one kind of link."""
    first: dict[frozenset[str], Edge] = {}
    for edge in crossing:
        ends = frozenset((graph.nodes[edge.source].process, graph.nodes[edge.target].process))
        other = first.setdefault(ends, edge)
        if other.link != edge.link:
            one, two = (f"{each} has {f'link {each.link}' if each.link else 'no link'}" for each in (other, edge))
            text = f"{one}, {two}, between the same two processes; with emulate all edges between two processes have one link"
            yield Problem(("edges", edge.name, "link"), f"{text}: write the same on both")
