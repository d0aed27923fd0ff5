"""Computes the final norm and the vocabulary logits, only for the rows that are sampled."""

from __future__ import annotations

import torch
from torch import Tensor

from flowrt.operators.embedding import Embedding
from flowrt.operators.model_config import ModelConfig
from flowrt.operators.normalization import RowNorm
from flowrt.operators.products import Product, lay_out, shared_form
from flowrt.operators.quantized_products import lay_out_part
from flowrt.operators.row_blocks import WHOLE, RowBlocks
from flowrt.operators.weights import Checkpoint


class Head:
    """Final norm and output matrix."""

    def __init__(
        self,
        config: ModelConfig,
        checkpoint: Checkpoint,
        device: torch.device | str = "cpu",
        embedding: Embedding | None = None,
        blocks: RowBlocks = WHOLE,
    ) -> None:
        """With tied weights the matrix is the embedding's; `embedding` shares it with a table that this process already holds. A matrix of
        its own that the checkpoint holds all the same is used, as in transformers."""
        self._blocks = blocks
        self._norm = RowNorm(config, device)
        self._norm_H = checkpoint.read_part(config, "final_norm", (config.hidden_size,), device=device, dtype=self._norm.dtype)
        is_tied = config.tie_word_embeddings and not checkpoint.has_part(config, "head")
        if is_tied and embedding is not None:
            self.product: Product = lay_out(embedding.weight_VH, shared_form(embedding.weight_VH))
        else:
            part = "embedding" if is_tied else "head"
            weight_VH = checkpoint.read_part(config, part, (config.vocab_size, config.hidden_size), device=device)
            # A tied matrix has the same bits where a process has the embedding, too: it is never in 8 bits.
            self.product = lay_out(weight_VH) if is_tied else lay_out_part(part, weight_VH, config)

    def forward(self, x_TH: Tensor, sample_rows_S: Tensor) -> Tensor:
        """logits_SV of the rows named (int64): float32, or float64 in a float64 model."""
        return self._blocks.run("head", self._logits, x_TH.index_select(0, sample_rows_S))

    def _logits(self, x_SH: Tensor) -> Tensor:
        logits = self.product(self._norm(x_SH, self._norm_H))
        return logits if logits.dtype == torch.float64 else logits.float()
