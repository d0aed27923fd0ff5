"""The norms of rows: root-mean-square, and layer norm without bias. Called by the attention operators and head.py."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial

import torch
from torch import Tensor
from torch.nn import functional as F

from operators.model_config import ModelConfig


def row_norm(config: ModelConfig) -> Callable[[Tensor, Tensor], Tensor]:
    """The norm of whole rows that a model uses: a function of rows and weight_H."""
    return partial(rms_norm if config.norm == "rms" else layer_norm, epsilon=config.norm_epsilon)


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """x / rms(x) * weight over the last dimension; `weight` has x's last dimension, or its last two (one weight per head).

    Half-precision rows are normed in float32 and rounded before the weight is applied, as the models were trained.
    """
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
