"""Looks up the embedding row of each token."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from flowrt.operators.model_config import ModelConfig
from flowrt.operators.weights import Checkpoint


class Embedding:
    """The embedding table. Token ids outside the vocabulary are refused where a request enters, not here."""

    def __init__(self, config: ModelConfig, checkpoint: Checkpoint, device: torch.device | str = "cpu") -> None:
        self.weight_VH = checkpoint.read_part(config, "embedding", (config.vocab_size, config.hidden_size), device=device)

    def forward(self, tokens_T: Tensor) -> Tensor:
        """x_TH of int64 tokens."""
        return F.embedding(tokens_T, self.weight_VH)
