"""Plans the attention of a step once, for use by every layer: decode groups, chunks, slots, masks, cosines and sines.

For attention over pages (kernels/cpu) the plan holds which rows read which sequences, in place of decode groups.

A decode group holds sequences with one row each and of similar context length, padded to the longest. A chunk is one sequence with
several rows. A long context whose pages are contiguous is read in place, as a group of its own: copying it would take longer than another
call. Other contexts are copied out of their pages. With a sliding window, only the slots that some row of the group or chunk can see are
read. In strict numerics each decoding sequence is a group of its own, so that no shape depends on another sequence.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from flowrt.operators.kv_pages import KvPages
from flowrt.operators.rotary import RotaryTable
from flowrt.operators.row_blocks import ALIGNMENT_BYTES
from flowrt.operators.step_layout import StepLayout

SHORT_CONTEXT = 128  # contexts up to this length share one group, because padding costs less than another call
COPIED_BYTES = 256 << 10  # keys of a context up to this size are copied, because copying costs less than a separate call


@dataclass(frozen=True)
class DecodeGroup:
    """Sequences with one row each, computed together, contexts padded to the longest."""

    rows_S: Tensor | None  # None: all rows of the step, in order
    slots: Tensor | slice  # [S * L], sequence by sequence; a slice: of one sequence, in one piece
    length: int
    mask_S11L: Tensor | None  # additive; None: all contexts are equally long


@dataclass(frozen=True)
class PagedRows:
    """Sequences with one row each, whose contexts are read in place. All tensors are int64, contiguous, on the host."""

    rows_P: Tensor  # row indices in the step
    sequences_P: Tensor
    kv_length_S: Tensor  # of all sequences of the step, like the table
    page_table_SG: Tensor


@dataclass(frozen=True)
class Chunk:
    """One sequence with several rows."""

    start: int
    stop: int
    slots_L: Tensor | slice | None  # a slice: in one piece; None: the context is exactly these rows
    mask_TL: Tensor | None  # additive; None: each row sees the rows up to itself


@dataclass(frozen=True)
class StepPlan:
    """The values that every layer of a step needs, computed once."""

    cos_T1D: Tensor
    sin_T1D: Tensor
    groups: tuple[DecodeGroup, ...]
    chunks: tuple[Chunk, ...]
    paged: PagedRows | None = None  # instead of groups


def plan_step(
    layout: StepLayout,
    pages: KvPages,
    table: RotaryTable,
    window: int | None = None,
    *,
    each_alone: bool = False,
    is_paged: bool = False,
) -> StepPlan:
    """The plan of a step. The first layer computes it and stores it in the layout under its `table`; other layers reuse it.

    A row sees at most `window` tokens, itself included; None: its whole context. With `each_alone` no sequences share a group. With
    `is_paged` the plan holds `paged` in place of groups. Raises ValueError for a context longer than its pages.
    """
    plan: StepPlan | None = layout.derived.get(table)
    if plan is None:
        room = layout.page_table_SG.shape[1] * pages.page_size
        if max(layout.kv_lengths, default=0) > room:
            raise ValueError(f"a context of {max(layout.kv_lengths)} tokens in a page table of {room}")
        cos, sin = table.rows(layout.positions_T, max(layout.kv_lengths, default=0))
        pieces = _pieces(layout, pages, window, min_rows=2 if is_paged else 1)
        groups = () if is_paged else _decode_groups(layout, pages.page_size, cos.dtype, window, each_alone, pieces)
        chunks = _chunks(layout, pages.page_size, cos.dtype, window, pieces)
        plan = StepPlan(cos, sin, groups, chunks, _paged_rows(layout) if is_paged else None)
        layout.derived[table] = plan
    return plan


def _pieces(layout: StepLayout, pages: KvPages, window: int | None, min_rows: int) -> dict[int, int]:
    """Maps sequences with a long contiguous context, and at least `min_rows` rows, to the slot that their token 0 would have.

    Empty on a device, because the host does not wait for its page table, and where the start of a token may be unaligned.
    """
    page_size, token_bytes = pages.page_size, pages.token_bytes
    if layout.page_table_SG.device.type != "cpu" or token_bytes % ALIGNMENT_BYTES:
        return {}
    found: dict[int, int] = {}
    for sequence, (query, context) in enumerate(zip(layout.query_lengths, layout.kv_lengths, strict=True)):
        seen = context if window is None else min(context, window + query - 1)
        if query < min_rows or seen * token_bytes <= COPIED_BYTES:
            continue
        first = (context - seen) // page_size
        table: list[int] = layout.page_table_SG[sequence, first : -(-context // page_size)].tolist()
        if table == list(range(table[0], table[0] + len(table))):
            found[sequence] = (table[0] - first) * page_size
    return found


def _paged_rows(layout: StepLayout) -> PagedRows | None:
    sequences = (np.array(layout.query_lengths, dtype=np.int64) == 1).nonzero()[0]
    if not len(sequences):
        return None
    rows = layout.query_start_S1.numpy()[sequences]
    table, lengths = layout.page_table_SG.contiguous(), layout.kv_length_S.contiguous()
    return PagedRows(torch.from_numpy(rows), torch.from_numpy(sequences), lengths, table)


def slots_of(layout: StepLayout, sequences_S: Tensor, first_S: Tensor | None, length: int, page_size: int) -> Tensor:
    """Slots [S * length] of `length` tokens of some sequences from token `first_S` (None: 0) on.

    A shorter context repeats its own last slot. A masked slot must not belong to another sequence, whose values might be NaN.
    """
    tokens_SL = torch.arange(length, device=sequences_S.device).expand(sequences_S.numel(), length)
    if first_S is not None:
        tokens_SL = tokens_SL + first_S[:, None]
    tokens_SL = tokens_SL.minimum(layout.kv_length_S[sequences_S, None] - 1)
    pages_SL = layout.page_table_SG[sequences_S].gather(1, tokens_SL // page_size)
    return (pages_SL * page_size + tokens_SL % page_size).flatten()


def _decode_groups(
    layout: StepLayout, page_size: int, dtype: torch.dtype, window: int | None, each_alone: bool, pieces: Mapping[int, int]
) -> tuple[DecodeGroup, ...]:
    """Groups sequences with one row by the power of two of their visible length, so that padding at most doubles the work."""
    seen = [context if window is None else min(context, window) for context in layout.kv_lengths]
    by_size: dict[int, list[int]] = {}
    for sequence, query in enumerate(layout.query_lengths):
        if query == 1:
            size = -sequence if each_alone or sequence in pieces else max(SHORT_CONTEXT, seen[sequence] - 1).bit_length()
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
        if (piece := pieces.get(members[0])) is not None:
            end = piece + layout.kv_lengths[members[0]]
            groups.append(DecodeGroup(rows, slice(end - length, end), length, None))
        else:
            groups.append(DecodeGroup(rows, slots_of(layout, sequences, first_S, length, page_size), length, mask))
    return tuple(groups)


def _chunks(layout: StepLayout, page_size: int, dtype: torch.dtype, window: int | None, pieces: Mapping[int, int]) -> tuple[Chunk, ...]:
    chunks, start = [], 0
    device = layout.positions_T.device
    for sequence, (query, context) in enumerate(zip(layout.query_lengths, layout.kv_lengths, strict=True)):
        if query > 1:
            slots: Tensor | slice | None = None
            mask = None
            before = context - query if window is None else min(context - query, window - 1)  # seen by the chunk's first row
            if before:
                if (piece := pieces.get(sequence)) is not None:
                    slots = slice(piece + context - query - before, piece + context)
                else:
                    first = torch.tensor([context - query - before], device=device)
                    slots = slots_of(layout, torch.tensor([sequence], device=device), first, before + query, page_size)
            if before or (window is not None and query > window):
                mask = torch.full((query, before + query), float("-inf"), dtype=dtype, device=device).triu_(before + 1)
                if window is not None:
                    too_old = torch.ones_like(mask, dtype=torch.bool).tril_(before - window)
                    mask.masked_fill_(too_old, float("-inf"))
            chunks.append(Chunk(start, start + query, slots, mask))
        start += query
    return tuple(chunks)
