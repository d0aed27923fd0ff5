"""Holds the states of recurrent layers, by slot: what such a layer keeps of the tokens of a sequence, in a fixed size.

The engine decides which sequence owns a slot, and which slots a step reads and writes (flowrt/engine/state_memory.py). A step never writes
to the slot of a committed state, so nothing is copied when a step commits or is dropped.
"""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

from flowrt.operators.model_config import STATE_ALIGNMENT, ModelConfig
from flowrt.operators.weights import TORCH_DTYPES

NO_STATE = -1  # in place of a slot: the state before the first token, which is zero


class StateSlots:
    """The states of some layers, in `num_slots` slots. A slot of one layer is one block of bytes, which a transfer moves."""

    def __init__(self, config: ModelConfig, num_slots: int, device: torch.device | str = "cpu") -> None:
        self.num_slots, self.num_bytes, self._tensors = num_slots, config.state_bytes, config.state_tensors
        shape = (num_slots, self.num_bytes)
        self._blocks = {layer: torch.zeros(shape, dtype=torch.uint8, device=device) for layer in config.recurrent_layers}
        self._views = {layer: self._views_of(block_SB) for layer, block_SB in self._blocks.items()}

    @property
    def layers(self) -> tuple[int, ...]:
        return tuple(self._blocks)

    def block(self, layer: int) -> Tensor:
        """The slots of a layer as bytes: uint8 [slots, num_bytes]."""
        return self._blocks[layer]

    def read(self, layer: int, slot: int) -> tuple[Tensor, ...]:
        """The tensors of the state in a slot, as views, which a step may only write to if the slot is its own; zeros for NO_STATE."""
        views = self._views[layer]
        return tuple(view.new_zeros(view.shape[1:]) for view in views) if slot == NO_STATE else tuple(view[slot] for view in views)

    def _views_of(self, block_SB: Tensor) -> tuple[Tensor, ...]:
        views, start = [], 0
        for name, shape in self._tensors:
            num_bytes = prod(shape) * (dtype := TORCH_DTYPES[name]).itemsize
            views.append(block_SB[:, start : start + num_bytes].view(dtype).unflatten(1, shape))
            start += -(-num_bytes // STATE_ALIGNMENT) * STATE_ALIGNMENT
        return tuple(views)
