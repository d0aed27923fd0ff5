"""Rows of drawn numbers, and the dtypes that calls of our own take, for several tests of the operators."""

from __future__ import annotations

import torch

DTYPES = [torch.float32, torch.bfloat16]


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
