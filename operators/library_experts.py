"""Computes routed experts with the module of transformers that holds them, for any client: experts.py says what the functions give.

Where a module says that its experts are two matrices with a gate or an activation between them, as those do that the library can compute in
several ways (its `use_experts_implementation`), flowrt's products take the place of the library's: it reorders a matrix for each few rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from flowrt.operators.expert_products import SegmentedProduct
from flowrt.operators.experts import PairCounts
from flowrt.operators.library_weights import expert_matrices, load_experts
from flowrt.operators.model_config import ModelConfig
from flowrt.operators.products import form_for, lay_out
from flowrt.operators.quantized_products import quantize, quantized_panels
from flowrt.operators.weights import Checkpoint


class LibraryExperts:
    """Some experts of some layers. Keeps nothing between calls."""

    def __init__(
        self, config: ModelConfig, checkpoint: Checkpoint, held: Mapping[int, Sequence[int]], device: torch.device | str = "cpu"
    ) -> None:
        held = {layer: sorted(experts) for layer, experts in held.items() if experts}
        modules = load_experts(config, checkpoint, held) if held else {}
        self._layers = {layer: _layer_of(module.to(device), config) for layer, module in modules.items()}
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
        if layer not in self._layers:
            raise ValueError(f"layer {layer}: no expert is held here")
        place_P = self._place_E[layer][expert_P]
        if len(place_P) and int(place_P.min()) < 0:
            absent = sorted({*expert_P.tolist()} - {*self._held[layer]})
            raise ValueError(f"layer {layer}: experts {absent} were requested but are not held here; held are {self._held[layer]}")
        counts_E = torch.bincount(place_P, minlength=len(self._held[layer]))
        self._counts[layer].add(counts_E)
        return self._layers[layer].run(x_RH[row_P], place_P, weight_P, counts_E)


class _ModuleLayer:
    """The experts of a layer, computed by the module alone."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self._compute: Any = type(module).forward.__wrapped__  # what the registry of experts stands before

    def run(self, x_PH: Tensor, place_P: Tensor, weight_P: Tensor, counts_E: Tensor) -> Tensor:
        """The module sees each pair as a row with one expert, and uses its weight where that belongs: before the expert or behind it."""
        y_PH: Tensor = self._compute(self._module, x_PH, place_P[:, None], weight_P[:, None])
        return y_PH


class _PanelLayer:
    """The same with flowrt's products for the two matrices of an expert. The module has the rest: biases, gate or activation, norm."""

    def __init__(self, module: Any, config: ModelConfig) -> None:
        first, down = expert_matrices(module)
        self._module, self._first_bias, self._down_bias = module, f"{first}_bias", f"{down}_bias"
        self._first, self._down = (SegmentedProduct(_laid_out(module, name, config)) for name in (first, down))
        for name in (first, down):
            del module._parameters[name]

    def run(self, x_PH: Tensor, place_P: Tensor, weight_P: Tensor, counts_E: Tensor) -> Tensor:
        module, counts = self._module, counts_E.tolist()
        place_P, order_P = place_P.sort(stable=True)
        inner = self._product(self._first, self._first_bias, x_PH[order_P], place_P, counts)
        inner = module._apply_gate(inner) if module.has_gate else module.act_fn(inner)
        y_PH = self._product(self._down, self._down_bias, inner, place_P, counts)
        if module.has_post_expert_norm:
            y_PH = module.post_expert_norm(y_PH)
        return torch.empty_like(y_PH).index_copy_(0, order_P, y_PH * weight_P[order_P, None])

    def _product(self, matrices: SegmentedProduct, bias: str, x_PK: Tensor, place_P: Tensor, counts: Sequence[int]) -> Tensor:
        y_PN = matrices(x_PK, counts).to(x_PK.dtype)
        return y_PN.add_(getattr(self._module, bias)[place_P]) if self._module.has_bias else y_PN


def _layer_of(module: Any, config: ModelConfig) -> _ModuleLayer | _PanelLayer:
    matrices = expert_matrices(module)
    shapes = [(each.shape[1], each.shape[2]) for each in matrices.values()]
    first = next(iter(matrices.values()), None)
    in_dtype = config.expert_weights == "dtype"
    if first is None or (in_dtype and form_for(first.dtype, first.device.type, *shapes) not in ("panels", "wide panels")):
        return _ModuleLayer(module)
    return _PanelLayer(module, config)


def _laid_out(module: Any, name: str, config: ModelConfig) -> list[Any]:
    """The matrices of all experts in panels, in place of the module's own. They lie in one piece: many pieces of a few megabytes leave gaps
    in the memory of a process. Panels as large as the matrices lie in the memory of these, or a layer would be held twice."""
    weight_ENK, stored = expert_matrices(module)[name].detach(), getattr(module, name).detach()
    kept = config.expert_weights
    model: Any = lay_out(weight_ENK[0]) if kept == "dtype" else quantized_panels(weight_ENK[0], kept, config.activations)
    if stored.is_contiguous() and stored[0].nbytes == model.num_bytes:
        memory_EB = stored.view(torch.uint8).view(len(stored), model.num_bytes)
    else:
        memory_EB = torch.empty(len(stored), model.num_bytes, dtype=torch.uint8)
    for weight_NK, memory_B in zip(weight_ENK, memory_EB, strict=True):
        model.write(weight_NK.clone() if kept == "dtype" else quantize(weight_NK, kept), memory_B)
    return [model.over(memory_B) for memory_B in memory_EB]


def _places(experts: Sequence[int], num_experts: int) -> Tensor:
    place_E = torch.full((num_experts,), -1, dtype=torch.int64)
    place_E[list(experts)] = torch.arange(len(experts))
    return place_E
