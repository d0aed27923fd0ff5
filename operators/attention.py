"""Grouped-query attention over paged keys and values; `attention_for` chooses the kind of attention of a model.

attention_block.py holds the block around it, attention_plan.py groups the sequences of a step, latent_attention.py holds latent attention.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from flowrt.operators.attention_block import AttentionBlock, BlockWeights, ReadPart, TokenMixer
from flowrt.operators.attention_plan import StepPlan
from flowrt.operators.gated_delta import GatedDeltaNet
from flowrt.operators.kernels.cpu import rows
from flowrt.operators.kv_pages import KvPages
from flowrt.operators.latent_attention import LatentAttention
from flowrt.operators.model_config import ModelConfig
from flowrt.operators.products import Product
from flowrt.operators.quantized_products import lay_out_part
from flowrt.operators.rotary import rotate, spread_rotated
from flowrt.operators.row_blocks import WHOLE, RowBlocks
from flowrt.operators.step_layout import StepLayout
from flowrt.operators.weights import Checkpoint


@dataclass(frozen=True, kw_only=True)
class _GroupedWeights(BlockWeights):
    qkv: Product  # [(N + 2K) * D, H]
    qkv_bias: Tensor | None
    qk_norm: Tensor | None  # [N + K, D]
    gate: Product | None  # [N * D, H]


def attention_for(
    config: ModelConfig,
    checkpoint: Checkpoint,
    layers: Iterable[int],
    device: torch.device | str = "cpu",
    blocks: RowBlocks = WHOLE,
) -> TokenMixer[Any] | MixedLayers:
    """What mixes the tokens of a sequence in some layers of the model: attention, or a gated delta net in its place."""
    layers = tuple(layers)
    kind = GroupedAttention if config.latent is None else LatentAttention
    recurrent = [layer for layer in layers if layer in config.recurrent_layers]
    if not recurrent:
        return kind(config, checkpoint, layers, device, blocks)
    attention = kind(config, checkpoint, [layer for layer in layers if layer not in recurrent], device, blocks)
    return MixedLayers([attention, GatedDeltaNet(config, checkpoint, recurrent, device, blocks)])


class MixedLayers:
    """Layers of several kinds."""

    def __init__(self, kinds: Sequence[TokenMixer[Any]]) -> None:
        self.kinds = tuple(kind for kind in kinds if kind.layers)
        self._by_layer = {layer: kind for kind in self.kinds for layer in kind.layers}

    def forward(self, layer: int, x_TH: Tensor, layout: StepLayout, pages: KvPages) -> tuple[Tensor, Tensor]:
        """See TokenMixer.forward."""
        return self._by_layer[layer].forward(layer, x_TH, layout, pages)


class GroupedAttention(AttentionBlock[_GroupedWeights]):
    """Attention whose pages hold keys and values by head."""

    def _attend(self, layer: int, weights: _GroupedWeights, x_TH: Tensor, layout: StepLayout, plan: StepPlan, pages: KvPages) -> Tensor:
        """Writes keys and values to their pages, and reads them there if there are kernels for that."""
        if not self._is_paged:
            return self._attend_in_groups(layer, weights, x_TH, layout, plan, pages)
        config = self.config
        qkv_TC = self._blocks.run("attention in", partial(self._project, weights), x_TH)
        rows.rope_and_store_kv(qkv_TC, config.num_heads, plan, weights.qk_norm, config.norm_epsilon, layout.slots_T, layer, pages)
        out_TC = qkv_TC.new_empty(qkv_TC.shape[0], config.num_heads * config.head_dim)
        if plan.paged is not None:
            rows.paged_attention(qkv_TC, config.num_heads, plan.paged, config.sliding_window, layer, pages, out_TC)
        if plan.chunks:
            sizes = config.num_heads, config.num_kv_heads, config.num_kv_heads
            q_TND, k_TKD, v_TKD = qkv_TC.view(-1, sum(sizes), config.head_dim).split(sizes, dim=1)
            _attend_chunks(layer, q_TND, k_TKD, v_TKD, plan, pages, self._blocks, out_TC)
        return out_TC

    def _attend_in_groups(
        self, layer: int, weights: _GroupedWeights, x_TH: Tensor, layout: StepLayout, plan: StepPlan, pages: KvPages
    ) -> Tensor:
        """The same for every device and dtype, in blocks of rows."""
        project = partial(self._project_rotated, weights)
        q_TND, k_TKD, v_TKD = self._blocks.run("attention in", project, x_TH, plan.cos_T1D, plan.sin_T1D)
        k_TKD, v_TKD = pages.write(layer, layout.slots_T, k_TKD, v_TKD)
        out_TC = q_TND.new_empty(q_TND.shape[0], self.config.num_heads * self.config.head_dim)
        _attend_groups(layer, q_TND, k_TKD.shape[1], plan, pages, out_TC)
        _attend_chunks(layer, q_TND, k_TKD, v_TKD, plan, pages, self._blocks, out_TC)
        return out_TC

    def _project(self, weights: _GroupedWeights, x_TH: Tensor) -> Tensor:
        """Queries, keys and values of each row, head by head: [T, (N + 2K) * D]."""
        qkv_TC = weights.qkv(self._norm(x_TH, weights.input_norm_H), weights.qkv_bias)
        return qkv_TC if self.config.clip_qkv is None else qkv_TC.clamp_(-self.config.clip_qkv, self.config.clip_qkv)

    def _project_rotated(self, weights: _GroupedWeights, x_TH: Tensor, cos_T1D: Tensor, sin_T1D: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(q_TND, k_TKD, v_TKD); queries and keys are rotated to their positions."""
        config = self.config
        num_rotated = config.num_heads + config.num_kv_heads
        heads = self._project(weights, x_TH).view(-1, num_rotated + config.num_kv_heads, config.head_dim)
        qk, v_TKD = heads.split((num_rotated, config.num_kv_heads), dim=1)
        if weights.qk_norm is not None:
            qk = self._rms_norm(qk, weights.qk_norm, config.norm_epsilon)
        q_TND, k_TKD = rotate(qk, cos_T1D, sin_T1D).split((config.num_heads, config.num_kv_heads), dim=1)
        return q_TND, k_TKD, v_TKD

    def _finish(self, weights: _GroupedWeights, x_TH: Tensor, mixed: Tensor) -> tuple[Tensor, Tensor]:
        if weights.gate is not None:
            mixed = mixed * weights.gate(self._norm(x_TH, weights.input_norm_H)).sigmoid()
        return super()._finish(weights, x_TH, mixed)

    def _read_layer(self, read: ReadPart) -> _GroupedWeights:
        config, gate = self.config, None
        head_dim, num_heads, num_kv_heads = config.head_dim, config.num_heads, config.num_kv_heads
        qk_norm = None
        if config.qk_norm:
            query_norm, key_norm = read("query_norm", (head_dim,)), read("key_norm", (head_dim,))
            qk_norm = torch.cat((query_norm.expand(num_heads, head_dim), key_norm.expand(num_kv_heads, head_dim)))
        qkv_rows = (num_heads + 2 * num_kv_heads) * head_dim
        qkv = read("qkv", (qkv_rows + config.attention_gate * num_heads * head_dim, config.hidden_size))
        if config.attention_gate:
            queries, others = qkv.split((2 * num_heads * head_dim, 2 * num_kv_heads * head_dim))
            queries, gates = queries.view(num_heads, 2, head_dim, -1).unbind(1)
            qkv, gate = torch.cat((queries.flatten(0, 1), others)), lay_out_part("qkv", gates.flatten(0, 1), config)
        if (width := config.rotary.width) is not None:
            rotated = qkv[: (num_heads + num_kv_heads) * head_dim].view(-1, head_dim, config.hidden_size)
            rotated.copy_(spread_rotated(rotated, width, dim=1))
            qk_norm = None if qk_norm is None else spread_rotated(qk_norm, width, dim=1)
        return _GroupedWeights(
            **self._read_shared(read, head_dim),
            qkv=lay_out_part("qkv", qkv, config),
            qkv_bias=read("qkv_bias", (qkv_rows,)) if config.attention_bias else None,
            qk_norm=qk_norm,
            gate=gate,
        )


