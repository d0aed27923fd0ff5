"""The norms of rows: root-mean-square, and layer norm without bias. Called by the attention operators and head.py.

Where the machine allows it a norm is one call of our own (rows.py); the library's calls are its reference.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor
from torch.nn import functional as F

from flowrt.operators import rows
from flowrt.operators.model_config import ModelConfig


class RowNorm:
    """The norm of whole rows that a model uses."""

    def __init__(self, config: ModelConfig) -> None:
        self._is_rms, self._epsilon = config.norm == "rms", config.norm_epsilon

    def __call__(self, x_TH: Tensor, weight_H: Tensor) -> Tensor:
        return (rms_norm if self._is_rms else layer_norm)(x_TH, weight_H, self._epsilon)

    def of_sum(self, x_TH: Tensor, added_TH: Tensor, weight_H: Tensor) -> tuple[Tensor, Tensor]:
        """(x + added, its norm)."""
        if self._is_rms and rows.fits(x_TH.dtype, x_TH.device):
            return rows.norm_of_sum(x_TH, added_TH, weight_H, self._epsilon)
        total_TH = x_TH + added_TH
        return total_TH, self(total_TH, weight_H)


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """x / rms(x) * weight over the last dimension; `weight` has x's last dimension, or its last two (one weight per head).

    Half-precision rows are normed in float32 and rounded before the weight is applied, as the models were trained.
    """
    return rows.norm(x, weight, epsilon) if rows.fits(x.dtype, x.device) else library_rms_norm(x, weight, epsilon)


def library_rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """As rms_norm, for every dtype and device."""
    wide = x if x.dtype in (torch.float32, torch.float64) else x.float()
    if x.device.type == "cpu":  # where F.rms_norm is a chain of passes over all rows, 4 times as long at 512 of them
        length = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        normed: Tensor = wide * torch.addcmul(_number(epsilon, wide.dtype), length, length, value=1 / x.shape[-1]).rsqrt_()
    else:
        normed = F.rms_norm(wide, x.shape[-1:], None, epsilon)
    return normed.to(x.dtype).mul_(weight)


@cache
def _number(value: float, dtype: torch.dtype) -> Tensor:
    return torch.full((1,), value, dtype=dtype)


def layer_norm(x_TH: Tensor, weight_H: Tensor, epsilon: float) -> Tensor:
    """(x - mean) / deviation * weight over the last dimension."""
    return F.layer_norm(x_TH, weight_H.shape, weight_H, None, epsilon)
