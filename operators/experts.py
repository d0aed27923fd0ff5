"""Experts: a pure function of layer, rows and (row, expert, weight) pairs. Called by expert servers and, with `servers: 0`, in place.

Only experts that have rows are computed (EaaS, section 4.1). Not here: which rows come (dispatch.py) and where answers go (combine.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from operators.dense import gated_silu
from operators.model_config import ModelConfig
from operators.weights import Checkpoint, torch_dtype


@dataclass(frozen=True)
class _LayerExperts:
    """The held experts of one layer, stacked; `place_E` is an expert's index in the stack plus 1, or 0 when it is not held."""

    expert_ids: tuple[int, ...]
    place_E: Tensor
    gate_up: Tensor  # [n, 2F, H]
    down: Tensor  # [n, H, F]


class Experts:
    """Some experts of some layers, with their weights. Holds no state between calls, so any copy answers alike."""

    def __init__(
        self,
        config: ModelConfig,
        checkpoint: Checkpoint,
        held: Mapping[int, Sequence[int]],
        device: torch.device | str = "cpu",
    ) -> None:
        """`held` maps a layer to the ids of the experts to read, in any order. Each is read straight into its place."""
        self.config = config
        self._layers = {layer: self._read_layer(checkpoint, layer, tuple(experts), device) for layer, experts in held.items()}

    @property
    def held(self) -> dict[int, tuple[int, ...]]:
        """The expert ids held, by layer."""
        return {layer: experts.expert_ids for layer, experts in self._layers.items()}

    @property
    def nbytes(self) -> int:
        """Bytes of weights held."""
        return sum(experts.gate_up.nbytes + experts.down.nbytes for experts in self._layers.values())

    def forward(self, layer: int, x_RH: Tensor, row_P: Tensor, expert_P: Tensor, weight_P: Tensor) -> Tensor:
        """y_RH: for each row the weighted sum over its pairs, added in pair order. A row without pairs is zero.

        row_P (into x) and expert_P are int64; ValueError when a pair asks for an expert that is not held.
        """
        y_PH = self.forward_pairs(layer, x_RH, row_P, expert_P).mul_(weight_P.to(x_RH.dtype).unsqueeze(1))
        y_RH = torch.zeros_like(x_RH)
        if x_RH.device.type == "cpu":
            return y_RH.index_add_(0, row_P, y_PH)
        return y_RH.index_put_((row_P,), y_PH, accumulate=True)  # sorts, so that the order of additions is fixed on CUDA too

    def forward_pairs(self, layer: int, x_RH: Tensor, row_P: Tensor, expert_P: Tensor) -> Tensor:
        """y_PH: each pair's expert applied to its row, without weights."""
        experts = self._layers[layer]
        place_P = experts.place_E.index_select(0, expert_P)
        order_P = place_P.argsort(stable=True)
        missing, *counts = torch.bincount(place_P, minlength=len(experts.expert_ids) + 1).tolist()
        if missing:
            absent = sorted(set(expert_P[place_P == 0].tolist()))
            raise ValueError(f"layer {layer}: experts {absent} were asked for but are not held here; held are {sorted(experts.expert_ids)}")
        sorted_PH = x_RH.index_select(0, row_P.index_select(0, order_P))
        y_sorted_PH = torch.empty_like(sorted_PH)
        start = 0
        for place, count in enumerate(counts):
            if count:
                rows = slice(start, start + count)
                width = gated_silu(F.linear(sorted_PH[rows], experts.gate_up[place]))
                torch.mm(width, experts.down[place].t(), out=y_sorted_PH[rows])
                start += count
        return torch.empty_like(y_sorted_PH).index_copy_(0, order_P, y_sorted_PH)

    def _read_layer(self, checkpoint: Checkpoint, layer: int, expert_ids: tuple[int, ...], device: torch.device | str) -> _LayerExperts:
        config = self.config
        wrong = [expert for expert in expert_ids if not 0 <= expert < config.num_experts]
        if layer not in config.moe_layers or wrong or len(set(expert_ids)) != len(expert_ids):
            exist = f"layers {list(config.moe_layers)} have experts 0 to {config.num_experts - 1}, each held once at most"
            raise ValueError(f"layer {layer}, experts {list(expert_ids)} cannot be held: {exist}")
        hidden, width, dtype = config.hidden_size, config.expert_width, torch_dtype(config)
        gate_up = torch.empty((len(expert_ids), 2 * width, hidden), dtype=dtype, device=device)
        down = torch.empty((len(expert_ids), hidden, width), dtype=dtype, device=device)
        place = torch.zeros(config.num_experts, dtype=torch.int64)
        for index, expert in enumerate(expert_ids):
            checkpoint.read_part(config, "expert_gate_up", (2 * width, hidden), layer=layer, expert=expert, out=gate_up[index])
            checkpoint.read_part(config, "expert_down", (hidden, width), layer=layer, expert=expert, out=down[index])
            place[expert] = index + 1
        return _LayerExperts(expert_ids, place.to(device), gate_up, down)
