"""Root-mean-square norms. Called by attention.py and head.py."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """x / rms(x) * weight over the last dimension; `weight` has x's last dimension, or its last two (one weight per head).

    Half-precision rows are normed in float32 and rounded before the weight is applied, as the models were trained.
    """
    if x.dtype in (torch.float32, torch.float64):
        if weight.dim() == 1:
            return F.rms_norm(x, weight.shape, weight, epsilon)
        return F.rms_norm(x, weight.shape[-1:], None, epsilon).mul_(weight)
    return F.rms_norm(x.float(), weight.shape[-1:], None, epsilon).to(x.dtype).mul_(weight)
