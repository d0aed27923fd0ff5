"""Gated delta net: layers that keep a state of fixed size per sequence in place of keys and values (Gated Delta Networks, section 3).

A head's state S [key width, value width] changes with each token: S = d S + k (b (v - d k S)), with a decay d and a strength b between 0
and 1. Its output is q S. Queries, keys and values come from a short convolution over the last tokens, whose inputs belong to the state.

A sequence with one row is computed by that formula. Several rows are computed in blocks of BLOCK_ROWS: within a block the rule is a
triangular system, so products take the place of the loop. A step is computed sequence by sequence, so no bit depends on other sequences.
Strict numerics cut prompts at fixed positions (flowrt/engine/scheduler.py), which fixes the blocks as well.

Legend: as in README.md. Here V = value heads, D = key width, E = value width, C = width of the convolution, B = rows of a block.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from torch import Tensor
from torch.nn import functional as F

from flowrt.operators.attention_block import BlockWeights, ReadPart, TokenMixer
from flowrt.operators.kv_pages import KvPages
from flowrt.operators.model_config import DeltaConfig
from flowrt.operators.products import Product
from flowrt.operators.quantized_products import lay_out_part
from flowrt.operators.state_slots import StateSlots
from flowrt.operators.step_layout import StepLayout
from flowrt.operators.weights import torch_dtype

BLOCK_ROWS = 64
_EPSILON = 1e-6  # of the lengths of queries and keys


@dataclass(frozen=True, kw_only=True)
class _DeltaWeights(BlockWeights):
    project: Product  # [C + V * E + 2 V, H]: queries, keys, values; gates of the output; strengths; decays
    conv_KC: Tensor  # the factor of each of the last tokens, the oldest first
    rate_V: Tensor  # of the decay, negative
    bias_V: Tensor  # of the decay
    norm_E: Tensor


class GatedDeltaNet(TokenMixer[_DeltaWeights]):
    """Layers whose state lies in slots."""

    name = "delta"

    @cached_property
    def _delta(self) -> DeltaConfig:
        if self.config.delta is None:
            raise ValueError(f"a {self.config.family} model without a gated delta net was given to GatedDeltaNet")
        return self.config.delta

    @cached_property
    def _wide(self) -> torch.dtype:
        return torch.promote_types(torch_dtype(self.config), torch.float32)

    def _mix(self, layer: int, weights: _DeltaWeights, x_TH: Tensor, layout: StepLayout, pages: KvPages) -> Tensor:
        if pages.states is None or layout.states_2S is None:
            raise ValueError(f"layer {layer} has a recurrent state, and the step has no slots for it")
        delta = self._delta
        projected = self._blocks.run("delta in", partial(self._project, weights), x_TH)
        qkv_TC, gate_TC, strength_TV, decay_TV = projected.split(
            (delta.conv_width, delta.values_width, delta.num_value_heads, delta.num_value_heads), dim=1
        )
        out_TVE = x_TH.new_empty(len(x_TH), delta.num_value_heads, delta.value_width, dtype=self._wide)
        for rows, source, target in _steps(layout):
            before, after = pages.states.read(layer, source), pages.states.read(layer, target)
            found = (self._blocks.settled(each[rows]) for each in (qkv_TC, strength_TV, decay_TV))
            out_TVE[rows] = self._compute(weights, before, after, *found)
        mixed_TC = self._blocks.run("delta norm", partial(self._normed, weights), out_TVE.to(x_TH.dtype).flatten(1), gate_TC)
        return mixed_TC

    def _project(self, weights: _DeltaWeights, x_TH: Tensor) -> Tensor:
        return weights.project(self._norm(x_TH, weights.input_norm_H))

    def _compute(
        self,
        weights: _DeltaWeights,
        before: tuple[Tensor, ...],
        after: tuple[Tensor, ...],
        qkv_TC: Tensor,
        strength_TV: Tensor,
        decay_TV: Tensor,
    ) -> Tensor:
        """The heads' outputs [T, V, E] for the next rows of a sequence. Reads its state from `before` and writes it to `after`."""
        delta, (inputs, state_VDE) = self._delta, before
        seen_TC = torch.cat((inputs, qkv_TC))
        num_rows = len(qkv_TC)
        wide_TC = seen_TC.to(self._wide)
        mixed_TC = wide_TC[:num_rows] * weights.conv_KC[0]
        for token in range(1, delta.conv_tokens):
            mixed_TC.addcmul_(wide_TC[token : token + num_rows], weights.conv_KC[token])
        sizes = delta.keys_width, delta.keys_width, delta.values_width
        q_TC, k_TC, v_TC = F.silu(mixed_TC).split(sizes, dim=1)
        q_VTD, k_VTD = (_unit(each.unflatten(1, (-1, delta.key_width))).transpose(0, 1) for each in (q_TC, k_TC))
        shared = delta.num_value_heads // delta.num_key_heads
        q_VTD, k_VTD = (each.repeat_interleave(shared, dim=0) for each in (q_VTD * delta.key_width**-0.5, k_VTD))
        v_VTE = v_TC.unflatten(1, (-1, delta.value_width)).transpose(0, 1)
        strength_VT = strength_TV.sigmoid().to(self._wide).t()
        decay_VT = (weights.rate_V * F.softplus(decay_TV.to(self._wide) + weights.bias_V)).t()  # its logarithm
        after[0].copy_(seen_TC[num_rows:])
        if num_rows == 1:
            return _next(q_VTD, k_VTD, v_VTE, strength_VT, decay_VT, state_VDE, after[1]).transpose(0, 1)
        out = []
        for start in range(0, num_rows, BLOCK_ROWS):
            block = slice(start, start + BLOCK_ROWS)
            tokens = (each[:, block] for each in (q_VTD, k_VTD, v_VTE, strength_VT, decay_VT))
            found, state_VDE = _block(state_VDE, *tokens)
            out.append(found)
        after[1].copy_(state_VDE)
        return torch.cat(out, dim=1).transpose(0, 1)

    def _normed(self, weights: _DeltaWeights, out_TC: Tensor, gate_TC: Tensor) -> Tensor:
        """The outputs of each head, normed, times the silu of their gates."""
        normed = self._rms_norm(out_TC.unflatten(1, (-1, self._delta.value_width)), weights.norm_E, self.config.norm_epsilon)
        return (normed.flatten(1).to(self._wide) * F.silu(gate_TC.to(self._wide))).to(out_TC.dtype)

    def _read_layer(self, read: ReadPart) -> _DeltaWeights:
        delta, hidden = self._delta, self.config.hidden_size
        num_outputs = delta.conv_width + delta.values_width + 2 * delta.num_value_heads
        project = read("delta_in", (num_outputs, hidden))
        if delta.by_key_head:
            project = project[by_kind(delta)]
        return _DeltaWeights(
            input_norm_H=read("attention_norm", (hidden,), dtype=self._norm.dtype),
            output=lay_out_part("delta_out", read("delta_out", (hidden, delta.values_width)), self.config),
            output_bias=None,
            mlp_norm_H=read("mlp_norm", (hidden,), dtype=self._norm.dtype),
            project=lay_out_part("delta_in", project, self.config),
            conv_KC=read("delta_conv", (delta.conv_width, 1, delta.conv_tokens)).squeeze(1).t().contiguous().to(self._wide),
            rate_V=-read("delta_rate", (delta.num_value_heads,)).to(self._wide).exp(),
            bias_V=read("delta_bias", (delta.num_value_heads,)).to(self._wide),
            norm_E=read("delta_norm", (delta.value_width,)),
        )


