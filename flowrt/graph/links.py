"""Sets the transport, link profile, credits and opening of every edge between processes, from the links of pairs of roles."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from flowrt.graph.document import Document, Path_
from flowrt.graph.model import Edge, Graph, role_of
from flowrt.graph.notation import nearest
from flowrt.graph.schema import LinkSection


def role_pair(graph: Graph, edge: Edge) -> tuple[str, str]:
    """The roles of both ends of an edge."""
    source, target = graph.ends_of(edge)
    return role_of(source), role_of(target)


def apply_links(graph: Graph, links: Mapping[str, LinkSection], own: Mapping[str, LinkSection]) -> Graph:
    """The graph with the link of every edge between processes.

    `links` are sections by pair of roles, such as "attention-experts"; a pair holds in both directions. `own` are sections of single
    edges, whose keys win. By default an edge has a credit for each tag in flight; a response needs none.
    """
    is_model = any(node.operator == "source" for node in graph.nodes.values())
    default_credits = graph.micro_batches if is_model else graph.limits.in_flight
    return replace(graph, edges={name: _linked(graph, edge, links, own.get(name), default_credits) for name, edge in graph.edges.items()})


def _linked(graph: Graph, edge: Edge, links: Mapping[str, LinkSection], own: LinkSection | None, credits: int) -> Edge:
    if not graph.crosses(edge):
        return edge
    a, b = role_pair(graph, edge)
    section = links.get(f"{a}-{b}") or links.get(f"{b}-{a}") or LinkSection()
    keys = {key: getattr(own if own is not None and key in own.model_fields_set else section, key) for key in LinkSection.model_fields}
    keys["credits"] = 0 if edge.response_to is not None else keys["credits"] or credits
    return replace(edge, **keys)


def check_links(graph: Graph, links: Mapping[str, LinkSection], path: Path_, document: Document) -> None:
    """Raises GraphError for a pair of roles without an edge between them."""
    pairs = {"-".join(role_pair(graph, edge)) for edge in graph.edges.values() if graph.crosses(edge)}
    for pair in links:
        if not any(pair in (f"{a}-{b}", f"{b}-{a}") for a, b in (role_pair(graph, edge) for edge in graph.edges.values())):
            document.fail((*path, pair), f"no edge leads between these roles; {nearest(pair, pairs)}")
