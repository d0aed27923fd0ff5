"""Chooses the experts of each row and their weights."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import torch
from torch import Tensor

from flowrt.operators.kernels.choice import kernels_for
from flowrt.operators.model_config import ModelConfig
from flowrt.operators.products import Product, lay_out
from flowrt.operators.row_blocks import WHOLE, RowBlocks
from flowrt.operators.weights import Checkpoint, torch_dtype


class Gate:
    """Scores all experts and selects the best A (GateConfig defines the scores, the groups and the weights)."""

    def __init__(
        self,
        config: ModelConfig,
        checkpoint: Checkpoint,
        layers: Iterable[int],
        device: torch.device | str = "cpu",
        blocks: RowBlocks = WHOLE,
    ) -> None:
        self._blocks = blocks
        self._kernels = kernels_for(torch_dtype(config), device)
        self._gate, self._num_active = config.gate, config.num_experts_per_token
        self._wide = torch.promote_types(torch_dtype(config), torch.float32)
        self._held = self._wide if config.gate.wide else torch_dtype(config)
        self._weight: dict[int, Product] = {}
        self._bias_E: dict[int, Tensor] = {}
        shape = (config.num_experts, config.hidden_size)
        for layer in layers:
            read = partial(checkpoint.read_part, config, layer=layer, device=device)
            self._weight[layer] = lay_out(read("gate", shape, dtype=self._held))
            if config.gate.bias:
                self._bias_E[layer] = read("gate_bias", shape[:1], dtype=self._wide)

    def forward(self, layer: int, normed_TH: Tensor) -> tuple[Tensor, Tensor]:
        """(expert_ids_TA int64, best first; weights_TA in the rows' dtype). Scores are computed in float32 at least."""
        return self._blocks.run("gate", partial(self._choose, layer), normed_TH)

    def _choose(self, layer: int, normed_TH: Tensor) -> tuple[Tensor, Tensor]:
        gate = self._gate
        logits = self._weight[layer](normed_TH.to(self._held))
        if gate.scores == "softmax" and gate.normalize == 1 and not gate.bias and gate.topk_groups == gate.groups:
            # Normalizing by the sum cancels the other scores: the softmax of the best scores alone gives the same weights for less work.
            return self._kernels.topk_softmax(logits, self._num_active, gate.scale, normed_TH.dtype)
        if gate.scores == "softmax":
            scores = torch.softmax(logits, dim=-1, dtype=self._wide)
        else:
            scores = logits.to(self._wide).sigmoid()
        choosing = scores + self._bias_E[layer] if gate.bias else scores
        if gate.topk_groups < gate.groups:
            choosing = self._best_groups(choosing)
        weights, expert_ids = torch.topk(choosing, self._num_active, dim=-1)
        if gate.bias:
            weights = scores.gather(1, expert_ids)
        if gate.normalize is not None:
            total = weights.sum(dim=-1, keepdim=True) if gate.normalize == 1 else weights.norm(p=gate.normalize, dim=-1, keepdim=True)
            weights = weights / (total + 1e-20)  # sigmoid scores may all be 0
        return expert_ids, (weights if gate.scale == 1 else weights * gate.scale).to(normed_TH.dtype)

    def _best_groups(self, choosing_TE: Tensor) -> Tensor:
        """The scores of the groups of experts that may be chosen, -inf elsewhere (DeepSeek-V2, section 2.2.2)."""
        gate = self._gate
        by_group = choosing_TE.unflatten(1, (gate.groups, -1))
        scores_TG = by_group.topk(gate.group_best, dim=-1).values.sum(dim=-1) if gate.group_best > 1 else by_group.amax(dim=-1)
        best = scores_TG.topk(gate.topk_groups, dim=-1).indices
        excluded = torch.ones_like(scores_TG, dtype=torch.bool).scatter_(1, best, False)
        masked: Tensor = by_group.masked_fill(excluded.unsqueeze(-1), float("-inf"))
        return masked.flatten(1)
