"""Rows as INT8 with one scale per row (xDeepServe section 3.2): a quarter of the bytes of float32, half of those of bfloat16."""

from __future__ import annotations

import torch
from torch import Tensor

from flowrt.operators.model_config import SCALE_BYTES, int8_columns

LARGEST = 127


def quantize_rows(x_RH: Tensor) -> tuple[Tensor, Tensor]:
    """q_RH (int8) and scale_R (float32), where R is any number of dimensions. A row that is not finite has a scale that is not, too."""
    x_RH = x_RH.float()
    scale_R = x_RH.abs().amax(dim=-1) / LARGEST
    divisor_R = torch.where(scale_R > 0, scale_R, 1.0)
    return (x_RH / divisor_R[..., None]).round().clamp_(-LARGEST, LARGEST).to(torch.int8), scale_R


def dequantize_rows(q_RH: Tensor, scale_R: Tensor, dtype: torch.dtype) -> Tensor:
    return (q_RH.float() * scale_R[..., None]).to(dtype)


def packed_rows(x_RH: Tensor, num_kept: int = 0) -> Tensor:
    """Rows as bytes (int8): the numbers as INT8, the scale behind them, then the bytes of the last `num_kept` numbers, which stay as they
    are. Rows of zero bytes are rows of zeros."""
    rows_RH, kept_RH = x_RH.split((x_RH.shape[-1] - num_kept, num_kept), dim=-1)
    q_RH, scale_R = quantize_rows(rows_RH)
    packed = q_RH.new_zeros(*q_RH.shape[:-1], int8_columns(q_RH.shape[-1]) + num_kept * x_RH.itemsize)
    own = int8_columns(q_RH.shape[-1])
    packed[..., : q_RH.shape[-1]] = q_RH
    packed[..., own - SCALE_BYTES : own] = scale_R[..., None].view(torch.int8)
    packed[..., own:] = kept_RH.contiguous().view(torch.int8)
    return packed


def unpacked_rows(packed: Tensor, dtype: torch.dtype, width: int, num_kept: int = 0) -> Tensor:
    """The inverse of `packed_rows`: `width` numbers and the `num_kept` that stayed as they are, in `dtype`."""
    own = int8_columns(width)
    scale_R = _read(packed[..., own - SCALE_BYTES : own], torch.float32)[..., 0]
    rows_RH = dequantize_rows(packed[..., :width], scale_R, dtype)
    return torch.cat((rows_RH, _read(packed[..., own:], dtype)), dim=-1) if num_kept else rows_RH


def _read(packed: Tensor, dtype: torch.dtype) -> Tensor:
    return packed.clone(memory_format=torch.contiguous_format).view(dtype)  # a copy is aligned, whatever the place in the row
