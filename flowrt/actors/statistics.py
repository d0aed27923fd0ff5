"""Statistics of the parts of a worker: its nodes and the edges that leave it. The message that holds them is in control.py."""

from __future__ import annotations

import msgspec


class EdgeStatistics(msgspec.Struct, frozen=True):
    """Messages that this worker sent on one edge, and the transport that carried them. `wait_seconds`: for credits, while
    something was ready. `latency_counts`: by bucket of LATENCY_EDGES (flowrt/dataflow/edge_times.py), of requests that were measured."""

    edge: str
    transport: str
    num_messages: int
    payload_bytes: int
    wait_seconds: float = 0.0
    latency_seconds: float = 0.0
    latency_counts: tuple[int, ...] = ()


class NodeStatistics(msgspec.Struct, frozen=True):
    """Calls of one node of this worker, or of a fused subgraph under the name of its first node. `num_waiting`: firings that wait now."""

    node: str
    num_calls: int
    num_firings: int
    compute_seconds: float
    num_waiting: int = 0


class ExpertStatistics(msgspec.Struct, frozen=True):
    """The experts of one layer that this worker holds, and the (row, expert) pairs of each that it has computed."""

    layer: int
    expert_ids: tuple[int, ...]
    num_pairs: tuple[int, ...]
