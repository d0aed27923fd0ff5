"""Computes routed experts with the module of transformers that holds them, for any client: experts.py says what the functions give."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from flowrt.operators.experts import PairCounts
from flowrt.operators.library_weights import load_experts
from flowrt.operators.model_config import ModelConfig
from flowrt.operators.weights import Checkpoint


class LibraryExperts:
    """Some experts of some layers. Keeps nothing between calls."""

    def __init__(
        self, config: ModelConfig, checkpoint: Checkpoint, held: Mapping[int, Sequence[int]], device: torch.device | str = "cpu"
    ) -> None:
        held = {layer: sorted(experts) for layer, experts in held.items() if experts}
        self._modules = {layer: module.to(device) for layer, module in load_experts(config, checkpoint, held).items()} if held else {}
        self._held, self._counts = held, {layer: PairCounts(len(experts)) for layer, experts in held.items()}
        self._place_E = {layer: _places(experts, config.num_experts).to(device) for layer, experts in held.items()}

    def forward(self, layer: int, x_RH: Tensor, row_P: Tensor, expert_P: Tensor, weight_P: Tensor) -> Tensor:
        y_PH = self._run(layer, x_RH, row_P, expert_P, weight_P)
        return torch.zeros_like(x_RH).index_add_(0, row_P, y_PH.to(x_RH.dtype))

    def forward_pairs(self, layer: int, x_RH: Tensor, row_P: Tensor, expert_P: Tensor) -> Tensor:
        return self._run(layer, x_RH, row_P, expert_P, x_RH.new_ones(len(row_P))).to(x_RH.dtype)

    def num_pairs(self) -> dict[int, dict[int, int]]:
        return {layer: dict(zip(experts, self._counts[layer].read(), strict=True)) for layer, experts in self._held.items()}

    def _run(self, layer: int, x_RH: Tensor, row_P: Tensor, expert_P: Tensor, weight_P: Tensor) -> Tensor:
        """The module sees each pair as a row with one expert, and uses its weight where that belongs: before the expert or behind it."""
        if layer not in self._modules:
            raise ValueError(f"layer {layer}: no expert is held here")
        place_P = self._place_E[layer][expert_P]
        if len(place_P) and int(place_P.min()) < 0:
            absent = sorted({*expert_P.tolist()} - {*self._held[layer]})
            raise ValueError(f"layer {layer}: experts {absent} were requested but are not held here; held are {self._held[layer]}")
        self._counts[layer].add(torch.bincount(place_P, minlength=len(self._held[layer])))
        module: Any = self._modules[layer]
        compute: Any = type(module).forward.__wrapped__  # what the registry of experts stands before
        y_PH: Tensor = compute(module, x_RH[row_P], place_P[:, None], weight_P[:, None])
        return y_PH


def _places(experts: Sequence[int], num_experts: int) -> Tensor:
    place_E = torch.full((num_experts,), -1, dtype=torch.int64)
    place_E[list(experts)] = torch.arange(len(experts))
    return place_E
