"""Calls the C kernels that copy rows between slots of KV pages and packed memory (_pages.c), and checks sizes before it passes addresses.

They take a third of the time of kernels/torch/pages.py: each piece is hashed while it is in the cache. Torch moves what they do not.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flowrt.operators.kernels.torch import pages as torch_pages

try:
    from flowrt.operators.kernels.cpu import _pages
except ImportError:  # without a compiler
    available = False
else:
    available = True


def gather_slots(parts: Sequence[Tensor], slots_L: Tensor | slice, packed: Sequence[Tensor]) -> int:
    """See `gather_slots` in kernels/torch/pages.py. Nothing is copied when a slot does not exist."""
    slots_L = _indices(slots_L)
    digest = _move(parts, slots_L, packed, to_pages=False)
    return torch_pages.gather_slots(parts, slots_L, packed) if digest is None else digest


def scatter_slots(parts: Sequence[Tensor], slots_L: Tensor | slice, packed: Sequence[Tensor]) -> int:
    """See `scatter_slots` in kernels/torch/pages.py. Nothing is stored when a slot does not exist."""
    slots_L, packed = _indices(slots_L), [rows.contiguous() for rows in packed]
    digest = _move(parts, slots_L, packed, to_pages=True)
    return torch_pages.scatter_slots(parts, slots_L, packed) if digest is None else digest


def _indices(slots_L: Tensor | slice) -> Tensor:
    return torch.arange(slots_L.start, slots_L.stop) if isinstance(slots_L, slice) else slots_L.contiguous()


def _move(parts: Sequence[Tensor], slots_L: Tensor, packed: Sequence[Tensor], *, to_pages: bool) -> int | None:
    """The digest; None, and nothing moved, for few bytes, and for rows in pages that are in pieces. Raises ValueError for rows that do not
    go with the slots."""
    numbers, num_bytes, is_whole = list[int](), 0, True
    for part, rows in zip(parts, packed, strict=True):
        is_alike = rows.dtype == part.dtype and rows.shape == (len(slots_L), *part.shape[1:]) and len(part) == len(parts[0])
        if not is_alike or {rows.device.type, part.device.type, slots_L.device.type} != {"cpu"} or slots_L.dtype != torch.int64:
            raise ValueError(f"{rows.dtype} rows {list(rows.shape)} of {len(slots_L)} slots do not go with {part.dtype} {list(part.shape)}")
        numbers += part.data_ptr(), part.stride(0) * part.itemsize, part[:1].nbytes, rows.data_ptr()
        num_bytes, is_whole = num_bytes + rows.nbytes, is_whole and part[:1].is_contiguous() and rows.is_contiguous()
    if num_bytes < _pages.MIN_HASHED or not is_whole:
        return None
    return _pages.move_slots(to_pages, slots_L.data_ptr(), len(slots_L), len(parts[0]), *numbers)
