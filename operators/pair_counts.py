"""Counts the pairs of each expert of a layer, at next to no cost: a call keeps its counts, which are added up now and then."""

from __future__ import annotations

import torch
from torch import Tensor

KEPT_CALLS = 256


class PairCounts:
    """`add` is for the compute thread; any thread may `read`."""

    def __init__(self, num_experts: int) -> None:
        self._sums: tuple[Tensor, list[Tensor]] = torch.zeros(num_experts, dtype=torch.int64), []

    def add(self, counts_E: Tensor) -> None:
        """Keeps the tensor, which must not change any more."""
        total_E, kept = self._sums
        kept.append(counts_E)
        if len(kept) == KEPT_CALLS:
            self._sums = _sum(total_E, kept), []  # at once, so that a reader sees both or neither

    def read(self) -> list[int]:
        total_E, kept = self._sums
        return list(_sum(total_E, list(kept)).tolist())


def _sum(total_E: Tensor, kept: list[Tensor]) -> Tensor:
    return total_E + torch.stack(kept).sum(0).to(total_E) if kept else total_E
