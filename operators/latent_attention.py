"""Attention over compressed keys and values (DeepSeek-V2, section 2.1.2): pages hold one latent and one rotary key per token.

The key of a head is its up-projection of the latent, followed by the rotary key that all heads share. Its value is another up-projection.
Two forms give the same result. *Absorbed* moves the up-projections to the other side of the products: queries are multiplied by latents,
and pages are read as they are. *Expanded* first computes the keys and values of the context. Decode rows use the absorbed form; a chunk
uses the form that costs less.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, partial

import torch
from torch import Tensor
from torch.nn import functional as F

from flowrt.operators.attention_block import AttentionBlock, BlockWeights, ReadPart
from flowrt.operators.attention_plan import Chunk, DecodeGroup, StepPlan
from flowrt.operators.kv_pages import KvPages
from flowrt.operators.model_config import LatentConfig
from flowrt.operators.products import Product
from flowrt.operators.quantized_products import lay_out_part
from flowrt.operators.rotary import pairs_to_halves_, rotate
from flowrt.operators.step_layout import StepLayout


@dataclass(frozen=True, kw_only=True)
class _LatentWeights(BlockWeights):
    down: Product  # [query rows + rank + rope, H]: query latent (or queries, where they have none), latent, rotary key
    down_bias: Tensor | None
    query_norm: Tensor | None  # [query rank]
    query_up: Product | None  # [N * key width, query rank]
    latent_norm: Tensor  # [rank]
    up: Tensor  # [N, nope + value, rank]


class LatentAttention(AttentionBlock[_LatentWeights]):
    """Attention whose pages hold latents and rotary keys."""

    @cached_property
    def _latent(self) -> LatentConfig:
        if self.config.latent is None:
            raise ValueError(f"a {self.config.family} model without latent attention was given to LatentAttention")
        return self.config.latent

    def _attend(self, layer: int, weights: _LatentWeights, x_TH: Tensor, layout: StepLayout, plan: StepPlan, pages: KvPages) -> Tensor:
        project = partial(self._project, weights)
        q_nope, q_rope, entries_T1D = self._blocks.run("attention in", project, x_TH, plan.cos_T1D, plan.sin_T1D)
        entries_T1D, _ = pages.write(layer, layout.slots_T, entries_T1D)
        up = weights.up
        num_rows, num_heads = q_nope.shape[:2]
        out = q_nope.new_empty(num_rows, num_heads, self._latent.value_width)
        for group in plan.groups:
            entries, _ = pages.read(layer, group.slots)
            if group.rows_S is None:
                return self._decode(q_nope, q_rope, entries, group, up).flatten(1)
            q_rows = q_nope.index_select(0, group.rows_S), q_rope.index_select(0, group.rows_S)
            out.index_copy_(0, group.rows_S, self._decode(*q_rows, entries, group, up))
        for chunk in plan.chunks:
            rows = slice(chunk.start, chunk.stop)
            entries = (entries_T1D[rows] if chunk.slots_L is None else pages.read(layer, chunk.slots_L)[0]).squeeze(1)
            expanded = expanding_pays(self._latent, chunk.stop - chunk.start)
            q_rows = self._blocks.settled(q_nope[rows]), self._blocks.settled(q_rope[rows])
            out[rows] = (self._expanded if expanded else self._absorbed)(*q_rows, self._blocks.settled(entries), chunk, up)
        return out.flatten(1)

    def _project(self, weights: _LatentWeights, x_TH: Tensor, cos_T1D: Tensor, sin_T1D: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries without and with position [T, N, D], and the page entry of each token [T, 1, rank + rope]."""
        latent = self._latent
        down = weights.down(self._norm(x_TH, weights.input_norm_H), weights.down_bias)
        queries, compressed, key_rope = down.split((down.shape[1] - latent.page_width, latent.rank, latent.rope_width), dim=1)
        if weights.query_up is not None and weights.query_norm is not None:
            queries = weights.query_up(self._rms_norm(queries, weights.query_norm, latent.norm_epsilon))
        q_TND = queries.reshape(-1, self.config.num_heads, latent.key_width)
        q_nope, q_rope = q_TND.split((latent.nope_width, latent.rope_width), dim=2)
        q_rope = rotate(q_rope, cos_T1D, sin_T1D)
        entries_T1D = torch.cat(
            (
                self._rms_norm(compressed, weights.latent_norm, latent.norm_epsilon).unsqueeze(1),
                rotate(key_rope.unsqueeze(1), cos_T1D, sin_T1D),
            ),
            dim=2,
        )
        return q_nope, q_rope, entries_T1D

    def _absorb(self, q_nope: Tensor, q_rope: Tensor, up: Tensor) -> Tensor:
        """Queries to multiply with latents and rotary keys: [T, N, rank + rope]."""
        q_latent = torch.bmm(q_nope.transpose(0, 1), up[:, : self._latent.nope_width]).transpose(0, 1)
        return torch.cat((q_latent, q_rope), dim=2)

    def _values(self, mixed: Tensor, up: Tensor) -> Tensor:
        """The value up-projection of mixed latents [N, T, rank]: [T, N, value]."""
        return torch.bmm(mixed, up[:, self._latent.nope_width :].transpose(1, 2)).transpose(0, 1)

    def _decode(self, q_nope: Tensor, q_rope: Tensor, entries: Tensor, group: DecodeGroup, up: Tensor) -> Tensor:
        """One row per sequence, its heads being the rows of one small product: [S, N, value]."""
        entries_S1LD = entries.view(-1, 1, group.length, self._latent.page_width)
        # Values are the latents. Including the rotary part and dropping it afterwards costs less than the kernel for unequal widths.
        mixed = F.scaled_dot_product_attention(
            self._absorb(q_nope, q_rope, up).unsqueeze(1), entries_S1LD, entries_S1LD, attn_mask=group.mask_S11L, scale=self._latent.scale
        )
        return self._values(mixed.squeeze(1)[..., : self._latent.rank].transpose(0, 1), up)

    def _absorbed(self, q_nope: Tensor, q_rope: Tensor, entries_LD: Tensor, chunk: Chunk, up: Tensor) -> Tensor:
        """A chunk over latents: [T, N, value]."""
        q_1NTD = self._absorb(q_nope, q_rope, up).transpose(0, 1).unsqueeze(0)
        entries_1NLD = entries_LD.expand(1, q_1NTD.shape[1], -1, -1)
        mixed = F.scaled_dot_product_attention(
            q_1NTD, entries_1NLD, entries_1NLD, attn_mask=chunk.mask_TL, is_causal=chunk.mask_TL is None, scale=self._latent.scale
        )
        return self._values(mixed[0, :, :, : self._latent.rank], up)

    def _expanded(self, q_nope: Tensor, q_rope: Tensor, entries_LD: Tensor, chunk: Chunk, up: Tensor) -> Tensor:
        """A chunk over the keys and values of its context: [T, N, value]."""
        latent = self._latent
        num_heads, length = q_nope.shape[1], entries_LD.shape[0]
        latents_LR, key_rope = entries_LD.split((latent.rank, latent.rope_width), dim=1)
        expanded = F.linear(latents_LR, up.flatten(0, 1)).view(length, num_heads, -1)
        keys_LND = torch.cat((expanded[..., : latent.nope_width], key_rope.unsqueeze(1).expand(-1, num_heads, -1)), dim=2)
        width = max(latent.key_width, latent.value_width)  # kernels without a score matrix need equal widths
        tensors = (torch.cat((q_nope, q_rope), dim=2), keys_LND, expanded[..., latent.nope_width :])
        q_1NTD, keys_1NLD, values_1NLD = (_widened(each, width).transpose(0, 1).unsqueeze(0) for each in tensors)
        mixed = F.scaled_dot_product_attention(
            q_1NTD, keys_1NLD, values_1NLD, attn_mask=chunk.mask_TL, is_causal=chunk.mask_TL is None, scale=latent.scale
        )
        return mixed[0, :, :, : latent.value_width].transpose(0, 1)

    def _read_layer(self, read: ReadPart) -> _LatentWeights:
        config, latent, num_heads = self.config, self._latent, self.config.num_heads
        all_queries = num_heads * latent.key_width
        query_rows = all_queries if latent.query_rank is None else latent.query_rank
        down = read("latent_down", (query_rows + latent.page_width, config.hidden_size))
        down_bias = query_norm = query_up = None
        if config.attention_bias:
            down_bias = torch.zeros(down.shape[0], dtype=down.dtype, device=self._device)
            down_bias[query_rows:] = read("kv_down_bias", (latent.page_width,))
            if latent.query_rank is not None:
                down_bias[:query_rows] = read("query_down_bias", (query_rows,))
        if latent.query_rank is not None:
            query_norm = read("query_latent_norm", (query_rows,))
            query_up = read("query_up", (all_queries, query_rows))
        if config.rotary.interleaved:
            pairs_to_halves_(down[query_rows:], latent.rope_width)
            if down_bias is not None:
                pairs_to_halves_(down_bias[query_rows:, None], latent.rope_width)
            queries = down[:query_rows] if query_up is None else query_up
            pairs_to_halves_(queries.view(num_heads, latent.key_width, -1), latent.rope_width)
        return _LatentWeights(
            **self._read_shared(read, latent.value_width),
            down=lay_out_part("latent_down", down, self.config),
            down_bias=down_bias,
            query_norm=query_norm,
            query_up=None if query_up is None else lay_out_part("query_up", query_up, self.config),
            latent_norm=read("kv_latent_norm", (latent.rank,)),
            up=read("kv_up", (num_heads * (latent.nope_width + latent.value_width), latent.rank)).view(num_heads, -1, latent.rank),
        )


def expanding_pays(latent: LatentConfig, num_rows: int) -> bool:
    """Whether narrower products save more for a chunk of `num_rows` rows than the expansion of its context costs.

    Multiplications per context token and head: rows * 2 * page width absorbed; rows * 2 * expanded width plus the expansion itself.
    """
    width = max(latent.key_width, latent.value_width)
    return num_rows * 2 * (latent.page_width - width) > latent.rank * (latent.nope_width + latent.value_width)


def _widened(x: Tensor, width: int) -> Tensor:
    return x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1]))
