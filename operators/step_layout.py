"""Maps each row of a step to a token of a sequence, and to the slot of its key and value.

A step mixes chunks of prompts and decode rows freely. A sequence has query_length rows, which are the last tokens of a context of
kv_length. The engine builds a layout with `from_lists` and sends it as a message.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

POSITIONS, KV_LENGTHS = 0, 3  # the places of positions_T and kv_length_S in `to_tensors`


@dataclass(frozen=True, eq=False)
class StepLayout:
    """All tensors are int64. The two tuples repeat lengths as Python numbers, so that the host does not wait for a device to read them.

    `positions_T` is each row's position in its sequence; `slots_T` the slot that takes its key and value (kv_pages.py).
    `query_start_S1` are the offsets of each sequence's rows, `kv_length_S` its context length including this step's rows,
    `page_table_SG` its pages in order, padded with 0. `states_2S`: the slots from which its recurrent layers read their state (NO_STATE:
    none yet), and to which they write it (state_slots.py); None in models without such layers. `derived` is scratch space for values that
    a module computes once per step and uses in every layer, under a key of its own; it is not sent.
    """

    positions_T: Tensor
    slots_T: Tensor
    query_start_S1: Tensor
    kv_length_S: Tensor
    page_table_SG: Tensor
    query_lengths: tuple[int, ...]
    kv_lengths: tuple[int, ...]
    states_2S: Tensor | None = None
    derived: dict[Any, Any] = field(default_factory=dict, repr=False)

    @property
    def num_rows(self) -> int:
        return sum(self.query_lengths)

    @property
    def num_sequences(self) -> int:
        return len(self.query_lengths)

    @classmethod
    def from_lists(
        cls,
        query_lengths: Sequence[int],
        kv_lengths: Sequence[int],
        page_tables: Sequence[Sequence[int]],
        page_size: int,
        device: torch.device | str = "cpu",
        states: Sequence[tuple[int, int]] = (),
    ) -> StepLayout:
        """The layout of a step in which sequence s has its last query_lengths[s] of kv_lengths[s] tokens. `states`: its slots of recurrent
        states, if the model has such layers.

        Raises ValueError when the lists do not match or a page table is too short for its context.
        """
        if not len(query_lengths) == len(kv_lengths) == len(page_tables):
            counts = f"{len(query_lengths)} query lengths, {len(kv_lengths)} context lengths, {len(page_tables)} page tables"
            raise ValueError(f"{counts}; one of each per sequence is needed")
        for sequence, (query, context, pages) in enumerate(zip(query_lengths, kv_lengths, page_tables, strict=True)):
            if not 0 < query <= context <= len(pages) * page_size:
                raise ValueError(
                    f"sequence {sequence}: {query} rows of a context of {context} in {len(pages)} pages of {page_size} tokens;"
                    " 0 < rows <= context <= room in pages is needed"
                )
        # numpy, because a torch call on a few numbers takes several times as long, and this comes before every step.
        lengths, contexts = np.array(query_lengths, dtype=np.int64), np.array(kv_lengths, dtype=np.int64)
        starts = np.concatenate((np.zeros(1, dtype=np.int64), lengths.cumsum()))
        table = np.zeros((len(page_tables), max((len(pages) for pages in page_tables), default=0)), dtype=np.int64)
        for row, pages in zip(table, page_tables, strict=True):
            row[: len(pages)] = pages
        sequence_T = np.repeat(np.arange(len(lengths)), lengths)
        positions = np.arange(len(sequence_T)) - (starts[1:] - contexts)[sequence_T]
        slots = table[sequence_T, positions // page_size] * page_size + positions % page_size
        arrays = positions, slots, starts, contexts, table
        positions_T, slots_T, query_start_S1, kv_length_S, page_table_SG = (torch.from_numpy(array).to(device) for array in arrays)
        states_2S = torch.tensor(states, dtype=torch.int64, device=device).t() if states else None
        return cls(positions_T, slots_T, query_start_S1, kv_length_S, page_table_SG, tuple(query_lengths), tuple(kv_lengths), states_2S)

    def to_tensors(self) -> tuple[Tensor, ...]:
        """The tensors that are sent: positions, slots, query starts, context lengths, page table, and slots of states if there are any."""
        states = () if self.states_2S is None else (self.states_2S,)
        return self.positions_T, self.slots_T, self.query_start_S1, self.kv_length_S, self.page_table_SG, *states

    @classmethod
    def from_tensors(cls, tensors: Sequence[Tensor]) -> StepLayout:
        """The inverse of to_tensors. Raises ValueError when the shapes do not match or a tensor is not int64."""
        positions, slots, starts, contexts, table, *states = tensors
        if any(tensor.dtype != torch.int64 for tensor in tensors):
            raise ValueError(f"a step layout is made of int64, not of {[str(tensor.dtype) for tensor in tensors]}")
        if starts.dim() != 1 or not len(starts) or table.dim() != 2:
            raise ValueError(f"a step layout cannot have shapes {[list(tensor.shape) for tensor in tensors]}")
        lengths = starts.diff()
        rows_agree = positions.shape == slots.shape == (int(lengths.sum()),)
        states_agree = all(each.shape == (2, *contexts.shape) for each in states)
        if not rows_agree or contexts.shape != lengths.shape or table.shape[:1] != contexts.shape or not states_agree:
            raise ValueError(f"a step layout cannot have shapes {[list(tensor.shape) for tensor in tensors]}")
        query_lengths, kv_lengths = lengths.tolist(), contexts.tolist()
        most = len(positions)
        if int(starts[0]) or not all(0 < query <= min(context, most) for query, context in zip(query_lengths, kv_lengths, strict=True)):
            raise ValueError(
                f"sequences of {query_lengths} rows from row {int(starts[0])} on, in contexts of {kv_lengths}:"
                " 0 < rows <= context is needed, from row 0 on"
            )
        return cls(positions, slots, starts, contexts, table, tuple(query_lengths), tuple(kv_lengths), states[0] if states else None)
