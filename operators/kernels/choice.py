"""Chooses the kernels for a dtype and device. Modules choose once, when they are built; no other file decides this."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from flowrt.operators.kernels.cpu import pages as cpu_pages
from flowrt.operators.kernels.cpu import rows as cpu_rows
from flowrt.operators.kernels.torch import pages as torch_pages
from flowrt.operators.kernels.torch import rows as torch_rows

if TYPE_CHECKING:
    from flowrt.operators.replica_table import PartFields, ReplicaTable


class Kernels(Protocol):
    """The signatures that the C and the torch kernels share; kernels/torch/rows.py documents each."""

    def rms_norm(self, x: Tensor, weight: Tensor, epsilon: float, /) -> Tensor: ...

    def add_rms_norm(self, x: Tensor, added: Tensor, weight: Tensor, epsilon: float, /) -> tuple[Tensor, Tensor]: ...

    def topk_softmax(self, logits_TE: Tensor, num_active: int, scale: float, dtype: torch.dtype, /) -> tuple[Tensor, Tensor]: ...

    def partition_by_server(
        self, pair_P: Tensor | None, expert_P: Tensor, weight_P: Tensor, num_active: int, table: ReplicaTable, turn: int, /
    ) -> list[PartFields]: ...

    def sort_by_expert(
        self, x_RH: Tensor, row_P: Tensor, expert_P: Tensor, place_E: Tensor, num_held: int, /
    ) -> tuple[Tensor, Tensor, Tensor] | None: ...

    def weighted_sum(self, y_PH: Tensor, place_P: Tensor, row_P: Tensor, weight_P: Tensor, num_rows: int, /) -> Tensor: ...

    def add_parts(self, residual_TH: Tensor, parts: Sequence[tuple[Tensor, Tensor]], /) -> Tensor: ...


class PageKernels(Protocol):
    """The signatures that the C and the torch kernels of pages share; kernels/torch/pages.py documents each."""

    def gather_slots(self, parts: Sequence[Tensor], slots_L: Tensor | slice, packed: Sequence[Tensor], /) -> int: ...

    def scatter_slots(self, parts: Sequence[Tensor], slots_L: Tensor | slice, packed: Sequence[Tensor], /) -> int: ...


def page_kernels_for(device: torch.device | str) -> PageKernels:
    """The kernels for pages on `device`."""
    return cpu_pages if cpu_pages.available and torch.device(device).type == "cpu" else torch_pages


def kernels_for(dtype: torch.dtype, device: torch.device | str) -> Kernels:
    """The kernels for rows of `dtype` on `device`."""
    return _chosen(dtype, device.type if isinstance(device, torch.device) else torch.device(device).type)


@lru_cache(maxsize=64)
def _chosen(dtype: torch.dtype, device_type: str) -> Kernels:
    return cpu_rows if has_cpu_kernels(dtype, device_type) else torch_rows


def has_cpu_kernels(dtype: torch.dtype, device: torch.device | str) -> bool:
    """Whether the C kernels were built and accept rows of this dtype and device. Only they offer attention over pages (attention.py)."""
    return cpu_rows.fits(dtype, device)
