"""What a KV transfer reads from pages and writes to them, with its hash."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flowrt.operators.kernels.choice import page_kernels_for
from flowrt.operators.kv_pages import KvPages


def staging(pages: KvPages, num_rows: int) -> tuple[Tensor, ...]:
    """Host memory for the parts of so many slots, [num_rows, K, D] each. To allocate it anew for each chunk costs more than the copy."""
    return tuple(torch.empty(num_rows, *part.shape[1:], dtype=part.dtype) for part in pages.parts(0))


def pack(
    pages: KvPages, layer: int, slots_L: Tensor | slice, num_rows: int, into: Sequence[Tensor]
) -> tuple[tuple[Tensor, ...], int | None]:
    """The parts of these `num_rows` slots in host memory, [L, K, D] each, and the xxh3_64 of their bytes. They are the first rows of
    `into`; or, if the hash is None, views of the pages. Raises IndexError for a slot that does not exist."""
    parts = pages.parts(layer)
    if isinstance(slots_L, slice):
        views = tuple(part[slots_L] for part in parts)
        if all(view.device.type == "cpu" and view.is_contiguous() for view in views):
            return views, None
    packed = tuple(rows[:num_rows] for rows in into)
    return packed, page_kernels_for(parts[0].device).gather_slots(parts, slots_L, packed)


def unpack(pages: KvPages, layer: int, slots_L: Tensor | slice, tensors: Sequence[Tensor]) -> int:
    """Store the parts of these slots, [L, K, D] each. Returns the xxh3_64 of the bytes that are in the pages then.
    Raises IndexError for a slot that does not exist, and ValueError for tensors on the host that do not go with the slots."""
    parts = pages.parts(layer)
    return page_kernels_for(parts[0].device).scatter_slots(parts, slots_L, tensors)
