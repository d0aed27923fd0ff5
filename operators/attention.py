"""Grouped-query attention over paged keys and values, and the block around it: norm, projections, residual, norm.

`attention_for` chooses the block that a model needs. attention_plan.py groups the sequences of a step; latent_attention.py holds the
block for latent attention.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from flowrt.operators.attention_plan import StepPlan, plan_step
from flowrt.operators.kernels.choice import has_cpu_kernels, kernels_for
from flowrt.operators.kernels.cpu import rows
from flowrt.operators.kv_pages import KvPages
from flowrt.operators.latent_attention import LatentAttentionBlock
from flowrt.operators.model_config import ModelConfig
from flowrt.operators.normalization import RowNorm
from flowrt.operators.products import Product, lay_out
from flowrt.operators.rotary import RotaryTable, rotate
from flowrt.operators.row_blocks import WHOLE, RowBlocks
from flowrt.operators.step_layout import StepLayout
from flowrt.operators.weights import Checkpoint, torch_dtype


@dataclass(frozen=True)
class _GroupedWeights:
    input_norm_H: Tensor
    qkv: Product  # [(N + 2K) * D, H]
    qkv_bias: Tensor | None
    qk_norm: Tensor | None  # [N + K, D]
    output: Product  # [H, N * D]
    output_bias: Tensor | None
    mlp_norm_H: Tensor


class Attention(Protocol):
    """The interface of every attention block, independent of the contents of its pages."""

    @property
    def layers(self) -> tuple[int, ...]: ...

    def forward(self, layer: int, x_TH: Tensor, layout: StepLayout, pages: KvPages) -> tuple[Tensor, Tensor]:
        """(residual_TH, normed_TH): x plus attention, and its norm, which is the input of gate and MLP.

        Writes the keys and values (or latents) of the step's rows into `pages`. Running a step again writes the same bits.
        """
        ...


def attention_for(
    config: ModelConfig,
    checkpoint: Checkpoint,
    layers: Iterable[int],
    device: torch.device | str = "cpu",
    blocks: RowBlocks = WHOLE,
) -> Attention:
    """The attention block of the model, for some layers."""
    block = AttentionBlock if config.latent is None else LatentAttentionBlock
    return block(config, checkpoint, layers, device, blocks)


class AttentionBlock:
    """The attention halves of some layers, with their weights."""

    def __init__(
        self,
        config: ModelConfig,
        checkpoint: Checkpoint,
        layers: Iterable[int],
        device: torch.device | str = "cpu",
        blocks: RowBlocks = WHOLE,
    ) -> None:
        self.config, self._blocks = config, blocks
        self._rotary = RotaryTable(config.head_dim, config.rotary, torch_dtype(config), device)
        self._norm = RowNorm(config, device)
        self._rms_norm = kernels_for(torch_dtype(config), device).rms_norm
        self._is_paged = not blocks.strict and config.head_dim % 2 == 0 and has_cpu_kernels(torch_dtype(config), device)
        self._weights = {layer: _read_layer(config, checkpoint, layer, device) for layer in layers}

    @property
    def layers(self) -> tuple[int, ...]:
        return tuple(self._weights)

    def forward(self, layer: int, x_TH: Tensor, layout: StepLayout, pages: KvPages) -> tuple[Tensor, Tensor]:
        """As Attention.forward; pages take keys and values."""
        weights, plan = self._weights[layer], self._plan(layout, pages)
        attend = self._attend_in_pages if self._is_paged else self._attend_in_groups
        return self._blocks.run("attention out", partial(self._finish, weights), x_TH, attend(layer, x_TH, layout, plan, pages))

    def _attend_in_pages(self, layer: int, x_TH: Tensor, layout: StepLayout, plan: StepPlan, pages: KvPages) -> Tensor:
        """Attention [T, N * D]. Writes keys and values to their pages, and reads them there."""
        config, weights = self.config, self._weights[layer]
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

    def _attend_in_groups(self, layer: int, x_TH: Tensor, layout: StepLayout, plan: StepPlan, pages: KvPages) -> Tensor:
        """Attention [T, N * D] for every device and dtype, in blocks of rows."""
        project = partial(self._project_and_turn, self._weights[layer])
        q_TND, k_TKD, v_TKD = self._blocks.run("attention in", project, x_TH, plan.cos_T1D, plan.sin_T1D)
        pages.write(layer, layout.slots_T, k_TKD, v_TKD)
        out_TC = q_TND.new_empty(q_TND.shape[0], self.config.num_heads * self.config.head_dim)
        _attend_groups(layer, q_TND, k_TKD.shape[1], plan, pages, out_TC)
        _attend_chunks(layer, q_TND, k_TKD, v_TKD, plan, pages, self._blocks, out_TC)
        return out_TC

    def _project(self, weights: _GroupedWeights, x_TH: Tensor) -> Tensor:
        """Queries, keys and values of each row, head by head: [T, (N + 2K) * D]."""
        qkv_TC = weights.qkv(self._norm(x_TH, weights.input_norm_H), weights.qkv_bias)
        return qkv_TC if self.config.clip_qkv is None else qkv_TC.clamp_(-self.config.clip_qkv, self.config.clip_qkv)

    def _project_and_turn(self, weights: _GroupedWeights, x_TH: Tensor, cos_T1D: Tensor, sin_T1D: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(q_TND, k_TKD, v_TKD); queries and keys are rotated to their positions."""
        config = self.config
        turning = config.num_heads + config.num_kv_heads
        heads = self._project(weights, x_TH).view(-1, turning + config.num_kv_heads, config.head_dim)
        qk, v_TKD = heads.split((turning, config.num_kv_heads), dim=1)
        if weights.qk_norm is not None:
            qk = self._rms_norm(qk, weights.qk_norm, config.norm_epsilon)
        q_TND, k_TKD = rotate(qk, cos_T1D, sin_T1D).split((config.num_heads, config.num_kv_heads), dim=1)
        return q_TND, k_TKD, v_TKD

    def _finish(self, weights: _GroupedWeights, x_TH: Tensor, mixed: Tensor) -> tuple[Tensor, Tensor]:
        return self._norm.of_sum(x_TH, weights.output(mixed, weights.output_bias), weights.mlp_norm_H)

    def _plan(self, layout: StepLayout, pages: KvPages) -> StepPlan:
        strict = self._blocks.strict
        return plan_step(layout, pages, self._rotary, self.config.sliding_window, each_alone=strict, is_paged=self._is_paged)


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


def _read_layer(config: ModelConfig, checkpoint: Checkpoint, layer: int, device: torch.device | str) -> _GroupedWeights:
    def read(part: str, *shape: int) -> Tensor:
        return checkpoint.read_part(config, part, shape, layer=layer, device=device)

    hidden, head_dim, num_heads, num_kv_heads = config.hidden_size, config.head_dim, config.num_heads, config.num_kv_heads
    qk_norm = None
    if config.qk_norm:
        query_norm, key_norm = read("query_norm", head_dim), read("key_norm", head_dim)
        qk_norm = torch.cat((query_norm.expand(num_heads, head_dim), key_norm.expand(num_kv_heads, head_dim)))
    qkv_rows = (num_heads + 2 * num_kv_heads) * head_dim
    return _GroupedWeights(
        input_norm_H=read("attention_norm", hidden),
        qkv=lay_out(read("qkv", qkv_rows, hidden)),
        qkv_bias=read("qkv_bias", qkv_rows) if config.attention_bias else None,
        qk_norm=qk_norm,
        output=lay_out(read("attention_output", hidden, num_heads * head_dim)),
        output_bias=read("attention_output_bias", hidden) if config.attention_bias else None,
        mlp_norm_H=read("mlp_norm", hidden),
    )
