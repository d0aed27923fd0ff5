"""Norms of whole rows: root-mean-square norm, and layer norm without bias."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from flowrt.operators.kernels.choice import kernels_for
from flowrt.operators.model_config import ModelConfig
from flowrt.operators.weights import torch_dtype


class RowNorm:
    """The norm of whole rows that a model uses."""

    def __init__(self, config: ModelConfig, device: torch.device | str = "cpu") -> None:
        self._is_rms, self._epsilon = config.norm == "rms", config.norm_epsilon
        held = torch_dtype(config)
        self.dtype = torch.promote_types(held, torch.float32) if config.wide_norms else held  # of the weights
        self._kernels = kernels_for(held, device)

    def __call__(self, x_TH: Tensor, weight_H: Tensor) -> Tensor:
        if weight_H.dtype != x_TH.dtype:
            return self._kernels.rms_norm(x_TH.to(weight_H.dtype), weight_H, self._epsilon).to(x_TH.dtype)
        return (self._kernels.rms_norm if self._is_rms else layer_norm)(x_TH, weight_H, self._epsilon)

    def of_sum(self, x_TH: Tensor, added_TH: Tensor, weight_H: Tensor) -> tuple[Tensor, Tensor]:
        """(x + added, its norm)."""
        if self._is_rms and weight_H.dtype == x_TH.dtype:
            return self._kernels.add_rms_norm(x_TH, added_TH, weight_H, self._epsilon)
        total_TH = x_TH + added_TH
        return total_TH, self(total_TH, weight_H)


def layer_norm(x_TH: Tensor, weight_H: Tensor, epsilon: float) -> Tensor:
    """(x - mean) / deviation * weight over the last dimension."""
    return F.layer_norm(x_TH, weight_H.shape, weight_H, None, epsilon)
