"""Gated MLPs that every row goes through: the layers without experts, and the shared experts of the others.

Here too: the activation that experts share. Called by the attention workers.
"""

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


class _GatedMlp:
    def __init__(
        self, config: ModelConfig, checkpoint: Checkpoint, layers: Iterable[int], device: torch.device | str, part: str, width: int
    ) -> None:
        hidden = config.hidden_size
        self._weights = {
            layer: (
                checkpoint.read_part(config, f"{part}_gate_up", (2 * width, hidden), layer=layer, device=device),
                checkpoint.read_part(config, f"{part}_down", (hidden, width), layer=layer, device=device),
            )
            for layer in layers
        }

    def forward(self, layer: int, normed_TH: Tensor, residual_TH: Tensor) -> Tensor:
        """x_TH: the residual plus the MLP of the normed rows."""
        gate_up, down = self._weights[layer]
        return residual_TH + F.linear(gated_silu(F.linear(normed_TH, gate_up)), down)


class DenseMlp(_GatedMlp):
    """The MLPs of the layers without experts."""

    def __init__(self, config: ModelConfig, checkpoint: Checkpoint, layers: Iterable[int], device: torch.device | str = "cpu") -> None:
        super().__init__(config, checkpoint, layers, device, "dense", config.dense_width)


class SharedExperts(_GatedMlp):
    """The experts of MoE layers that every row goes through, as one MLP. What routed experts give is added to what `forward` gives."""

    def __init__(self, config: ModelConfig, checkpoint: Checkpoint, layers: Iterable[int], device: torch.device | str = "cpu") -> None:
        super().__init__(config, checkpoint, layers, device, "shared", config.shared_expert_width)
