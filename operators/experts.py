"""Experts: a pure function of layer, rows and (row, expert, weight) pairs. Called by expert servers and, with `servers: 0`, in place.

Only experts that have rows are computed (EaaS, section 4.1). Not here: which rows come (dispatch.py) and where answers go (combine.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from operators.dense import gated_silu
from operators.model_config import ModelConfig
from operators.row_blocks import ALIGNMENT_BYTES, PROOF_ROWS, WHOLE, RowBlocks
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
        blocks: RowBlocks = WHOLE,
    ) -> None:
        """`held` maps a layer to the ids of the experts to read, in any order. Each is read straight into its place."""
        self.config = config
        self._blocks, self._device = blocks, device
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
                if self._blocks.strict:
                    expert = partial(_expert, experts.gate_up[place], experts.down[place])
                    y_sorted_PH[rows] = self._blocks.run("experts", expert, sorted_PH[rows])
                else:
                    width = gated_silu(F.linear(sorted_PH[rows], experts.gate_up[place]))
                    torch.mm(width, experts.down[place].t(), out=y_sorted_PH[rows])
                start += count
        return torch.empty_like(y_sorted_PH).index_copy_(0, order_P, y_sorted_PH)

    def prove(self) -> None:
        """Make the proof of strict blocks, with drawn weights: it must come out alike in every process, whichever experts it holds."""
        config, dtype = self.config, torch_dtype(self.config)
        generator = torch.Generator().manual_seed(config.hidden_size)
        shapes = (2 * config.expert_width, config.hidden_size), (config.hidden_size, config.expert_width), (PROOF_ROWS, config.hidden_size)
        gate_up, down, x_RH = (torch.randn(shape, generator=generator).to(self._device, dtype) for shape in shapes)
        self._blocks.run("experts", partial(_expert, gate_up.div_(config.hidden_size**0.5), down), x_RH)

    def _read_layer(self, checkpoint: Checkpoint, layer: int, expert_ids: tuple[int, ...], device: torch.device | str) -> _LayerExperts:
        config = self.config
        wrong = [expert for expert in expert_ids if not 0 <= expert < config.num_experts]
        if layer not in config.moe_layers or wrong or len(set(expert_ids)) != len(expert_ids):
            exist = f"layers {list(config.moe_layers)} have experts 0 to {config.num_experts - 1}, each held once at most"
            raise ValueError(f"layer {layer}, experts {list(expert_ids)} cannot be held: {exist}")
        hidden, width, dtype = config.hidden_size, config.expert_width, torch_dtype(config)
        gate_up = _aligned_stack(len(expert_ids), (2 * width, hidden), dtype, device)
        down = _aligned_stack(len(expert_ids), (hidden, width), dtype, device)
        place = torch.zeros(config.num_experts, dtype=torch.int64)
        for index, expert in enumerate(expert_ids):
            checkpoint.read_part(config, "expert_gate_up", (2 * width, hidden), layer=layer, expert=expert, out=gate_up[index])
            checkpoint.read_part(config, "expert_down", (hidden, width), layer=layer, expert=expert, out=down[index])
            place[expert] = index + 1
        return _LayerExperts(expert_ids, place.to(device), gate_up, down)


def _expert(gate_up: Tensor, down: Tensor, x_RH: Tensor) -> Tensor:
    return F.linear(gated_silu(F.linear(x_RH, gate_up)), down)


def _aligned_stack(count: int, shape: tuple[int, int], dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """[count, *shape], each matrix beginning where an allocation of its own would: whether others lie before it must not show."""
    size = shape[0] * shape[1]
    room = -(-size * dtype.itemsize // ALIGNMENT_BYTES) * ALIGNMENT_BYTES // dtype.itemsize
    return torch.empty((count, room), dtype=dtype, device=device)[:, :size].view(count, *shape)
