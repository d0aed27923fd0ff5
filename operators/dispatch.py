"""Partitions the (row, slot) pairs of a step into parts, one per expert server, by a given table of replicas.

Which servers are alive and hold replicas is decided in flowrt/reliability; parts get ids and are sent in flowrt/exchange.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flowrt.operators.kernels.choice import kernels_for
from flowrt.operators.replica_table import ReplicaTable


@dataclass(frozen=True, eq=False)
class Part:
    """The request to one server. All indices are int64.

    `rows_R` are the rows of the step that are sent, ascending, each once. `row_P` points into them; `expert_P` and `weight_P` belong to
    the pairs, which are in (row, slot) order. `pair_P` = row * A + slot is the index of each pair in the step. It stays with the sender,
    which uses it to detect when every pair is covered.
    """

    server: int
    rows_R: Tensor
    row_P: Tensor
    expert_P: Tensor
    weight_P: Tensor
    pair_P: Tensor


def partition(expert_ids_TA: Tensor, weights_TA: Tensor, replicas: ReplicaTable, turn: int = 0) -> list[Part]:
    """Partitions the pairs of a step, by ascending server; a server without pairs gets no part.

    All pairs of an expert go to one of its replicas, so that one server reads its weights; more than MAX_PIECE_PAIRS are cut into pieces
    of equal size. Experts with one replica come first, then the largest pieces. Each piece goes to the replica with the fewest pairs so
    far, but rather to one with pairs than to another message, as long as it then has at most as many pairs as a row. `turn`, a number
    that grows from step to step, decides between equals. The choice depends on the batch, but changes no bit with strict numerics,
    because every replica computes a row alike.
    """
    num_rows, num_active = expert_ids_TA.shape
    expert_P, weight_P = expert_ids_TA.flatten(), weights_TA.flatten()
    if replicas.num_servers == 1 and replicas.is_complete:  # one part with all pairs: no sort, and no count that the host would wait for
        pair_P = torch.arange(num_rows * num_active, device=expert_P.device)
        rows_R = torch.arange(num_rows, device=expert_P.device)
        return [Part(0, rows_R, pair_P // num_active, expert_P, weight_P, pair_P)] if num_rows else []
    return _by_server(None, expert_P, weight_P, num_active, replicas, turn)


def repartition(part: Part, num_active: int, replicas: ReplicaTable, turn: int = 0) -> list[Part]:
    """Partitions the pairs of `part` by another table, to redispatch them when its server is lost or late."""
    return _by_server(part.pair_P, part.expert_P, part.weight_P, num_active, replicas, turn)


def _by_server(pair_P: Tensor | None, expert_P: Tensor, weight_P: Tensor, num_active: int, replicas: ReplicaTable, turn: int) -> list[Part]:
    """Parts of the pairs `pair_P` of the step; None: all pairs, in order."""
    kernels = kernels_for(torch.float32, expert_P.device)  # the kernels only move the weights, whatever their dtype
    return [Part(*fields) for fields in kernels.partition_by_server(pair_P, expert_P, weight_P, num_active, replicas, turn)]
