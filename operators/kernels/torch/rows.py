"""Implements the kernels in torch, for every device and dtype; the reference of the C kernels (kernels/cpu/rows.py)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from flowrt.operators.replica_choice import choose_servers

if TYPE_CHECKING:
    from flowrt.operators.replica_table import PartFields, ReplicaTable


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """x / rms(x) * weight over the last dimension; `weight` has x's last dimension, or its last two (one weight per head).

    Half-precision rows are normalized in float32 and rounded before the weight is applied, as in the training of the models.
    """
    wide = x if x.dtype in (torch.float32, torch.float64) else x.float()
    if x.device.type == "cpu":  # here F.rms_norm makes several passes over all rows and takes 4 times as long at 512 rows
        length = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        normed: Tensor = wide * torch.addcmul(_number(epsilon, wide.dtype), length, length, value=1 / x.shape[-1]).rsqrt_()
    else:
        normed = F.rms_norm(wide, x.shape[-1:], None, epsilon)
    return normed.to(x.dtype).mul_(weight)


@cache
def _number(value: float, dtype: torch.dtype) -> Tensor:
    return torch.full((1,), value, dtype=dtype)


def add_rms_norm(x: Tensor, added: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """(x + added, its norm), each rounded once."""
    total = x + added
    return total, rms_norm(total, weight, epsilon)


def topk_softmax(logits_TE: Tensor, num_active: int, scale: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(expert_ids_TA, weights_TA in `dtype`): the best of each row, best first, and their softmax times `scale`."""
    best, expert_ids = torch.topk(logits_TE, num_active, dim=-1)
    weights = torch.softmax(best, dim=-1, dtype=torch.promote_types(logits_TE.dtype, torch.float32))
    return expert_ids, (weights if scale == 1 else weights * scale).to(dtype)


def partition_by_server(
    pair_P: Tensor | None, expert_P: Tensor, weight_P: Tensor, num_active: int, table: ReplicaTable, turn: int
) -> list[PartFields]:
    """The pairs of each server, by ascending server: the fields of dispatch.Part. dispatch.partition has the rule that chooses servers.

    `pair_P` are the indices of the pairs in the step; None: all pairs, in order. Server -1 stands for an unavailable expert."""
    # numpy counts and sorts these few dozen integers in a third of torch's time, and the host waits for a device only once.
    device = expert_P.device
    place = torch.from_numpy if device.type == "cpu" else lambda ids: torch.from_numpy(ids).to(device)
    on_host_P = choose_servers(expert_P.cpu().numpy(), num_active, table.replicas, table.num_servers, turn)
    all_pairs = None if pair_P is None else pair_P.cpu().numpy()
    parts = []
    for server in (np.bincount(on_host_P + 1).nonzero()[0] - 1).tolist():
        chosen = pairs = (on_host_P == server).nonzero()[0]
        chosen_P = pair_of = place(chosen)
        if all_pairs is not None:
            pairs = all_pairs[chosen]
            pair_of = place(pairs)
        row_of = pairs // num_active
        is_first = np.ones(len(row_of), dtype=np.bool_)
        np.not_equal(row_of[1:], row_of[:-1], out=is_first[1:])
        rows_R, row_P = place(row_of[is_first]), place(is_first.cumsum() - 1)
        expert_of, weight_of = expert_P.index_select(0, chosen_P), weight_P.index_select(0, chosen_P)
        parts.append((server, rows_R, row_P, expert_of, weight_of, pair_of))
    return parts


def sort_by_expert(x_RH: Tensor, row_P: Tensor, expert_P: Tensor, place_E: Tensor, num_held: int) -> tuple[Tensor, Tensor, Tensor] | None:
    """Sorts pairs by expert: returns their rows [P, H], the index of each pair among them [P], and pairs per held expert [num_held].

    `place_E`: the place of an expert among the held ones plus 1, or 0 if it is not held. Returns None when a pair names an expert that is
    not held. On an accelerator, where the host does not wait for the counts, a device assertion fails instead.
    """
    held_P = place_E.index_select(0, expert_P)
    order_P = held_P.argsort(stable=True)
    place_P = torch.empty_like(order_P).index_copy_(0, order_P, torch.arange(len(order_P), device=order_P.device))
    if held_P.device.type == "cpu":
        counts = torch.bincount(held_P, minlength=num_held + 1)
        if counts[0]:
            return None
    else:
        counts = held_P.new_zeros(num_held + 1).scatter_add_(0, held_P, torch.ones_like(held_P))
        torch._assert_async(counts[0] == 0)
    return x_RH.index_select(0, row_P.index_select(0, order_P)), place_P, counts[1:]


def weighted_sum(y_PH: Tensor, place_P: Tensor, row_P: Tensor, weight_P: Tensor, num_rows: int) -> Tensor:
    """y_RH: for each row the weighted sum over its pairs, in pair order; `place_P` as from `sort_by_expert`."""
    weighted_PH = y_PH.index_select(0, place_P).mul_(weight_P.unsqueeze(1))
    y_RH = y_PH.new_zeros(num_rows, y_PH.shape[1])
    if y_PH.device.type == "cpu":
        return y_RH.index_add_(0, row_P, weighted_PH)
    return y_RH.index_put_((row_P,), weighted_PH, accumulate=True)  # this call sorts, so the order of additions is fixed on CUDA too


def add_parts(residual_TH: Tensor, parts: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """x_TH: the residual plus the sum of the parts (rows_R, y_RH), added in the order given. Changes none of them."""
    total_TH = torch.zeros_like(residual_TH)
    for rows_R, y_RH in parts:
        if rows_R.shape[0] == total_TH.shape[0]:  # all rows: the same sums, in a sixth of the time for one row
            total_TH.add_(y_RH)
        else:
            total_TH.index_add_(0, rows_R, y_RH)
    return total_TH.add_(residual_TH)
