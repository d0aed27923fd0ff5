"""Chooses the server of each (row, expert) pair among the replicas of its expert. Free of torch, so that a planner applies the same rule.

dispatch.partition states the rule. kernels/cpu has the same in C.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

MAX_PIECE_PAIRS = 16  # of an expert that go to one replica: as many read its weights once, and more are divided


def choose_servers(
    expert_P: NDArray[np.int64], num_active: int, replicas: Sequence[Sequence[int]], num_servers: int, turn: int
) -> NDArray[np.int64]:
    """The server of each pair. `replicas`: the servers of each expert; [-1] for an unavailable one."""
    num_experts = len(replicas)
    counts = np.bincount(expert_P, minlength=num_experts).tolist()
    load, chosen = [0] * (num_servers + 1), np.empty_like(expert_P)  # the last one: of unavailable experts
    order_P, ends_E = expert_P.argsort(kind="stable"), np.cumsum(counts)
    sizes = [count if len(servers) < 2 else _piece_size(count) for count, servers in zip(counts, replicas, strict=True)]
    touched = [expert for expert, count in enumerate(counts) if count]
    for expert in sorted(touched, key=lambda each: (len(replicas[each]) > 1, -sizes[each], (each - turn) % num_experts)):
        servers, end = replicas[expert], ends_E[expert]
        in_turn = sorted(servers, key=lambda each: (each + turn) % num_servers)
        for start in range(end - counts[expert], end, sizes[expert]):
            pairs = order_P[start : min(end, start + sizes[expert])]
            most = num_active - len(pairs)
            server = min(in_turn, key=lambda each: load[each] - num_active if 0 < load[each] <= most else load[each])
            load[server] += len(pairs)
            chosen[pairs] = server
    return chosen


def _piece_size(num_pairs: int) -> int:
    num_pieces = max(1, -(-num_pairs // MAX_PIECE_PAIRS))
    return -(-num_pairs // num_pieces)
