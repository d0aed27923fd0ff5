"""Adds the responses of the expert servers to the residual."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from flowrt.operators.kernels.choice import kernels_for


def combine(residual_TH: Tensor, parts: Iterable[tuple[Tensor, Tensor]]) -> Tensor:
    """x_TH: the residual plus the sum of the parts (rows_R, y_RH), added in the order given.

    The caller passes parts in the order of the plan, not in order of arrival, so that the sum does not depend on timing. The rows of one
    part ascend, each once, as in dispatch.py. The residual and the parts are not changed, since they may be memory of a transport.
    """
    return kernels_for(residual_TH.dtype, residual_TH.device).add_parts(residual_TH, tuple(parts))


def combine_pairs(residual_TH: Tensor, weights_TA: Tensor, parts: Iterable[tuple[Tensor, Tensor]]) -> Tensor:
    """x_TH: the residual plus, row by row, the weighted responses in slot order, independent of their server (numerics: strict).

    Parts are (pair_P = row * A + slot, y_PH) and cover each pair once. Products and sums of two numbers are rounded the one way
    that IEEE 754 allows, so this needs no blocks.
    """
    num_rows, num_active = weights_TA.shape
    y_PH = residual_TH.new_empty(num_rows * num_active, residual_TH.shape[1])
    for pair_P, part_PH in parts:
        y_PH.index_copy_(0, pair_P, part_PH)
    weighted_TAH = y_PH.view(num_rows, num_active, -1).mul_(weights_TA.unsqueeze(2))
    total_TH = weighted_TAH[:, 0].clone()
    for slot in range(1, num_active):
        total_TH.add_(weighted_TAH[:, slot])
    return total_TH.add_(residual_TH)
