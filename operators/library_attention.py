"""Attention for modules of transformers over flowrt's pages: sequences of a pass packed in one row of tokens, each with its own context.

What differs between architectures comes from the module: the scale, a soft cap, sinks, a window, the mask as a function of positions, how
keys and values follow from cached latents, and which tokens an indexer chooses (DeepSeek-V3.2, section 2.1).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flowrt.operators.attention_plan import SHORT_CONTEXT, slots_of
from flowrt.operators.kv_pages import KvPages
from flowrt.operators.library_interfaces import IndexedKeys, Indexer, Mask
from flowrt.operators.step_layout import StepLayout

MAX_SCORES = 4 << 20
MAX_INDEX_SCORES = 1 << 18  # of each head of an indexer, which has up to 64, that are in memory at once
Shapes = tuple[tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True)
class _SequenceGroup:
    """Sequences with equally many rows that are computed in one call, contexts padded to the longest.

    `rows`: their rows in the pass. `slots`: [S * L], sequence by sequence. `mask_S1QL`: additive.
    """

    rows: Tensor | slice
    num_sequences: int
    slots: Tensor
    mask_S1QL: Tensor


def attend_packed(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Mask | None,
    options: Mapping[str, Any],
    layout: StepLayout,
    pages: KvPages,
    layer: int,
    cached: Shapes,
) -> Tensor:
    """[1, T, N, value width] for `query` [1, N, T, D], whose keys and values are in the pages of `layer`, in the shapes `cached`. The
    option `indices` is what `choose_keys` gave, if the module has an indexer."""
    plan = options.get("indices")
    if plan is None:
        plan = _plan(layout, pages.page_size, mask, _window(mask, options.get("sliding_window")), query.dtype)
    q_TND = query[0].transpose(0, 1)
    out_TNV = q_TND.new_empty(*q_TND.shape[:2], value.shape[-1])
    for group in plan:
        rows_TD, _ = pages.read(layer, group.slots)
        keys, values = _keys_and_values(module, rows_TD.view(group.num_sequences, -1, rows_TD.shape[-1]), cached)
        q_SNQD = q_TND[group.rows].unflatten(0, (group.num_sequences, -1)).transpose(1, 2)
        found = _attention(q_SNQD, keys, values, group.mask_S1QL, options)
        out_TNV[group.rows] = found.transpose(1, 2).flatten(0, 1)
    return out_TNV[None]


def choose_keys(index: Indexer, mask: Mask | None, layout: StepLayout, pages: KvPages, layer: int) -> Sequence[_SequenceGroup]:
    """The plan of attention over the keys that `index` chooses. Its own keys are the end of what the pages of `layer` hold of a token."""
    plan = _plan(layout, pages.page_size, mask, None, pages.parts(layer)[0].dtype)
    return [_narrowed(group, [(piece, _choose(index, piece, layout, pages, layer)) for piece in _pieces(group)]) for group in plan]


def _choose(index: Indexer, piece: _SequenceGroup, layout: StepLayout, pages: KvPages, layer: int) -> Tensor:
    """Positions in the contexts of some rows, int64 [S, Q, top-k]."""

    def keep(keys_SQW: Tensor) -> Tensor:
        of_slots = pages.parts(layer)[1][:, 0, -keys_SQW.shape[-1] :]
        of_slots.index_copy_(0, layout.slots_T[piece.rows], keys_SQW.flatten(0, 1))
        context_SLW: Tensor = of_slots[piece.slots].unflatten(0, (piece.num_sequences, -1))
        return context_SLW

    def take(rows_1T: Tensor) -> Tensor:
        rows_SQ: Tensor = rows_1T[0, piece.rows].unflatten(0, (piece.num_sequences, -1))
        return rows_SQ

    return index(take, piece.mask_S1QL[:, 0], IndexedKeys(keep)).long()


def _pieces(group: _SequenceGroup) -> Iterator[_SequenceGroup]:
    """Parts of a group whose scores are in memory at once: sequences with one row, or rows of one sequence with their contexts."""
    num_sequences, _, num_rows, length = group.mask_S1QL.shape
    step = max(1, MAX_INDEX_SCORES // length)
    if num_sequences * num_rows <= step:
        yield group
    elif isinstance(group.rows, slice):
        first = group.rows.start
        for start in range(0, num_rows, step):
            stop = min(start + step, num_rows)
            end = length - num_rows + stop
            yield _SequenceGroup(slice(first + start, first + stop), 1, group.slots[:end], group.mask_S1QL[:, :, start:stop, :end])
    else:
        pieces = (tensor.split(step) for tensor in (group.rows, group.slots.view(-1, length), group.mask_S1QL))
        for rows, slots_SL, mask_S1QL in zip(*pieces, strict=True):
            yield _SequenceGroup(rows, len(rows), slots_SL.flatten(), mask_S1QL)


def _narrowed(group: _SequenceGroup, chosen: Sequence[tuple[_SequenceGroup, Tensor]]) -> _SequenceGroup:
    """The group with the chosen keys alone. One row reads only these; the rows of a chunk choose different ones, and mask the others."""
    length, num_chosen = group.mask_S1QL.shape[-1], chosen[-1][1].shape[-1]
    if num_chosen == length:
        return group
    if group.mask_S1QL.shape[2] == 1:
        positions_SQK = torch.cat([positions for _, positions in chosen])
        slots_SK = group.slots.view(-1, length).gather(1, positions_SQK[:, 0])
        return replace(group, slots=slots_SK.flatten(), mask_S1QL=group.mask_S1QL.gather(-1, positions_SQK[:, None]))
    hidden_S1QL, start = torch.full_like(group.mask_S1QL, float("-inf")), 0
    for piece, positions_SQK in chosen:
        place = hidden_S1QL[:, :, start : (start := start + positions_SQK.shape[1])]
        place.scatter_(-1, positions_SQK[:, None], piece.mask_S1QL.gather(-1, positions_SQK[:, None]))
    return replace(group, mask_S1QL=hidden_S1QL)


def _keys_and_values(module: nn.Module, rows_SLD: Tensor, cached: Shapes) -> tuple[Tensor, Tensor]:
    """Keys and values [S, K, L, D] of cached rows."""
    (first, second), widths = cached, [prod(shape) for shape in cached]
    halves = rows_SLD[..., : sum(widths)].split(widths, dim=-1)
    one, other = (half.unflatten(-1, shape).transpose(1, 2) for half, shape in zip(halves, (first, second), strict=True))
    expand = getattr(module, "expand_kv", None)  # of latent attention
    if expand is None:
        return one, other
    found: tuple[Tensor, Tensor] = expand(one, other)
    return found


def _attention(q_SNQD: Tensor, k_SKLD: Tensor, v_SKLV: Tensor, mask_S1QL: Tensor, options: Mapping[str, Any]) -> Tensor:
    """[S, N, Q, V]. Query heads that share a key head become rows of one product."""
    scale, cap, sinks_N = options.get("scaling"), options.get("softcap"), options.get("s_aux")
    num_heads, num_kv_heads = q_SNQD.shape[1], k_SKLD.shape[1]
    if cap is None and sinks_N is None:
        return F.scaled_dot_product_attention(q_SNQD, k_SKLD, v_SKLV, mask_S1QL, scale=scale, enable_gqa=num_heads != num_kv_heads)
    block = max(1, MAX_SCORES // (q_SNQD.shape[0] * num_heads * k_SKLD.shape[2]))  # rows whose scores are in memory at once
    if q_SNQD.shape[2] > block:
        pieces = zip(q_SNQD.split(block, dim=2), mask_S1QL.expand(-1, -1, q_SNQD.shape[2], -1).split(block, dim=2), strict=True)
        return torch.cat([_attention(q, k_SKLD, v_SKLV, mask, options) for q, mask in pieces], dim=2)
    repeats = num_heads // num_kv_heads
    q_SKRQD = q_SNQD.unflatten(1, (num_kv_heads, repeats))
    scores = torch.matmul(q_SKRQD, k_SKLD[:, :, None].transpose(-1, -2)) * (q_SNQD.shape[-1] ** -0.5 if scale is None else scale)
    if cap is not None:
        scores = torch.tanh(scores / cap) * cap
    scores = scores + mask_S1QL[:, :, None]
    if sinks_N is not None:
        sinks = sinks_N.view(1, num_kv_heads, repeats, 1, 1).expand(*scores.shape[:-1], 1).to(scores.dtype)
        scores = torch.cat((scores, sinks), dim=-1)
    weights = scores.softmax(-1, dtype=torch.float32).to(v_SKLV.dtype)[..., : k_SKLD.shape[2]]
    return torch.matmul(weights, v_SKLV[:, :, None]).flatten(1, 2)


def _window(mask: Mask | None, window: int | None) -> int | None:
    """The window of a module, if the mask has it, too: the mask is what the library computes with."""
    if mask is None or window is None or mask.function(0, 0, torch.tensor(window), torch.tensor(0)):
        return None
    return window


def _plan(layout: StepLayout, page_size: int, mask: Mask | None, window: int | None, dtype: torch.dtype) -> Sequence[_SequenceGroup]:
    """Computed once for the layers with the same mask."""
    key = mask, window
    plan: list[_SequenceGroup] | None = layout.derived.get(key)
    if plan is None:
        plan = layout.derived[key] = [_together(layout, group, page_size, mask, window, dtype) for group in _groups(layout, window)]
    return plan


def _groups(layout: StepLayout, window: int | None) -> list[list[int]]:
    """Sequences with one row by the power of two of their visible length, so that padding at most doubles the work; others alone."""
    found: dict[int, list[int]] = {}
    for sequence, (query, context) in enumerate(zip(layout.query_lengths, layout.kv_lengths, strict=True)):
        seen = context if window is None else min(context, window)
        found.setdefault(max(SHORT_CONTEXT, seen - 1).bit_length() if query == 1 else -sequence, []).append(sequence)
    return list(found.values())


def _together(
    layout: StepLayout, members: list[int], page_size: int, mask: Mask | None, window: int | None, dtype: torch.dtype
) -> _SequenceGroup:
    device, num_rows = layout.positions_T.device, layout.query_lengths[members[0]]
    first = [max(0, layout.kv_lengths[each] - num_rows + 1 - window) if window is not None else 0 for each in members]
    length = max(layout.kv_lengths[each] - start for each, start in zip(members, first, strict=True))
    sequences, first_S = torch.tensor(members, device=device), torch.tensor(first, device=device)
    slots = slots_of(layout, sequences, first_S, length, page_size)
    keys_S1L = (first_S[:, None] + torch.arange(length, device=device))[:, None]
    ends_S11 = layout.kv_length_S[sequences, None, None]
    queries_SQ1 = ends_S11 - num_rows + torch.arange(num_rows, device=device)[:, None]
    seen = (keys_S1L <= queries_SQ1) if mask is None else mask.function(0, 0, queries_SQ1, keys_S1L)
    seen = seen & (keys_S1L < ends_S11)
    additive = torch.zeros(seen.shape, dtype=dtype, device=device).masked_fill_(~seen, float("-inf"))[:, None]
    start = int(layout.query_start_S1[members[0]])
    rows = slice(start, start + num_rows) if len(members) == 1 else layout.query_start_S1[sequences]
    return _SequenceGroup(rows, len(members), slots, additive)
