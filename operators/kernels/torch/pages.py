"""Copies rows between slots of KV pages and packed memory in torch, for every device; the reference of kernels/cpu/pages.py."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import xxhash
from torch import Tensor


def gather_slots(parts: Sequence[Tensor], slots_L: Tensor | slice) -> tuple[tuple[Tensor, ...], int]:
    """Copies of the rows of each part [slots, ...] in these slots, in host memory, and the `digest_of` them. Raises IndexError for a slot
    that does not exist."""
    if isinstance(slots_L, slice):
        packed = tuple(part[slots_L].to("cpu", copy=True).contiguous() for part in parts)
    else:
        packed = tuple(part.index_select(0, slots_L.to(part.device)).cpu() for part in parts)
    return packed, digest_of(packed)


def scatter_slots(parts: Sequence[Tensor], slots_L: Tensor | slice, packed: Sequence[Tensor]) -> int:
    """Stores rows in these slots of each part, as `gather_slots` returns them. Returns the digest of what the slots have then."""
    for part, rows in zip(parts, packed, strict=True):
        if isinstance(slots_L, slice):
            part[slots_L].copy_(rows)
        else:
            part.index_copy_(0, slots_L.to(part.device), rows.to(part.device))
    return gather_slots(parts, slots_L)[1]


def digest_of(tensors: Sequence[Tensor]) -> int:
    """The xxh3_64 of the bytes of these tensors, in their order."""
    found = xxhash.xxh3_64()
    for tensor in tensors:
        found.update(tensor.contiguous().view(torch.uint8).cpu().numpy().data)
    return found.intdigest()
