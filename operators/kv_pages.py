"""Holds keys and values in preallocated pages, addressed by slot: slot = page * page_size + offset.

Pages of INT8 (`model.kv_cache: int8`) hold each head of a key and of a value as INT8 with its scale behind it, so the bits of a slot depend
on its own token alone. Of latents, the part that depends on the position stays as it is. Whoever attends to a token reads what its slot
holds, in the step that computes it, too: else a token would depend on how a prompt was cut.

The engine decides which sequence owns a page. A KV transfer moves a sequence page by page.
"""

from __future__ import annotations

import os

import torch
from torch import Tensor

from flowrt.operators.int8_rows import packed_rows, unpacked_rows
from flowrt.operators.model_config import ModelConfig, ModelError, int8_columns
from flowrt.operators.state_slots import StateSlots
from flowrt.operators.weights import torch_dtype


class KvPages:
    """Keys and values of all layers, [num_pages, page_size, K, columns] each, where the columns are D numbers of `dtype`, or the bytes of
    `packed_rows` (int8_rows.py) with `int8`. One page of one layer is one block of memory. Recurrent layers have
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
        int8: bool = False,
    ) -> None:
        self.num_layers, self.num_pages, self.page_size = num_layers, num_pages, page_size
        self.shared_values, self.states = shared_values, states
        self._dtype, self._int8_width, self._rope_width = dtype, head_dim - rope_width if int8 else 0, rope_width
        # Columns of shared pages that depend on the position.
        self._rope_columns = rope_width * dtype.itemsize if int8 else rope_width
        columns = int8_columns(self._int8_width) + self._rope_columns if int8 else head_dim
        unpaged = frozenset(() if states is None else states.layers)
        sizes = [0 if layer in unpaged else num_pages for layer in range(num_layers)]
        self.layers = tuple(layer for layer in range(num_layers) if layer not in unpaged)
        shape, stored = (page_size, num_kv_heads, columns), torch.int8 if int8 else dtype
        # Zeros cost nothing until a page is touched, and a slot read before it was written never holds a NaN.
        kinds = [[torch.zeros(size, *shape, dtype=stored, device=device) for size in sizes] for _ in range(1 if shared_values else 2)]
        self.keys_GCKD, self.values_GCKD = kinds[0], kinds[-1]
        self._slots = [tuple(tensor.flatten(0, 1) for tensor in self.blocks(layer)) for layer in range(num_layers)]

    @classmethod
    def for_model(
        cls, config: ModelConfig, num_pages: int, page_size: int, device: torch.device | str = "cpu", num_slots: int = 0
    ) -> KvPages:
        """Pages of the layout and size that `config` needs: keys and values by head, or latents; and `num_slots` slots of states.

        Raises ModelError when they exceed the memory of the machine, or the memory that the device grants.
        """
        dtype, shared = torch_dtype(config), config.has_shared_pages
        num_bytes = num_pages * page_size * config.kv_bytes
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
            int8 = config.kv_cache == "int8"
            return cls(*sizes, dtype, device, shared_values=shared, rope_width=rope_width, states=states, int8=int8)
        except RuntimeError as error:  # the allocator's: a bound on this process, or the device's memory
            raise ModelError(f"{needed}, which {device} does not have; use fewer pages") from error

    def blocks(self, layer: int) -> tuple[Tensor, ...]:
        """The tensors of a layer, [num_pages, page_size, K, columns] each. A transfer of a page moves its row of each tensor."""
        keys = self.keys_GCKD[layer]
        return (keys,) if self.shared_values else (keys, self.values_GCKD[layer])

    def write(self, layer: int, slots_T: Tensor, k_TKD: Tensor, v_TKD: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Store each row's key and value in its slot (int64, all different). Values are None where they are shared. A key may be narrower
        than a slot, whose end stays as it is, but not in pages of INT8. Returns keys and values as the slots hold them."""
        held = [
            self._write(slots, slots_T.to(slots.device), rows)
            for slots, rows in zip(self._slots[layer], (k_TKD, v_TKD), strict=False)
            if rows is not None
        ]
        return held[0], held[-1]

    def _write(self, slots: Tensor, slots_T: Tensor, rows_TKD: Tensor) -> Tensor:
        if self._int8_width:
            packed = packed_rows(rows_TKD, self._rope_width)
            slots.index_copy_(0, slots_T, packed)
            return self._read(packed)
        slots[..., : rows_TKD.shape[-1]].index_copy_(0, slots_T, rows_TKD)
        return rows_TKD

    def parts(self, layer: int) -> tuple[Tensor, ...]:
        """Views of all slots of a layer, [slots, K, columns] each: first what does not depend on positions, then the rest. Values and keys,
        or latents and rotary keys."""
        slots = self._slots[layer]
        if not self._rope_columns:
            return slots[::-1]
        return slots[0][..., : -self._rope_columns], slots[0][..., -self._rope_columns :]

    @property
    def token_bytes(self) -> int:
        """Bytes of the keys, or of the values, of one token in one layer."""
        keys = self.keys_GCKD[0]
        return keys.shape[2] * keys.shape[3] * keys.itemsize

    def read(self, layer: int, slots_L: Tensor | slice) -> tuple[Tensor, Tensor]:
        """The keys and values in `slots_L`: [L, K, D] each, in the order of `slots_L`; twice the same tensor where they are shared.

        Returns copies; for a slice, which names contiguous slots, returns views of the pages, but of those of INT8.
        """
        found = [
            self._read(slots[slots_L] if isinstance(slots_L, slice) else slots.index_select(0, slots_L)) for slots in self._slots[layer]
        ]
        return found[0], found[-1]

    def _read(self, rows: Tensor) -> Tensor:
        return unpacked_rows(rows, self._dtype, self._int8_width, self._rope_width) if self._int8_width else rows
