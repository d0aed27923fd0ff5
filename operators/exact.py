"""A tiny integer model in place of a checkpoint, without rounding: the arithmetic of the exact twins of operators (flowrt/kinds).

A lost, duplicated, stale or misplaced value changes a number and all later ones, and a step costs microseconds.

Legend: as in README.md. Numbers are float64 and stay below 2**53, so that sums are the same in every order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from flowrt.operators.kv_pages import KvPages
from flowrt.operators.model_config import ModelConfig
from flowrt.operators.state_slots import NO_STATE
from flowrt.operators.step_layout import StepLayout

MODULUS = 1_000_003.0  # of everything that goes from layer to layer
_LOGITS = 10_007.0
_FACTORS = np.array([1.0, 31.0, 997.0, 7.0])
_SHIFTS = np.array([3.0, 1009.0, 77.0, 500_009.0])

Numbers = NDArray[Any]


class ExactModel:
    """The arithmetic, row by row. `x` is the residual stream: at most some layers' sums of numbers below MODULUS."""

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        self._moe, self._recurrent = frozenset(config.moe_layers), frozenset(config.recurrent_layers)
        self._factors_H, self._shifts_H = np.resize(_FACTORS, config.hidden_size), np.resize(_SHIFTS, config.hidden_size)
        self.key_width = min(config.hidden_size, config.kv_width, config.state_bytes // 8 or config.hidden_size)
        self._repeated_H = np.arange(config.hidden_size) % self.key_width
        self._multipliers_V = (np.arange(config.vocab_size) * 7919.0 + 1) % _LOGITS

    def embed(self, tokens_T: Numbers) -> Numbers:
        return np.asarray((tokens_T[:, None] * 7919.0 + 17) * self._factors_H % MODULUS + self._shifts_H)

    def key(self, x_TH: Numbers) -> Numbers:
        """The value that a row stores in the KV pages, [T, the width of a token in them, at most H]."""
        return np.asarray(x_TH[:, : self.key_width] % MODULUS)

    def normed(self, layer: int, x_TH: Numbers, keys_LW: Numbers) -> Numbers:
        """The output of attention for the last T positions of a sequence with these keys. Each position includes itself."""
        weighted_LW = keys_LW * _position_weights(layer, len(keys_LW))
        sums_TW = weighted_LW.sum(axis=0, keepdims=True) if len(x_TH) == 1 else weighted_LW.cumsum(axis=0)[-len(x_TH) :]
        contexts_TW = (sums_TW + layer) % MODULUS
        return np.asarray((3 * (x_TH % MODULUS) + contexts_TW[:, self._repeated_H]) % MODULUS)

    def states(self, layer: int, x_TH: Numbers, state_W: Numbers) -> Numbers:
        """The states of a recurrent layer behind each of the next T positions of a sequence, [T, W], from the one before them."""
        found = []
        for key_W in self.key(x_TH):
            state_W = (20_011 * state_W + key_W + layer) % MODULUS  # far apart for other tokens, also in another order
            found.append(state_W)
        return np.array(found)

    def mixed(self, x_TH: Numbers, states_TW: Numbers) -> Numbers:
        """The output of a recurrent layer for positions with these states."""
        return np.asarray((3 * (x_TH % MODULUS) + states_TW[:, self._repeated_H]) % MODULUS)

    def route(self, normed_TH: Numbers) -> tuple[Numbers, Numbers]:
        """Returns expert_ids_TA (distinct within a row) and weights_TA."""
        num_experts, num_active = self.config.num_experts, self.config.num_experts_per_token
        first_T = normed_TH[:, 0].astype(np.int64)
        step_T = normed_TH[:, 1].astype(np.int64) % max(1, num_experts // max(1, num_active)) + 1
        slots_A = np.arange(num_active)
        ids_TA = (first_T[:, None] + slots_A * step_T[:, None]) % num_experts  # (A - 1) steps are less than one round
        return ids_TA, (normed_TH[:, 2:3] + slots_A * 3) % 7 + 1

    def expert(self, layer: int, expert_P: Numbers, x_PH: Numbers) -> Numbers:
        """Unweighted expert outputs, one row per pair."""
        return np.asarray((x_PH * (expert_P[:, None] * 31 + layer * 17 + 5) + expert_P[:, None] * 1009) % MODULUS)

    def dense(self, layer: int, normed_TH: Numbers) -> Numbers:
        return np.asarray((normed_TH * 5 + layer) % MODULUS)

    def logits(self, x_SH: Numbers) -> Numbers:
        sums_S = ((x_SH % MODULUS) * self._factors_H).sum(axis=1) % _LOGITS
        return np.asarray(sums_S[:, None] * self._multipliers_V % _LOGITS / 1000)

    def attention(self, pages: KvPages) -> Callable[..., Any]:
        """What mixes the tokens of a sequence in each layer: as TokenMixer.forward, with its pages and slots."""
        attend = partial(_attend, self, {layer: _pieces_of(self, pages.blocks(layer)) for layer in pages.layers})
        if pages.states is None:
            return attend
        states = {layer: pages.states.block(layer).numpy().view(np.float64)[:, : self.key_width] for layer in pages.states.layers}
        pass_on = partial(_pass_on, self, states)
        return lambda layer, x_TH, layout: (pass_on if layer in states else attend)(layer, x_TH, layout)

    def experts(self, held: Mapping[int, Sequence[int]]) -> ExactExperts:
        """The module of a server that holds these experts, by layer."""
        return ExactExperts(self, held)

    @staticmethod
    def on_tensors(function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, which takes and returns arrays, as a function of tensors."""

        def run(*values: Any) -> Any:
            with np.errstate(invalid="ignore"):  # the simulation injects NaN
                found = function(*(value.numpy() if isinstance(value, torch.Tensor) else value for value in values))
            if isinstance(found, tuple):
                return tuple(torch.from_numpy(array) for array in found)
            return torch.from_numpy(found)

        return run

    def layer(self, layer: int, x_TH: Numbers, shared: bool) -> Numbers:
        """A whole layer of one sequence that was never seen before, for the reference."""
        if layer in self._recurrent:
            normed_TH = self.mixed(x_TH, self.states(layer, x_TH, np.zeros(self.key_width)))
        else:
            normed_TH = self.normed(layer, x_TH, self.key(x_TH))
        if layer not in self._moe:
            return np.asarray(x_TH + self.dense(layer, normed_TH))
        total_TH = x_TH + self.dense(layer, normed_TH) if shared else x_TH.copy()
        ids_TA, weights_TA = self.route(normed_TH)
        for slot in range(ids_TA.shape[1]):
            total_TH += weights_TA[:, slot : slot + 1] * self.expert(layer, ids_TA[:, slot], normed_TH)
        return np.asarray(total_TH)


@lru_cache(maxsize=1024)
def _position_weights(layer: int, num_positions: int) -> Numbers:
    """[L, 1]. Callers must not modify it."""
    return ((np.arange(num_positions) * 7919 + layer * 31) % 997 + 1.0)[:, None]


class ExactExperts:
    """Like flowrt.operators.experts.Experts. Raises KeyError for an expert that this server does not hold."""

    def __init__(self, model: ExactModel, held: Mapping[int, Sequence[int]]) -> None:
        self._model = model
        self._held = {layer: frozenset(experts) for layer, experts in held.items()}

    def num_pairs(self) -> dict[int, dict[int, int]]:
        return {}

    def forward(self, layer: int, x_RH: torch.Tensor, row_P: torch.Tensor, expert_P: torch.Tensor, weight_P: torch.Tensor) -> torch.Tensor:
        y_PH, rows = self._forward_pairs(layer, x_RH.numpy(), row_P.numpy(), expert_P.numpy()), x_RH.shape[0]
        y_RH = np.zeros((rows, y_PH.shape[1]))
        np.add.at(y_RH, row_P.numpy(), y_PH * weight_P.numpy()[:, None])
        return torch.from_numpy(y_RH)

    def forward_pairs(self, layer: int, x_RH: torch.Tensor, row_P: torch.Tensor, expert_P: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(self._forward_pairs(layer, x_RH.numpy(), row_P.numpy(), expert_P.numpy()))

    def _forward_pairs(self, layer: int, x_RH: Numbers, row_P: Numbers, expert_P: Numbers) -> Numbers:
        if not self._held[layer].issuperset(expert_P.tolist()):
            raise KeyError(f"experts {sorted(set(expert_P.tolist()) - self._held[layer])} of layer {layer} are not held here")
        return self._model.expert(layer, expert_P, x_RH[row_P])


def _pieces_of(model: ExactModel, blocks: Sequence[torch.Tensor]) -> list[tuple[slice, Numbers, Numbers]]:
    """A key lies cut into as many pieces as there are blocks of KV pages. For each: its columns, and where they are stored, by slot and by
    page, as views."""
    columns = np.array_split(np.arange(model.key_width), len(blocks))
    found = []
    for own, block in zip(columns, blocks, strict=True):
        stored_GCW = block.numpy().reshape(*block.shape[:2], -1)[:, :, : len(own)]
        stored_SW = block.numpy().reshape(block.shape[0] * block.shape[1], -1)[:, : len(own)]
        found.append((slice(own[0], own[-1] + 1) if len(own) else slice(0, 0), stored_SW, stored_GCW))
    return found


def _attend(
    model: ExactModel, pieces_L: Mapping[int, Sequence[tuple[slice, Numbers, Numbers]]], layer: int, x_TH: torch.Tensor, layout: StepLayout
) -> tuple[torch.Tensor, torch.Tensor]:
    """An attention block without weights. `pieces_L`: `_pieces_of` of the KV pages, by layer."""
    pieces, num_rows, normed, rows_TH = pieces_L[layer], 0, [], x_TH.numpy()
    own_TW = model.key(rows_TH)
    for columns, stored_SW, _ in pieces:
        stored_SW[layout.slots_T.numpy()] = own_TW[:, columns]
    for pages_G, length, kv_length in zip(layout.page_table_SG.numpy(), layout.query_lengths, layout.kv_lengths, strict=True):
        stored = [stored_GCW[pages_G].reshape(-1, stored_GCW.shape[2])[:kv_length] for _, _, stored_GCW in pieces]
        normed.append(model.normed(layer, rows_TH[num_rows : num_rows + length], np.concatenate(stored, axis=1)))
        num_rows += length
    return x_TH, torch.from_numpy(np.concatenate(normed))


def _pass_on(
    model: ExactModel, states_L: Mapping[int, Numbers], layer: int, x_TH: torch.Tensor, layout: StepLayout
) -> tuple[torch.Tensor, torch.Tensor]:
    """A recurrent layer without weights. `states_L`: the states in its slots [slots, W], by layer."""
    assert layout.states_2S is not None
    states_SW, num_rows, normed, rows_TH = states_L[layer], 0, [], x_TH.numpy()
    for source, target, length in zip(*layout.states_2S.tolist(), layout.query_lengths, strict=True):
        own_TH = rows_TH[num_rows : num_rows + length]
        found_TW = model.states(layer, own_TH, np.zeros(model.key_width) if source == NO_STATE else states_SW[source])
        states_SW[target] = found_TW[-1]
        normed.append(model.mixed(own_TH, found_TW))
        num_rows += length
    return x_TH, torch.from_numpy(np.concatenate(normed))
