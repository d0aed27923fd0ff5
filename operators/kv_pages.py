"""Holds keys and values in preallocated pages, addressed by slot: slot = page * page_size + offset.

The engine decides which sequence owns a page. A KV transfer moves a sequence page by page.
"""

from __future__ import annotations

import os

import torch
from torch import Tensor

from flowrt.operators.model_config import ModelConfig, ModelError
from flowrt.operators.state_slots import StateSlots
from flowrt.operators.weights import torch_dtype


class KvPages:
    """Keys and values of all layers, [num_pages, page_size, K, D] each. One page of one layer is one block of memory. Recurrent layers have
    no pages; `states` are theirs.

    With `shared_values` a token's value is (the beginning of) its key, as in latent attention, and only keys are kept. `rope_width`: of
    such a key, the end that depends on the token's position.
    """

    def __init__(
        self,
        num_layers: int,
        num_pages: int,
        page_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        *,
        shared_values: bool = False,
        rope_width: int = 0,
        states: StateSlots | None = None,
    ) -> None:
        self.num_layers, self.num_pages, self.page_size = num_layers, num_pages, page_size
        self.shared_values, self.states = shared_values, states
        unpaged = frozenset(() if states is None else states.layers)
        sizes = [0 if layer in unpaged else num_pages for layer in range(num_layers)]
        self.layers = tuple(layer for layer in range(num_layers) if layer not in unpaged)
        shape = (page_size, num_kv_heads, head_dim)
        # Zeros cost nothing until a page is touched, and a slot read before it was written never holds a NaN.
        kinds = [[torch.zeros(size, *shape, dtype=dtype, device=device) for size in sizes] for _ in range(1 if shared_values else 2)]
        self.keys_GCKD, self.values_GCKD = kinds[0], kinds[-1]
        self._slots = [tuple(tensor.flatten(0, 1) for tensor in self.blocks(layer)) for layer in range(num_layers)]
        self._rope_width = rope_width

    @classmethod
    def for_model(
        cls, config: ModelConfig, num_pages: int, page_size: int, device: torch.device | str = "cpu", num_slots: int = 0
    ) -> KvPages:
        """Pages of the layout and size that `config` needs: keys and values by head, or latents; and `num_slots` slots of states.

        Raises ModelError when they exceed the memory of the machine, or the memory that the device grants.
        """
        dtype, shared = torch_dtype(config), config.has_shared_pages
        num_bytes = num_pages * page_size * config.kv_elements * dtype.itemsize
        needed = f"limits.kv_pages {num_pages} of limits.page_size {page_size} need {num_bytes / (1 << 30):.3g} GiB"
        if config.recurrent_layers:
            num_bytes += (state_bytes := num_slots * len(config.recurrent_layers) * config.state_bytes)
            needed += f" and {num_slots} states (limits.max_num_seqs, limits.prefix_states) {state_bytes / (1 << 30):.3g}"
        memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        if torch.device(device).type == "cpu" and num_bytes > memory_bytes:
            raise ModelError(f"{needed}, and this machine has {memory_bytes / (1 << 30):.3g}; use fewer pages")
        heads, head_width = (1, config.kv_width) if shared else (config.num_kv_heads, config.head_dim)
        try:
            rope_width = config.page_widths[1] if shared else 0
            states = StateSlots(config, num_slots, device) if config.recurrent_layers else None
            sizes = config.num_layers, num_pages, page_size, heads, head_width
            return cls(*sizes, dtype, device, shared_values=shared, rope_width=rope_width, states=states)
        except RuntimeError as error:  # the allocator's: a bound on this process, or the device's memory
            raise ModelError(f"{needed}, which {device} does not have; use fewer pages") from error

    def blocks(self, layer: int) -> tuple[Tensor, ...]:
        """The tensors of a layer, [num_pages, page_size, K, D] each. A transfer of a page moves its row of each tensor."""
        keys = self.keys_GCKD[layer]
        return (keys,) if self.shared_values else (keys, self.values_GCKD[layer])

    def write(self, layer: int, slots_T: Tensor, k_TKD: Tensor, v_TKD: Tensor | None = None) -> None:
        """Store each row's key and value in its slot (int64, all different). Values are None where they are shared. A key may be narrower
        than a slot, whose end stays as it is."""
        slots = self._slots[layer]
        slots_T = slots_T.to(slots[0].device)
        slots[0][..., : k_TKD.shape[-1]].index_copy_(0, slots_T, k_TKD)
        if v_TKD is not None:
            slots[-1].index_copy_(0, slots_T, v_TKD)

    def parts(self, layer: int) -> tuple[Tensor, ...]:
        """Views of all slots of a layer, [slots, K, D] each: first what does not depend on positions, then the rest. Values and keys, or
        latents and rotary keys."""
        slots = self._slots[layer]
        if not self._rope_width:
            return slots[::-1]
        return slots[0][..., : -self._rope_width], slots[0][..., -self._rope_width :]

    @property
    def token_bytes(self) -> int:
        """Bytes of the keys, or of the values, of one token in one layer."""
        keys = self.keys_GCKD[0]
        return keys.shape[2] * keys.shape[3] * keys.itemsize

    def read(self, layer: int, slots_L: Tensor | slice) -> tuple[Tensor, Tensor]:
        """The keys and values in `slots_L`: [L, K, D] each, in the order of `slots_L`; twice the same tensor where they are shared.

        Returns copies; for a slice, which names contiguous slots, returns views of the pages.
        """
        found = [slots[slots_L] if isinstance(slots_L, slice) else slots.index_select(0, slots_L) for slots in self._slots[layer]]
        return found[0], found[-1]
