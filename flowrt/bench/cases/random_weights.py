"""Random weights for timing operators, without a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flowrt.operators.model_config import GateConfig, ModelConfig, RotaryConfig
from flowrt.operators.weights import Checkpoint, torch_dtype

_POOL = (1 << 20) + 7  # random numbers that all weights repeat, out of step with rows: drawing gigabytes takes long


# The sizes of the published figures; every layer has experts.
MODEL_LIKE_QWEN3 = ModelConfig(
    family="qwen3_moe",
    dtype="float32",
    vocab_size=32000,
    hidden_size=1024,
    num_layers=4,
    num_heads=16,
    num_kv_heads=4,
    head_dim=64,
    num_experts=32,
    num_experts_per_token=4,
    expert_width=512,
    dense_width=0,
    moe_layers=(0, 1, 2, 3),
    norm_epsilon=1e-6,
    max_position_embeddings=1 << 16,
    rotary=RotaryConfig(),
    gate=GateConfig(normalize=1.0),
    qk_norm=True,
)


class RandomCheckpoint(Checkpoint):
    """Every part, of any shape, filled with random numbers of the size of trained ones. Needs no directory."""

    def __init__(self, seed: int = 0) -> None:
        self.directory = Path()
        self._generator = torch.Generator().manual_seed(seed)
        self._pool = torch.randn(_POOL, generator=self._generator)

    def read_part(self, config: ModelConfig, part: str, shape: tuple[int, ...], **place: Any) -> Tensor:
        out = place.get("out")
        if out is None:
            out = torch.empty(shape, dtype=place.get("dtype") or torch_dtype(config), device=place.get("device", "cpu"))
        if len(shape) == 1:
            return out.fill_(1.0)
        drawn = (self._pool * shape[-1] ** -0.5).to(out.dtype)
        start = int(torch.randint(_POOL, (1,), generator=self._generator))
        flat = out.view(-1)
        for begin in range(0, flat.numel(), _POOL):
            piece = flat[begin : begin + _POOL]
            piece.copy_(drawn.roll(start)[: piece.numel()])
        return out
