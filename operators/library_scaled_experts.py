"""Routes rows to experts that transformers calls with every row, multiplied by its score for the expert (Llama 4).

The score of an expert that was not chosen is 0, and an expert without biases gives 0 for a row of zeros. So the chosen experts alone have
the same sum. Such an expert scales what it takes; one that is called through the library's interface scales what it gives.
"""

from __future__ import annotations

from copy import copy
from functools import cache, partial, wraps
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from flowrt.operators.library_interfaces import hooks_of


def route_scaled_experts(model: Any) -> None:
    """Let such modules call their experts as others do: with rows, and the ids and weights of the chosen experts."""
    for moe in model.modules():
        if _scales_rows(moe):
            moe.experts.__class__ = _routed(moe.experts.__class__)  # the names of its weights stay
            moe.experts._is_expert_parallel = False  # the mark of experts that are called through the interface
            moe.forward = partial(_forward, moe)


def _scales_rows(moe: Any) -> bool:
    has_parts = all(hasattr(moe, name) for name in ("router", "experts", "shared_expert", "top_k"))
    return (
        has_parts
        and [*signature(moe.experts.forward).parameters] == ["hidden_states"]
        and {weight.dim() for weight in moe.experts.parameters()} == {3}  # no biases
    )


def _forward(moe: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
    rows_TH = hidden_states.reshape(-1, hidden_states.shape[-1])
    scores_TE, logits_TE = moe.router(rows_TH)
    weights_TA, ids_TA = scores_TE.topk(moe.top_k, dim=1)
    return moe.shared_expert(rows_TH) + moe.experts(rows_TH, ids_TA, weights_TA), logits_TE


@cache
def _routed(cls: Any) -> Any:
    """The class of experts `cls`, called with ids and weights."""

    def compute(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """`cls` computes one expert at a time, so that experts without rows cost nothing."""
        summed, one = torch.zeros_like(hidden_states), copy(self)
        for expert in top_k_index.unique().tolist():
            one._parameters = {name: weight[expert : expert + 1] for name, weight in self._parameters.items()}
            rows, places = (top_k_index == expert).nonzero(as_tuple=True)
            summed.index_add_(0, rows, cls.forward(one, hidden_states[rows] * top_k_weights[rows, places, None]))
        return summed

    @wraps(compute)
    def forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        return hooks_of(self).experts(self, hidden_states, top_k_index, top_k_weights)

    return type(cls.__name__, (cls,), {"forward": forward})
