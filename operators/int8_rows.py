"""Rows as INT8 with one scale per row (xDeepServe section 3.2): a quarter of the bytes of float32, half of those of bfloat16."""

from __future__ import annotations

import torch
from torch import Tensor

LARGEST = 127


def quantize_rows(x_RH: Tensor) -> tuple[Tensor, Tensor]:
    """q_RH (int8) and scale_R (float32), where R is any number of dimensions. A row that is not finite has a scale that is not, too."""
    x_RH = x_RH.float()
    scale_R = x_RH.abs().amax(dim=-1) / LARGEST
    divisor_R = torch.where(scale_R > 0, scale_R, 1.0)
    return (x_RH / divisor_R[..., None]).round().clamp_(-LARGEST, LARGEST).to(torch.int8), scale_R


def dequantize_rows(q_RH: Tensor, scale_R: Tensor, dtype: torch.dtype) -> Tensor:
    return (q_RH.float() * scale_R[..., None]).to(dtype)
