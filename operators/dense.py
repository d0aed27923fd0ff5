"""Gated MLPs: the activation that experts share, and the layers without experts. Called by the attention workers."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn import functional as F

from operators.model_config import ModelConfig
from operators.weights import Checkpoint


def gated_silu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up of rows that hold gate then up. Overwrites the gate half of its argument."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate, inplace=True).mul_(up)


class DenseMlp:
    """The MLPs of the layers without experts."""

    def __init__(self, config: ModelConfig, checkpoint: Checkpoint, layers: Iterable[int], device: torch.device | str = "cpu") -> None:
        width, hidden = config.dense_width, config.hidden_size
        self._weights = {
            layer: (
                checkpoint.read_part(config, "dense_gate_up", (2 * width, hidden), layer=layer, device=device),
                checkpoint.read_part(config, "dense_down", (hidden, width), layer=layer, device=device),
            )
            for layer in layers
        }

    def forward(self, layer: int, normed_TH: Tensor, residual_TH: Tensor) -> Tensor:
        """x_TH: the residual plus the MLP of the normed rows."""
        gate_up, down = self._weights[layer]
        return residual_TH + F.linear(gated_silu(F.linear(normed_TH, gate_up)), down)
