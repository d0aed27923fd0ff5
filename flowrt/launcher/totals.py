"""What a worker has done in all its lives together. Pure.

Here: `total`. Not here: asking for statistics (worker_line.py). A life that was killed is counted as far as it had been asked.
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


def total(lives: Sequence[Statistics], num_restarts: int) -> Statistics:
    """Counts are summed; what describes a state is the last life's."""
    edges: dict[str, EdgeStatistics] = {}
    for edge in (edge for life in lives for edge in life.edges):
        former = edges.get(edge.edge)
        if former is not None:
            edge = msgspec.structs.replace(
                edge,
                num_messages=former.num_messages + edge.num_messages,
                payload_bytes=former.payload_bytes + edge.payload_bytes,
            )
        edges[edge.edge] = edge
    return msgspec.structs.replace(
        lives[-1],
        edges=tuple(edges[name] for name in sorted(edges)),
        num_restarts=num_restarts,
        fallbacks=tuple(text for life in lives for text in life.fallbacks),
        **{name: sum(getattr(life, name) for life in lives) for name in _COUNTS},
    )
