"""Gated MLPs that process every row: the MLPs of layers without experts, and the shared experts of MoE layers.

`gated_silu` is also the activation of routed experts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from flowrt.operators.model_config import ModelConfig
from flowrt.operators.products import Product
from flowrt.operators.quantized_products import read_product
from flowrt.operators.row_blocks import WHOLE, RowBlocks
from flowrt.operators.weights import Checkpoint


def gated_silu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up of rows that hold gate then up. Overwrites the gate half of its argument."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate, inplace=True).mul_(up)


class _GatedMlp(ABC):
    """The gated MLPs of some layers. `part` names their weights, and their function in strict blocks."""

    part: ClassVar[str]

    def __init__(
        self,
        config: ModelConfig,
        checkpoint: Checkpoint,
        layers: Iterable[int],
        device: torch.device | str = "cpu",
        blocks: RowBlocks = WHOLE,
    ) -> None:
        part, width = self.part, self._width(config)
        hidden, layers = config.hidden_size, tuple(layers)
        self._blocks = blocks
        self._weights = {
            layer: (
                read_product(checkpoint, config, f"{part}_gate_up", (2 * width, hidden), layer=layer, device=device),
                read_product(checkpoint, config, f"{part}_down", (hidden, width), layer=layer, device=device),
            )
            for layer in layers
        }

        read = partial(checkpoint.read_part, config, f"{part}_gate", (1, hidden), device=device)
        self._row_gate = {layer: read(layer=layer).squeeze(0) for layer in layers if part == "shared" and config.shared_expert_gate}

    @staticmethod
    @abstractmethod
    def _width(config: ModelConfig) -> int: ...

    def forward(self, layer: int, normed_TH: Tensor, residual_TH: Tensor) -> Tensor:
        """x_TH: the residual plus the MLP of the normed rows."""
        return self._blocks.run(self.part, partial(_gated_mlp, *self._weights[layer], self._row_gate.get(layer)), normed_TH, residual_TH)


def _gated_mlp(gate_up: Product, down: Product, row_gate_H: Tensor | None, normed_TH: Tensor, residual_TH: Tensor) -> Tensor:
    y_TH = down(gated_silu(gate_up(normed_TH)))
    if row_gate_H is not None:
        y_TH = y_TH * (normed_TH * row_gate_H).sum(dim=1, keepdim=True).sigmoid()
    return residual_TH + y_TH


class DenseMlp(_GatedMlp):
    """The MLPs of the layers without experts."""

    part = "dense"

    @staticmethod
    def _width(config: ModelConfig) -> int:
        return config.dense_width


class SharedExperts(_GatedMlp):
    """The experts of MoE layers that every row goes through, as one MLP. What routed experts give is added to what `forward` gives."""

    part = "shared"

    @staticmethod
    def _width(config: ModelConfig) -> int:
        return config.shared_expert_width
