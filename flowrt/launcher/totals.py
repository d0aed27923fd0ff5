"""Adds up a worker's statistics over all its incarnations. Pure.

A killed incarnation counts up to its last reported statistics.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from itertools import zip_longest

import msgspec

from flowrt.actors.control import EdgeStatistics, ExpertStatistics, NodeStatistics, Statistics

_STATES = (
    "resident_bytes",
    "num_restarts",
    "has_responded",
    "num_running",
    "num_waiting",
    "num_pages",
    "num_free_pages",
    "num_micro_batches",
)
_COUNTS = [
    name
    for name, default in zip(Statistics.__struct_fields__, Statistics.__struct_defaults__, strict=True)
    if isinstance(default, int | float) and name not in _STATES
]


def add_experts(all_experts: Iterable[ExpertStatistics]) -> dict[int, dict[int, int]]:
    """layer -> expert -> pairs, both in order."""
    found: dict[int, Counter[int]] = defaultdict(Counter)
    for each in all_experts:
        found[each.layer].update(dict(zip(each.expert_ids, each.num_pairs, strict=True)))
    return {layer: dict(sorted(found[layer].items())) for layer in sorted(found)}


def add_counts(*counts: Sequence[int]) -> tuple[int, ...]:
    """The sums of counts by bucket."""
    return tuple(map(sum, zip_longest(*counts, fillvalue=0)))


def total(past: Statistics | None, latest: Statistics, num_restarts: int = 0) -> Statistics:
    """Statistics of the past incarnations and the latest one as one: counts are summed, states are those of the latest."""
    past = past or Statistics()
    edges = {edge.edge: edge for edge in past.edges}
    for edge in latest.edges:
        former = edges.get(edge.edge, EdgeStatistics(edge.edge, edge.transport, 0, 0))
        edges[edge.edge] = msgspec.structs.replace(
            edge,
            num_messages=former.num_messages + edge.num_messages,
            payload_bytes=former.payload_bytes + edge.payload_bytes,
            wait_seconds=former.wait_seconds + edge.wait_seconds,
            latency_seconds=former.latency_seconds + edge.latency_seconds,
            latency_counts=add_counts(former.latency_counts, edge.latency_counts),
        )
    nodes = {node.node: msgspec.structs.replace(node, num_waiting=0) for node in past.nodes}
    for node in latest.nodes:
        before = nodes.get(node.node, NodeStatistics(node.node, 0, 0, 0.0))
        nodes[node.node] = NodeStatistics(
            node.node,
            before.num_calls + node.num_calls,
            before.num_firings + node.num_firings,
            before.compute_seconds + node.compute_seconds,
            node.num_waiting,
        )
    pairs = add_experts((*past.experts, *latest.experts))
    return msgspec.structs.replace(
        latest,
        experts=tuple(ExpertStatistics(layer, tuple(counts), tuple(counts.values())) for layer, counts in pairs.items()),
        nodes=tuple(nodes[name] for name in sorted(nodes)),
        edges=tuple(edges[name] for name in sorted(edges)),
        num_restarts=num_restarts,
        step_row_counts=add_counts(past.step_row_counts, latest.step_row_counts),
        **{name: getattr(past, name) + getattr(latest, name) for name in _COUNTS},
    )