def _attend_groups(layer: int, q_TND: Tensor, num_kv_heads: int, plan: StepPlan, pages: KvPages, out_TC: Tensor) -> None:
    """Attention of decode rows over their sequences' contexts, into their rows of out [T, N * D].

    A key head is not copied for the query heads that share it: these become the rows of one small product.
    """
    num_rows, num_heads, head_dim = q_TND.shape
    q_TKND = q_TND.reshape(num_rows, num_kv_heads, num_heads // num_kv_heads, head_dim)
    for group in plan.groups:
        keys, values = pages.read(layer, group.slots)
        shape = (-1, group.length, num_kv_heads, head_dim)
        q = q_TKND if group.rows_S is None else q_TKND.index_select(0, group.rows_S)
        mixed = F.scaled_dot_product_attention(
            q, keys.view(shape).transpose(1, 2), values.view(shape).transpose(1, 2), attn_mask=group.mask_S11L
        ).reshape(-1, num_heads * head_dim)
        if group.rows_S is None:
            out_TC.copy_(mixed)
        else:
            out_TC.index_copy_(0, group.rows_S, mixed)


def _attend_chunks(
    layer: int, q_TND: Tensor, k_TKD: Tensor, v_TKD: Tensor, plan: StepPlan, pages: KvPages, blocks: RowBlocks, out_TC: Tensor
) -> None:
    """Attention of chunks, into their rows of out [T, N * D]. Keys that heads share are expanded with stride 0."""
    num_rows, num_heads, head_dim = q_TND.shape
    num_kv_heads = k_TKD.shape[1]
    q_TKND = q_TND.reshape(num_rows, num_kv_heads, num_heads // num_kv_heads, head_dim)
    for chunk in plan.chunks:
        rows_of = slice(chunk.start, chunk.stop)
        keys, values = (k_TKD[rows_of], v_TKD[rows_of]) if chunk.slots_L is None else pages.read(layer, chunk.slots_L)
        expanded = (-1, q_TKND.shape[2], -1, -1)
        mixed = F.scaled_dot_product_attention(
            blocks.settled(q_TKND[rows_of]).permute(1, 2, 0, 3),
            blocks.settled(keys).transpose(0, 1).unsqueeze(1).expand(expanded),
            blocks.settled(values).transpose(0, 1).unsqueeze(1).expand(expanded),
            attn_mask=chunk.mask_TL,
            is_causal=chunk.mask_TL is None,
        )
        out_TC[rows_of].view(-1, num_kv_heads, q_TKND.shape[2], head_dim).copy_(mixed.permute(2, 0, 1, 3))
