"""Attention over paged keys and values, and the block around it: norm, projections, residual, norm.

Here: AttentionBlock and how the sequences of a step are grouped. Not here: which pages a sequence owns (the engine), the MLP.
Called by the attention workers, once per layer and step.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from operators.kv_pages import KvPages
from operators.model_config import ModelConfig
from operators.normalization import rms_norm
from operators.rotary import RotaryTable, rotate
from operators.step_layout import StepLayout
from operators.weights import Checkpoint, torch_dtype

SHORT_CONTEXT = 128  # contexts up to this length share one group: padding them costs less than another call


@dataclass(frozen=True)
class _DecodeGroup:
    """Sequences with one row each, computed together, contexts padded to the longest."""

    rows_S: Tensor | None  # None: all rows of the step, in order
    slots: Tensor  # [S * L], sequence by sequence
    length: int
    mask_S11L: Tensor | None  # additive; None: all contexts are equally long


@dataclass(frozen=True)
class _Chunk:
    """One sequence with several rows."""

    start: int
    stop: int
    slots_L: Tensor | None  # None: the context is exactly these rows
    mask_TL: Tensor | None


@dataclass(frozen=True)
class _StepPlan:
    """What every layer of a step needs and none should work out again."""

    cos_T1D: Tensor
    sin_T1D: Tensor
    groups: tuple[_DecodeGroup, ...]
    chunks: tuple[_Chunk, ...]


@dataclass(frozen=True)
class _LayerWeights:
    input_norm_H: Tensor
    qkv: Tensor  # [(N + 2K) * D, H]
    qkv_bias: Tensor | None
    qk_norm: Tensor | None  # [N + K, D]
    output: Tensor  # [H, N * D]
    output_bias: Tensor | None
    mlp_norm_H: Tensor


class AttentionBlock:
    """The attention halves of some layers, with their weights."""

    def __init__(self, config: ModelConfig, checkpoint: Checkpoint, layers: Iterable[int], device: torch.device | str = "cpu") -> None:
        self.config = config
        self._rotary = RotaryTable(config.head_dim, config.rope_theta, torch_dtype(config), device)
        self._weights = {layer: _read_layer(config, checkpoint, layer, device) for layer in layers}

    @property
    def layers(self) -> tuple[int, ...]:
        return tuple(self._weights)

    def forward(self, layer: int, x_TH: Tensor, layout: StepLayout, pages: KvPages) -> tuple[Tensor, Tensor]:
        """(residual_TH, normed_TH): x plus attention, and its norm, which is what gate and MLP take.

        Writes the keys and values of the step's rows into `pages`; running a step again writes the same ones.
        """
        config, weights = self.config, self._weights[layer]
        plan = self._plan(layout, pages.page_tokens)
        num_heads, num_kv_heads, head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        normed = rms_norm(x_TH, weights.input_norm_H, config.norm_epsilon)
        qkv = F.linear(normed, weights.qkv, weights.qkv_bias).view(-1, num_heads + 2 * num_kv_heads, head_dim)
        qk, v_TKD = qkv[:, : num_heads + num_kv_heads], qkv[:, num_heads + num_kv_heads :]
        if weights.qk_norm is not None:
            qk = rms_norm(qk, weights.qk_norm, config.norm_epsilon)
        qk = rotate(qk, plan.cos_T1D, plan.sin_T1D)
        q_TND, k_TKD = qk[:, :num_heads], qk[:, num_heads:]
        pages.write(layer, layout.slots_T, k_TKD, v_TKD)
        mixed = _attend(layer, q_TND, k_TKD, v_TKD, plan, pages)
        residual = x_TH + F.linear(mixed, weights.output, weights.output_bias)
        return residual, rms_norm(residual, weights.mlp_norm_H, config.norm_epsilon)

    def _plan(self, layout: StepLayout, page_tokens: int) -> _StepPlan:
        plan: _StepPlan | None = layout.derived.get(self)
        if plan is None:
            cos, sin = self._rotary.rows(layout.positions_T, max(layout.kv_lengths, default=0))
            plan = _StepPlan(cos, sin, _decode_groups(layout, page_tokens, cos.dtype), _chunks(layout, page_tokens, cos.dtype))
            layout.derived[self] = plan
        return plan


def _attend(layer: int, q_TND: Tensor, k_TKD: Tensor, v_TKD: Tensor, plan: _StepPlan, pages: KvPages) -> Tensor:
    """Attention of every row over its sequence's context: [T, N * D].

    Query heads that share a key head are never given copies of it: for decode rows they become the rows of one small product,
    for chunks the keys are expanded with stride 0.
    """
    num_rows, num_heads, head_dim = q_TND.shape
    num_kv_heads = k_TKD.shape[1]
    q_TKND = q_TND.reshape(num_rows, num_kv_heads, num_heads // num_kv_heads, head_dim)
    out = q_TND.new_empty(num_rows, num_heads * head_dim)
    for group in plan.groups:
        keys, values = pages.read(layer, group.slots)
        shape = (-1, group.length, num_kv_heads, head_dim)
        q = q_TKND if group.rows_S is None else q_TKND.index_select(0, group.rows_S)
        mixed = F.scaled_dot_product_attention(
            q, keys.view(shape).transpose(1, 2), values.view(shape).transpose(1, 2), attn_mask=group.mask_S11L
        ).reshape(-1, num_heads * head_dim)
        if group.rows_S is None:
            return mixed
        out.index_copy_(0, group.rows_S, mixed)
    for chunk in plan.chunks:
        rows = slice(chunk.start, chunk.stop)
        keys, values = (k_TKD[rows], v_TKD[rows]) if chunk.slots_L is None else pages.read(layer, chunk.slots_L)
        expanded = (-1, q_TKND.shape[2], -1, -1)
        mixed = F.scaled_dot_product_attention(
            q_TKND[rows].permute(1, 2, 0, 3),
            keys.transpose(0, 1).unsqueeze(1).expand(expanded),
            values.transpose(0, 1).unsqueeze(1).expand(expanded),
            attn_mask=chunk.mask_TL,
            is_causal=chunk.mask_TL is None,
        )
        out[rows].view(-1, num_kv_heads, q_TKND.shape[2], head_dim).copy_(mixed.permute(2, 0, 1, 3))
    return out


def _slots(layout: StepLayout, sequences_S: Tensor, length: int, page_tokens: int) -> Tensor:
    """Slots [S * length] of the first `length` tokens of some sequences. A shorter context repeats its own last slot: what is
    masked away must not be another sequence's, whose values might be NaN."""
    tokens_SL = torch.arange(length, device=sequences_S.device).expand(sequences_S.numel(), length)
    tokens_SL = tokens_SL.minimum(layout.kv_length_S[sequences_S, None] - 1)
    pages_SL = layout.page_table_SG[sequences_S].gather(1, tokens_SL // page_tokens)
    return (pages_SL * page_tokens + tokens_SL % page_tokens).flatten()


def _decode_groups(layout: StepLayout, page_tokens: int, dtype: torch.dtype) -> tuple[_DecodeGroup, ...]:
    """Sequences with one row, grouped by power of two of the context length, so that padding at most doubles the work."""
    by_size: dict[int, list[int]] = {}
    for sequence, (query, context) in enumerate(zip(layout.query_lengths, layout.kv_lengths, strict=True)):
        if query == 1:
            by_size.setdefault(max(SHORT_CONTEXT, context - 1).bit_length(), []).append(sequence)
    device = layout.positions_T.device
    groups = []
    for members in by_size.values():
        sequences = torch.tensor(members, device=device)
        lengths = [layout.kv_lengths[sequence] for sequence in members]
        length, mask = max(lengths), None
        if min(lengths) < length:
            hidden = torch.arange(length, device=device) >= layout.kv_length_S[sequences, None]
            mask = torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, float("-inf"))[:, None, None]
        rows = None if len(members) == layout.num_rows else layout.query_start_S1[sequences]
        groups.append(_DecodeGroup(rows, _slots(layout, sequences, length, page_tokens), length, mask))
    return tuple(groups)


