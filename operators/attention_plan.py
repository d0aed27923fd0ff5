"""How the sequences of a step are grouped for attention, worked out once per step and used by every layer.

Here: decode groups, chunks, their slots and masks, cosines and sines. Not here: the products (attention.py, latent_attention.py).

A decode group holds sequences with one row each, of similar context length, padded to the longest. A chunk is one sequence with
several rows. With a sliding window only the slots that some row of the group or chunk can see are read. In strict numerics each
decoding sequence is a group of its own, so that no shape depends on another sequence.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from operators.rotary import RotaryTable
from operators.step_layout import StepLayout

SHORT_CONTEXT = 128  # contexts up to this length share one group: padding them costs less than another call


@dataclass(frozen=True)
class DecodeGroup:
    """Sequences with one row each, computed together, contexts padded to the longest."""

    rows_S: Tensor | None  # None: all rows of the step, in order
    slots: Tensor  # [S * L], sequence by sequence
    length: int
    mask_S11L: Tensor | None  # additive; None: all contexts are equally long


@dataclass(frozen=True)
class Chunk:
    """One sequence with several rows."""

    start: int
    stop: int
    slots_L: Tensor | None  # None: the context is exactly these rows
    mask_TL: Tensor | None  # additive; None: each row sees the rows up to itself


@dataclass(frozen=True)
class StepPlan:
    """What every layer of a step needs and none should work out again."""

    cos_T1D: Tensor
    sin_T1D: Tensor
    groups: tuple[DecodeGroup, ...]
    chunks: tuple[Chunk, ...]


def plan_step(layout: StepLayout, page_tokens: int, table: RotaryTable, window: int | None = None, *, each_alone: bool = False) -> StepPlan:
    """`window`: a row sees at most this many tokens, itself among them; None: its whole context. `each_alone`: no shared groups."""
    cos, sin = table.rows(layout.positions_T, max(layout.kv_lengths, default=0))
    groups = _decode_groups(layout, page_tokens, cos.dtype, window, each_alone)
    return StepPlan(cos, sin, groups, _chunks(layout, page_tokens, cos.dtype, window))


def _slots(layout: StepLayout, sequences_S: Tensor, first_S: Tensor | None, length: int, page_tokens: int) -> Tensor:
    """Slots [S * length] of `length` tokens of some sequences from token `first_S` (None: 0) on. A shorter context repeats its own
    last slot: what is masked away must not be another sequence's, whose values might be NaN."""
    tokens_SL = torch.arange(length, device=sequences_S.device).expand(sequences_S.numel(), length)
    if first_S is not None:
        tokens_SL = tokens_SL + first_S[:, None]
    tokens_SL = tokens_SL.minimum(layout.kv_length_S[sequences_S, None] - 1)
    pages_SL = layout.page_table_SG[sequences_S].gather(1, tokens_SL // page_tokens)
    return (pages_SL * page_tokens + tokens_SL % page_tokens).flatten()


def _decode_groups(
    layout: StepLayout, page_tokens: int, dtype: torch.dtype, window: int | None, each_alone: bool
) -> tuple[DecodeGroup, ...]:
    """Sequences with one row, grouped by power of two of what they see, so that padding at most doubles the work."""
    seen = [context if window is None else min(context, window) for context in layout.kv_lengths]
    by_size: dict[int, list[int]] = {}
    for sequence, query in enumerate(layout.query_lengths):
        if query == 1:
            size = -sequence if each_alone else max(SHORT_CONTEXT, seen[sequence] - 1).bit_length()
            by_size.setdefault(size, []).append(sequence)
    device = layout.positions_T.device
    groups = []
    for members in by_size.values():
        sequences = torch.tensor(members, device=device)
        lengths = [seen[sequence] for sequence in members]
        length, mask, first_S = max(lengths), None, None
        if any(seen[sequence] < layout.kv_lengths[sequence] for sequence in members):
            first_S = torch.tensor([layout.kv_lengths[sequence] - seen[sequence] for sequence in members], device=device)
        if min(lengths) < length:
            hidden = torch.arange(length, device=device) >= torch.tensor(lengths, device=device)[:, None]
            mask = torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, float("-inf"))[:, None, None]
        rows = None if len(members) == layout.num_rows and not each_alone else layout.query_start_S1[sequences]
        groups.append(DecodeGroup(rows, _slots(layout, sequences, first_S, length, page_tokens), length, mask))
    return tuple(groups)


def _chunks(layout: StepLayout, page_tokens: int, dtype: torch.dtype, window: int | None) -> tuple[Chunk, ...]:
    chunks, start = [], 0
    device = layout.positions_T.device
    for sequence, (query, context) in enumerate(zip(layout.query_lengths, layout.kv_lengths, strict=True)):
        if query > 1:
            slots = mask = None
            before = context - query if window is None else min(context - query, window - 1)  # seen by the chunk's first row
            if before:
                first = torch.tensor([context - query - before], device=device)
                slots = _slots(layout, torch.tensor([sequence], device=device), first, before + query, page_tokens)
            if before or (window is not None and query > window):
                mask = torch.full((query, before + query), float("-inf"), dtype=dtype, device=device).triu_(before + 1)
                if window is not None:
                    too_old = torch.ones_like(mask, dtype=torch.bool).tril_(before - window)
                    mask.masked_fill_(too_old, float("-inf"))
            chunks.append(Chunk(start, start + query, slots, mask))
        start += query
    return tuple(chunks)
