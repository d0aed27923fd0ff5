"""Cutting a step's (row, slot) pairs into parts, one per expert server. Called by the attention workers after the gate.

Here: which server gets which pair, given a table of copies. Not here: who is alive and where copies lie (flowrt/reliability), ids of
parts and their sending (flowrt/exchange).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from flowrt.operators import rows

NOWHERE = -1  # the server of an expert that has no copy


@dataclass(frozen=True, eq=False)
class CopyTable:
    """Which servers hold a copy of each expert of a layer: servers_EB (int64, unused places repeat the first), num_copies_E.

    An expert without a copy lies at NOWHERE: its pairs come out as a part of that server, which nobody can be asked for now."""

    servers_EB: Tensor
    num_copies_E: Tensor
    num_servers: int
    everywhere: bool = True  # every expert has a copy

    @classmethod
    def from_lists(cls, copies: Sequence[Sequence[int]], num_servers: int, device: torch.device | str = "cpu") -> CopyTable:
        """`copies[e]` are the servers that hold expert e, in the order in which they take turns. ValueError for one that is none."""
        for expert, servers in enumerate(copies):
            if not all(0 <= server < num_servers for server in servers):
                raise ValueError(f"expert {expert} has copies on servers {list(servers)}; there are servers 0 to {num_servers - 1}")
        everywhere = all(copies)
        copies = [servers or (NOWHERE,) for servers in copies]
        width = max(len(servers) for servers in copies)
        table = torch.tensor([[*servers, *[servers[0]] * (width - len(servers))] for servers in copies])
        return cls(table.to(device), torch.tensor([len(servers) for servers in copies], device=device), num_servers, everywhere)

    def servers_P(self, expert_P: Tensor, positions_P: Callable[[], Tensor]) -> Tensor:
        """The server of each pair: of an expert's copies, the row's position picks one in turn."""
        if self.servers_EB.shape[1] == 1:
            return self.servers_EB[:, 0].index_select(0, expert_P)
        turn_P = positions_P() % self.num_copies_E[expert_P]
        return self.servers_EB[expert_P, turn_P]


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
    if copies.num_servers == 1 and copies.everywhere:  # all there is, as it is: nothing to sort, no count that the host would wait for
        pair_P = torch.arange(num_rows * num_active, device=expert_P.device)
        rows_R = torch.arange(num_rows, device=expert_P.device)
        return [Part(0, rows_R, pair_P // num_active, expert_P, weight_P, pair_P)] if num_rows else []
    return _by_server(None, expert_P, weight_P, positions_T, num_active, copies)


def cut_again(part: Part, positions_T: Tensor, num_active: int, copies: CopyTable) -> list[Part]:
    """Parts that cover the pairs of `part`, by another table: for when its server is gone, or late."""
    return _by_server(part.pair_P, part.expert_P, part.weight_P, positions_T, num_active, copies)


def _by_server(
    pair_P: Tensor | None, expert_P: Tensor, weight_P: Tensor, positions_T: Tensor, num_active: int, copies: CopyTable
) -> list[Part]:
    """`pair_P`: which pairs of the step they are; None: all, in order."""
    if rows.available and expert_P.device.type == "cpu":
        table = copies.servers_EB, copies.num_copies_E, copies.num_servers
        return [Part(*fields) for fields in rows.partition_by_server(pair_P, expert_P, weight_P, positions_T, num_active, *table)]
    return by_server(pair_P, expert_P, weight_P, positions_T, num_active, copies)


def by_server(
    pair_P: Tensor | None, expert_P: Tensor, weight_P: Tensor, positions_T: Tensor, num_active: int, copies: CopyTable
) -> list[Part]:
    """As _by_server, for every device."""
    server_P = copies.servers_P(
        expert_P, lambda: positions_T.repeat_interleave(num_active) if pair_P is None else positions_T.index_select(0, pair_P // num_active)
    )
    # Whole numbers by the dozen: numpy counts and sorts them in a third of torch's time, and a device is waited for once.
    device = server_P.device
    place = torch.from_numpy if device.type == "cpu" else lambda ids: torch.from_numpy(ids).to(device)
    on_host_P = server_P.cpu().numpy()
    all_pairs = None if pair_P is None else pair_P.cpu().numpy()
    parts = []
    for server in np.bincount(on_host_P - NOWHERE).nonzero()[0].tolist():
        chosen = pairs = (on_host_P == server + NOWHERE).nonzero()[0]
        chosen_P = pair_P = place(chosen)
        if all_pairs is not None:
            pairs = all_pairs[chosen]
            pair_P = place(pairs)
        row_of = pairs // num_active
        is_first = np.ones(len(row_of), dtype=np.bool_)
        np.not_equal(row_of[1:], row_of[:-1], out=is_first[1:])
        rows_R, row_P = place(row_of[is_first]), place(is_first.cumsum() - 1)
        expert_of, weight_of = expert_P.index_select(0, chosen_P), weight_P.index_select(0, chosen_P)
        parts.append(Part(server + NOWHERE, rows_R, row_P, expert_of, weight_of, pair_P))
    return parts