def _chunks(layout: StepLayout, page_tokens: int, dtype: torch.dtype) -> tuple[_Chunk, ...]:
    chunks, start = [], 0
    device = layout.positions_T.device
    for sequence, (query, context) in enumerate(zip(layout.query_lengths, layout.kv_lengths, strict=True)):
        if query > 1:
            slots = mask = None
            if context > query:
                slots = _slots(layout, torch.tensor([sequence], device=device), context, page_tokens)
                mask = torch.full((query, context), float("-inf"), dtype=dtype, device=device).triu_(context - query + 1)
            chunks.append(_Chunk(start, start + query, slots, mask))
        start += query
    return tuple(chunks)


def _read_layer(config: ModelConfig, checkpoint: Checkpoint, layer: int, device: torch.device | str) -> _LayerWeights:
    def read(part: str, *shape: int) -> Tensor:
        return checkpoint.read_part(config, part, shape, layer=layer, device=device)

    hidden, head_dim, num_heads, num_kv_heads = config.hidden_size, config.head_dim, config.num_heads, config.num_kv_heads
    qk_norm = None
    if config.qk_norm:
        query_norm, key_norm = read("query_norm", head_dim), read("key_norm", head_dim)
        qk_norm = torch.cat((query_norm.expand(num_heads, head_dim), key_norm.expand(num_kv_heads, head_dim)))
    qkv_rows = (num_heads + 2 * num_kv_heads) * head_dim
    return _LayerWeights(
        input_norm_H=read("attention_norm", hidden),
        qkv=read("qkv", qkv_rows, hidden),
        qkv_bias=read("qkv_bias", qkv_rows) if config.attention_bias else None,
        qk_norm=qk_norm,
        output=read("attention_output", hidden, num_heads * head_dim),
        output_bias=read("attention_output_bias", hidden) if config.attention_bias else None,
        mlp_norm_H=read("mlp_norm", hidden),
    )
