"""Cutting a step's (row, slot) pairs into parts, one per expert server. Called by the attention workers after the gate.

Here: which server gets which pair, given a table of copies. Not here: who is alive and where copies lie (flowrt/reliability), ids of
parts and their sending (flowrt/exchange).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class CopyTable:
    """Which servers hold a copy of each expert of a layer: servers_EB (int64, unused places repeat the first), num_copies_E."""

    servers_EB: Tensor
    num_copies_E: Tensor
    num_servers: int

    @classmethod
    def from_lists(cls, copies: Sequence[Sequence[int]], num_servers: int, device: torch.device | str = "cpu") -> CopyTable:
        """`copies[e]` are the servers that hold expert e, in the order in which they take turns. ValueError when one has none."""
        for expert, servers in enumerate(copies):
            if not servers or not all(0 <= server < num_servers for server in servers):
                raise ValueError(f"expert {expert} has copies on servers {list(servers)}; at least one of 0 to {num_servers - 1} is needed")
        width = max(len(servers) for servers in copies)
        table = torch.tensor([[*servers, *[servers[0]] * (width - len(servers))] for servers in copies])
        return cls(table.to(device), torch.tensor([len(servers) for servers in copies], device=device), num_servers)

    def servers_P(self, expert_ids_TA: Tensor, positions_T: Tensor) -> Tensor:
        """The server of each pair: of an expert's copies, the row's position picks one in turn."""
        if self.servers_EB.shape[1] == 1:
            return self.servers_EB[:, 0].index_select(0, expert_ids_TA.flatten())
        turn_TA = positions_T.unsqueeze(1) % self.num_copies_E[expert_ids_TA]
        return self.servers_EB[expert_ids_TA, turn_TA].flatten()


@dataclass(frozen=True, eq=False)
class Part:
    """What one server is asked for. All indices are int64.

    `rows_R` are the rows of the step that travel, ascending, each once; `row_P` points into them, `expert_P` and `weight_P` belong
    to the pairs, which are in (row, slot) order; `pair_P` = row * A + slot names them among all pairs of the step and stays
    with the sender, who must know when every pair is covered.
    """

    server: int
    rows_R: Tensor
    row_P: Tensor
    expert_P: Tensor
    weight_P: Tensor
    pair_P: Tensor


def cut(expert_ids_TA: Tensor, weights_TA: Tensor, positions_T: Tensor, copies: CopyTable) -> list[Part]:
    """The parts of a step, by ascending server; a server with no pairs has none.

    Of an expert's copies, the row's position in its sequence picks one in turn: a choice that spreads load, and that does not
    depend on the batch.
    """
    num_rows, num_active = expert_ids_TA.shape
    expert_P, weight_P = expert_ids_TA.flatten(), weights_TA.flatten()
    if copies.num_servers == 1:  # all there is, in the order in which it is: nothing to sort, and no count that the host would wait for
        pair_P = torch.arange(num_rows * num_active, device=expert_P.device)
        rows_R = torch.arange(num_rows, device=expert_P.device)
        return [Part(0, rows_R, pair_P // num_active, expert_P, weight_P, pair_P)] if num_rows else []
    server_P = copies.servers_P(expert_ids_TA, positions_T)
    # Whole numbers by the dozen: numpy counts and sorts them in a third of torch's time, and a device is waited for once.
    on_host_P, device = server_P.cpu().numpy(), server_P.device
    parts = []
    for server in range(copies.num_servers):
        pairs = np.flatnonzero(on_host_P == server)
        if not len(pairs):
            continue
        rows = pairs // num_active
        is_first = np.ones(len(rows), dtype=np.bool_)
        np.not_equal(rows[1:], rows[:-1], out=is_first[1:])
        rows_R, row_P, pair_P = (torch.from_numpy(ids).to(device) for ids in (rows[is_first], is_first.cumsum() - 1, pairs))
        parts.append(Part(server, rows_R, row_P, expert_P.index_select(0, pair_P), weight_P.index_select(0, pair_P), pair_P))
    return parts
