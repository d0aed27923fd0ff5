"""Weights for timing operators: random ones that no file holds, and a count of the bytes that were read.

Here: `model_like_qwen3` (a config of given sizes), RandomCheckpoint, CountingCheckpoint. Not here: what is timed (operator_cases.py).
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from flowrt.operators.model_config import GateConfig, ModelConfig, RotaryConfig
from flowrt.operators.weights import Checkpoint, torch_dtype

_POOL = (1 << 20) + 7  # drawn numbers that all weights repeat, out of step with rows: drawing gigabytes would take long


def model_like_qwen3(
    *,
    hidden: int = 1024,
    width: int = 512,
    experts: int = 32,
    top_k: int = 4,
    layers: int = 4,
    heads: int = 16,
    kv_heads: int = 4,
    head_dim: int = 64,
    vocabulary: int = 32000,
    dtype: str = "float32",
) -> ModelConfig:
    """A model of these sizes with experts in every layer. The sizes that stand here are those of the published figures."""
    return ModelConfig(
        family="qwen3_moe",
        dtype=dtype,
        vocab_size=vocabulary,
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        num_experts=experts,
        num_experts_per_token=top_k,
        expert_width=width,
        dense_width=0,
        moe_layers=tuple(range(layers)),
        norm_epsilon=1e-6,
        max_position_embeddings=1 << 16,
        rotary=RotaryConfig(),
        gate=GateConfig(normalize=1.0),
        qk_norm=True,
    )


class CountingCheckpoint(Checkpoint):
    """A checkpoint that knows how many bytes of each part were read into memory, over all layers and experts."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.bytes_by_part: dict[str, int] = {}

    def read_part(
        self,
        config: ModelConfig,
        part: str,
        shape: tuple[int, ...],
        *,
        layer: int = 0,
        expert: int = 0,
        device: torch.device | str = "cpu",
        out: Tensor | None = None,
    ) -> Tensor:
        read = self._read(config, part, shape, layer, expert, device, out)
        self.bytes_by_part[part] = self.bytes_by_part.get(part, 0) + read.nbytes
        return read

    def _read(
        self,
        config: ModelConfig,
        part: str,
        shape: tuple[int, ...],
        layer: int,
        expert: int,
        device: torch.device | str,
        out: Tensor | None,
    ) -> Tensor:
        return super().read_part(config, part, shape, layer=layer, expert=expert, device=device, out=out)


class RandomCheckpoint(CountingCheckpoint):
    """Every part there is, of any shape, filled with random numbers of a trained matrix's size. Needs no directory."""

    def __init__(self, seed: int = 0) -> None:
        self.directory = Path()
        self.bytes_by_part = {}
        self._generator = torch.Generator().manual_seed(seed)
        self._pool = torch.randn(_POOL, generator=self._generator)

    def has_part(self, config: ModelConfig, part: str, *, layer: int = 0, expert: int = 0) -> bool:
        return True

    def _read(
        self,
        config: ModelConfig,
        part: str,
        shape: tuple[int, ...],
        layer: int,
        expert: int,
        device: torch.device | str,
        out: Tensor | None,
    ) -> Tensor:
        if out is None:
            out = torch.empty(shape, dtype=torch_dtype(config), device=device)
        if len(shape) == 1:
            return out.fill_(1.0)
        drawn = (self._pool * shape[-1] ** -0.5).to(out.dtype)
        start = int(torch.randint(_POOL, (1,), generator=self._generator))
        flat = out.view(-1)
        for begin in range(0, flat.numel(), _POOL):
            piece = flat[begin : begin + _POOL]
            piece.copy_(drawn.roll(start)[: piece.numel()])
        return out
