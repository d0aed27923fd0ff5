"""The expanded graph as JSON: how it travels to workers. Called by the launcher on one side and the workers on the other.

Not here: the YAML a user reads and writes (file.py, written.py).
"""

from __future__ import annotations

from dataclasses import replace

import msgspec

from flowrt.graph.model import Graph


def to_json(graph: Graph) -> bytes:
    """All of `graph`, deterministic."""
    return msgspec.json.encode(graph, order="deterministic")


def from_json(data: bytes) -> Graph:
    """The inverse of `to_json`. Raises msgspec.ValidationError (or DecodeError) for anything else."""
    graph = msgspec.json.decode(data, type=Graph)
    return replace(graph, edges=tuple(graph.edges))