def by_kind(delta: DeltaConfig) -> Tensor:
    """The rows of `delta_in`, stored key head by key head, in their order kind by kind."""
    shared = delta.num_value_heads // delta.num_key_heads
    found = []
    start = 0
    for widths in ((delta.key_width, delta.key_width, shared * delta.value_width, shared * delta.value_width), (shared, shared)):
        rows = torch.arange(start, start + delta.num_key_heads * sum(widths)).view(delta.num_key_heads, -1)
        found += [each.flatten() for each in rows.split(widths, dim=1)]
        start += rows.numel()
    return torch.cat(found)


def _steps(layout: StepLayout) -> Iterator[tuple[slice, int, int]]:
    """The rows of each sequence of a step, and its slots, in order: one may begin with the state that the one before it leaves."""
    key = StateSlots
    if key not in layout.derived:
        assert layout.states_2S is not None
        layout.derived[key] = layout.states_2S.tolist()
    sources, targets = layout.derived[key]
    start = 0
    for length, source, target in zip(layout.query_lengths, sources, targets, strict=True):
        yield slice(start, start + length), source, target
        start += length


def _unit(x: Tensor) -> Tensor:
    return x * (x.square().sum(dim=-1, keepdim=True) + _EPSILON).rsqrt()


def _next(
    q_V1D: Tensor, k_V1D: Tensor, v_V1E: Tensor, strength_V1: Tensor, decay_V1: Tensor, state_VDE: Tensor, after_VDE: Tensor
) -> Tensor:
    """The output of one token [V, 1, E]. Writes the state behind it to `after_VDE`. The old state is read once, for both products."""
    decay_V11 = decay_V1.exp().unsqueeze(2)
    read_V2E = torch.bmm(torch.cat((k_V1D, q_V1D), dim=1), state_VDE) * decay_V11
    change_V1E = strength_V1.unsqueeze(2) * (v_V1E - read_V2E[:, :1])
    torch.mul(state_VDE, decay_V11, out=after_VDE)
    after_VDE.baddbmm_(k_V1D.transpose(1, 2), change_V1E)
    return read_V2E[:, 1:] + (q_V1D * k_V1D).sum(dim=2, keepdim=True) * change_V1E


def _block(state_VDE: Tensor, q_VBD: Tensor, k_VBD: Tensor, v_VBE: Tensor, strength_VB: Tensor, decay_VB: Tensor) -> tuple[Tensor, Tensor]:
    """The outputs of up to BLOCK_ROWS tokens [V, B, E], and the state behind them (Gated Delta Networks, section 3.3).

    What the tokens of a block change depends on the changes before them: (1 + tril(b d k k^T, -1)) changes = b (v - d k S), whose
    solution takes the place of the loop.
    """
    total_VB = decay_VB.cumsum(dim=1)
    between_VBB = (total_VB.unsqueeze(2) - total_VB.unsqueeze(1)).tril().exp().tril()  # decay from one token to a later one
    from_start_VB1, strength_VB1 = total_VB.exp().unsqueeze(2), strength_VB.unsqueeze(2)
    system_VBB = strength_VB1 * (k_VBD @ k_VBD.transpose(1, 2)) * between_VBB
    wanted_VBE = strength_VB1 * (v_VBE - from_start_VB1 * (k_VBD @ state_VDE))
    changes_VBE = torch.linalg.solve_triangular(system_VBB, wanted_VBE, upper=False, unitriangular=True)
    out_VBE = from_start_VB1 * (q_VBD @ state_VDE) + ((q_VBD @ k_VBD.transpose(1, 2)) * between_VBB) @ changes_VBE
    to_end_VB1 = (total_VB[:, -1:] - total_VB).exp().unsqueeze(2)
    state_VDE = state_VDE * from_start_VB1[:, -1:] + (k_VBD * to_end_VB1).transpose(1, 2) @ changes_VBE
    return out_VBE, state_VDE
