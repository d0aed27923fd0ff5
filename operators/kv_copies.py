"""What a KV transfer reads from pages and writes to them, with its hash."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from flowrt.operators.kernels.choice import page_kernels_for
from flowrt.operators.kv_pages import KvPages


def pack(pages: KvPages, layer: int, slots_L: Tensor | slice) -> tuple[tuple[Tensor, ...], int | None]:
    """The parts of these slots in host memory, [L, K, D] each, and the xxh3_64 of their bytes; None: they are views of the pages."""
    parts = pages.parts(layer)
    if isinstance(slots_L, slice):
        views = tuple(part[slots_L] for part in parts)
        if all(view.device.type == "cpu" and view.is_contiguous() for view in views):
            return views, None
    return page_kernels_for(parts[0].device).gather_slots(parts, slots_L)


def unpack(pages: KvPages, layer: int, slots_L: Tensor | slice, tensors: Sequence[Tensor]) -> int:
    """Store the parts of these slots, as `pack` returns them. Returns the xxh3_64 of the bytes that are in the pages then."""
    parts = pages.parts(layer)
    return page_kernels_for(parts[0].device).scatter_slots(parts, slots_L, tensors)
