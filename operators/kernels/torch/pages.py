"""Copies rows between slots of KV pages and packed memory in torch, for every device; the reference of kernels/cpu/pages.py."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import xxhash
from torch import Tensor


def gather_slots(parts: Sequence[Tensor], slots_L: Tensor | slice, packed: Sequence[Tensor]) -> int:
    """Copies the rows of each part [slots, ...] in these slots to `packed`, [L, ...] each in host memory. Returns the `digest_of` the
    copies. Raises IndexError for a slot that does not exist."""
    for part, rows in zip(parts, packed, strict=True):
        rows.copy_(_rows_of(part, slots_L))
    return digest_of(packed)


def scatter_slots(parts: Sequence[Tensor], slots_L: Tensor | slice, packed: Sequence[Tensor]) -> int:
    """Stores `packed` in these slots of each part. Returns the `digest_of` what the slots have then. Errors as in `gather_slots`."""
    for part, rows in zip(parts, packed, strict=True):
        if isinstance(slots_L, slice):
            part[slots_L].copy_(rows)
        else:
            part.index_copy_(0, slots_L.to(part.device), rows.to(part.device))
    return digest_of([_rows_of(part, slots_L) for part in parts])


def _rows_of(part: Tensor, slots_L: Tensor | slice) -> Tensor:
    return part[slots_L] if isinstance(slots_L, slice) else part.index_select(0, slots_L.to(part.device))


def digest_of(tensors: Sequence[Tensor]) -> int:
    """The xxh3_64 of the bytes of these tensors, in their order."""
    found = xxhash.xxh3_64()
    for tensor in tensors:
        found.update(tensor.contiguous().reshape(-1).view(torch.uint8).cpu().numpy().data)
    return found.intdigest()
