"""The block around attention, or what a layer has in its place: norm, mixing of tokens, output projection, residual, norm."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor

from flowrt.operators.attention_plan import StepPlan, plan_step
from flowrt.operators.kernels.choice import has_cpu_kernels, kernels_for
from flowrt.operators.kv_pages import KvPages
from flowrt.operators.model_config import ModelConfig
from flowrt.operators.normalization import RowNorm
from flowrt.operators.products import Product
from flowrt.operators.quantized_products import lay_out_part
from flowrt.operators.rotary import RotaryTable
from flowrt.operators.row_blocks import WHOLE, RowBlocks
from flowrt.operators.step_layout import StepLayout
from flowrt.operators.weights import Checkpoint, torch_dtype


@dataclass(frozen=True, kw_only=True)
class BlockWeights:
    """The weights of one layer that every kind of layer has."""

    input_norm_H: Tensor
    output: Product  # [H, N * value width], or that of what the layer mixes
    output_bias: Tensor | None
    mlp_norm_H: Tensor


W = TypeVar("W", bound=BlockWeights)
ReadPart = Callable[..., Tensor]  # reads a part of one layer, of this shape


class TokenMixer(ABC, Generic[W]):
    """The first halves of some layers, which mix the tokens of a sequence, with their weights. `name` is that of its functions in strict
    blocks."""

    name: ClassVar[str]

    def __init__(
        self,
        config: ModelConfig,
        checkpoint: Checkpoint,
        layers: Iterable[int],
        device: torch.device | str = "cpu",
        blocks: RowBlocks = WHOLE,
    ) -> None:
        self.config, self._blocks, self._device = config, blocks, device
        self._norm = RowNorm(config, device)
        self._rms_norm = kernels_for(torch_dtype(config), device).rms_norm
        self._weights = {layer: self._read_layer(partial(checkpoint.read_part, config, layer=layer, device=device)) for layer in layers}

    @property
    def layers(self) -> tuple[int, ...]:
        return tuple(self._weights)

    def forward(self, layer: int, x_TH: Tensor, layout: StepLayout, pages: KvPages) -> tuple[Tensor, Tensor]:
        """(residual_TH, normed_TH): x plus what the layer mixes, and its norm, which is the input of gate and MLP.

        Writes the state of the step's rows into `pages`: keys and values (or latents), or a recurrent state. Running a step again writes
        the same bits.
        """
        weights = self._weights[layer]
        mixed = self._mix(layer, weights, x_TH, layout, pages)
        return self._blocks.run(f"{self.name} out", partial(self._finish, weights), x_TH, mixed)

    @abstractmethod
    def _mix(self, layer: int, weights: W, x_TH: Tensor, layout: StepLayout, pages: KvPages) -> Tensor:
        """What `output` projects, [T, its width]."""

    @abstractmethod
    def _read_layer(self, read: ReadPart) -> W: ...

    def _finish(self, weights: W, x_TH: Tensor, mixed: Tensor) -> tuple[Tensor, Tensor]:
        return self._norm.of_sum(x_TH, weights.output(mixed, weights.output_bias), weights.mlp_norm_H)


class AttentionBlock(TokenMixer[W]):
    """The attention halves of some layers."""

    name = "attention"

    def __init__(
        self,
        config: ModelConfig,
        checkpoint: Checkpoint,
        layers: Iterable[int],
        device: torch.device | str = "cpu",
        blocks: RowBlocks = WHOLE,
    ) -> None:
        super().__init__(config, checkpoint, layers, device, blocks)
        dtype, rotary_width = torch_dtype(config), config.head_dim if config.latent is None else config.latent.rope_width
        self._rotary = RotaryTable(rotary_width, config.rotary, dtype, device)
        # Only the C kernels read contexts in their pages.
        self._is_paged = config.latent is None and config.head_dim % 2 == 0 and not blocks.strict and has_cpu_kernels(dtype, device)

    def _mix(self, layer: int, weights: W, x_TH: Tensor, layout: StepLayout, pages: KvPages) -> Tensor:
        strict, window = self._blocks.strict, self.config.sliding_window
        plan = plan_step(layout, pages, self._rotary, window, each_alone=strict, is_paged=self._is_paged)
        return self._attend(layer, weights, x_TH, layout, plan, pages)

    @abstractmethod
    def _attend(self, layer: int, weights: W, x_TH: Tensor, layout: StepLayout, plan: StepPlan, pages: KvPages) -> Tensor:
        """Attention [T, N * value width] of every row over the context of its sequence."""

    def _read_shared(self, read: ReadPart, value_width: int) -> dict[str, Any]:
        """The fields of BlockWeights."""
        hidden = self.config.hidden_size
        output = read("attention_output", (hidden, self.config.num_heads * value_width))
        return {
            "input_norm_H": read("attention_norm", (hidden,), dtype=self._norm.dtype),
            "output": lay_out_part("attention_output", output, self.config),
            "output_bias": read("attention_output_bias", (hidden,)) if self.config.attention_bias else None,
            "mlp_norm_H": read("mlp_norm", (hidden,), dtype=self._norm.dtype),
        }
