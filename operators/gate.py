"""Which experts a row goes to, and with which weights. Called by the attention workers, in layers with experts."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn import functional as F

from operators.model_config import ModelConfig
from operators.weights import Checkpoint


class Gate:
    """Softmax scores over all experts, the best A of them."""

    def __init__(self, config: ModelConfig, checkpoint: Checkpoint, layers: Iterable[int], device: torch.device | str = "cpu") -> None:
        self._num_active, self._normalize = config.num_experts_per_token, config.normalize_topk
        shape = (config.num_experts, config.hidden_size)
        self._weight_EH = {layer: checkpoint.read_part(config, "gate", shape, layer=layer, device=device) for layer in layers}

    def forward(self, layer: int, normed_TH: Tensor) -> tuple[Tensor, Tensor]:
        """(expert_ids_TA int64, best first; weights_TA in the rows' dtype). Scores are taken in float32 at least."""
        logits = F.linear(normed_TH, self._weight_EH[layer])
        scores = torch.softmax(logits, dim=-1, dtype=torch.promote_types(logits.dtype, torch.float32))
        weights, expert_ids = torch.topk(scores, self._num_active, dim=-1)
        if self._normalize:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return expert_ids, weights.to(logits.dtype)
