"""Derives the links that a worker needs from the graph alone. Pure.

links.py opens the links; flowrt/launcher/transport_choice.py chooses the transport of an edge.
"""

from __future__ import annotations

from math import ceil, prod

from flowrt.actors.links import LinkPlan
from flowrt.graph.model import Edge, Graph
from flowrt.graph.notation import parse_tensor_spec
from flowrt.transports.contract import Limits
from flowrt.transports.wire.message import DTYPE_BYTES

RING_BYTES = 8 << 20  # per direction: payloads up to half of its area are not copied by the receiver; 1 MiB is one
MAX_RING_BYTES = 64 << 20  # where messages of declared size are larger
PAYLOADS = 4  # of a ring: two are on their way at once, and the receiver keeps as many
KV_CHUNK_BYTES = 2 << 20  # of KV in one message, at most
KV_RING_BYTES = 8 * KV_CHUNK_BYTES  # as many chunks may be on their way, or held by the receiver


def plan_links(graph: Graph, worker: str) -> list[LinkPlan]:
    """One link per (peer, transport) that shares an edge with `worker`. The requester of an edge connects, of the first one by name: both
    ends plan alike, whatever else is in the graph."""
    shared: dict[tuple[str, str], list[Edge]] = {}
    for edge in graph.edges.values():
        source, target = graph.ends_of(edge)
        if source != target and worker in (source, target):
            peer = target if source == worker else source
            shared.setdefault((peer, edge.transport), []).append(edge)
    return [
        LinkPlan(
            peer,
            scheme,
            limits_of(graph, edges),
            outbox_messages(graph, edges),
            graph.nodes[min(edges, key=lambda edge: (edge.response_to is not None, edge.name)).source].process == worker,
            edges[0].link if graph.emulation is not None else None,  # all the same between two processes: the graph is checked
            all(edge.open == "lazy" for edge in edges),
            tuple(edge.id for edge in edges),
            carries_kv(graph, edges),
        )
        for (peer, scheme), edges in shared.items()
    ]


def limits_of(graph: Graph, edges: list[Edge]) -> Limits:
    return Limits(
        max_message_bytes=max(graph.limits_of(process).max_message_bytes for edge in edges for process in graph.ends_of(edge)),
        capacity_messages=max(16, 2 * sum(credits_of(graph, edge) for edge in edges)),
        capacity_bytes=max(
            KV_RING_BYTES if carries_kv(graph, edges) else RING_BYTES,
            min(MAX_RING_BYTES, PAYLOADS * max(declared_bytes(graph, edge) for edge in edges)),
        ),
        silent_seconds=0 if graph.hosts is None else ceil(graph.hosts.dead_seconds),
    )


def carries_kv(graph: Graph, edges: list[Edge]) -> bool:
    return any(graph.nodes[edge.target].kind.kv == "pulls" for edge in edges)


def declared_bytes(graph: Graph, edge: Edge) -> int:
    """The payload of each message of an edge, if the specs at one of its ends give all dimensions as numbers; else 0."""
    for port in (graph.nodes[edge.source].outputs.get(edge.source_port), graph.nodes[edge.target].inputs.get(edge.target_port)):
        specs = [parse_tensor_spec(text) for text in (() if port is None else port.tensors)]
        if specs and all(isinstance(size, int) for _, dimensions in specs for size in dimensions):
            return sum(DTYPE_BYTES[dtype] * prod(map(int, dimensions)) for dtype, dimensions in specs)
    return 0


def outbox_messages(graph: Graph, edges: list[Edge]) -> int:
    """The maximum number of messages that may wait at one end: requests or responses, and returned credits."""
    return 2 * sum(max(1, credits_of(graph, edge)) for edge in edges) + 16


def credits_of(graph: Graph, edge: Edge) -> int:
    """How many messages of the edge may be in flight: as many responses as requests, whichever link carried the requests."""
    return edge.credits if edge.response_to is None else graph.edges[edge.response_to].credits
