"""Adding the answers of the expert servers to the residual. Called by the attention workers at the end of a layer."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def combine(residual_TH: Tensor, parts: Iterable[tuple[Tensor, Tensor]]) -> Tensor:
    """x_TH: the residual plus the sum of the parts (rows_R, y_RH), added in the order given.

    The caller gives them in the plan's order, not in order of arrival, so that the sum does not depend on timing. The rows of one
    part are all different. Neither the residual nor the parts are changed: they may be memory of a transport.
    """
    total_TH = torch.zeros_like(residual_TH)
    for rows_R, y_RH in parts:
        total_TH.index_add_(0, rows_R, y_RH)
    return total_TH.add_(residual_TH)
