"""Adds up a worker's statistics over all its incarnations. Pure.

A killed incarnation counts up to its last reported statistics.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from flowrt.actors.control import EdgeStatistics, Statistics

_STATES = ("resident_bytes", "num_restarts", "has_responded")
_COUNTS = [
    name
    for name, default in zip(Statistics.__struct_fields__, Statistics.__struct_defaults__, strict=True)
    if isinstance(default, int | float) and name not in _STATES
]


def total(incarnations: Sequence[Statistics], num_restarts: int) -> Statistics:
    """Statistics of all incarnations, oldest first, as one: counts are summed, states are those of the last incarnation."""
    edges: dict[str, EdgeStatistics] = {}
    for edge in (edge for each in incarnations for edge in each.edges):
        former = edges.get(edge.edge)
        if former is not None:
            edge = msgspec.structs.replace(
                edge,
                num_messages=former.num_messages + edge.num_messages,
                payload_bytes=former.payload_bytes + edge.payload_bytes,
            )
        edges[edge.edge] = edge
    return msgspec.structs.replace(
        incarnations[-1],
        edges=tuple(edges[name] for name in sorted(edges)),
        num_restarts=num_restarts,
        fallbacks=tuple(text for each in incarnations for text in each.fallbacks),
        **{name: sum(getattr(each, name) for each in incarnations) for name in _COUNTS},
    )
