"""Muon for the weight matrices and AdamW for the rest.

Muon (Jordan et al. 2024, "Muon: an optimizer for hidden layers") makes the update of every matrix nearly orthogonal, so that the model
learns rare directions as fast as common ones. The learning-rate schedule and the loop are in ``train.py``.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

_POLYNOMIAL = (3.4445, -4.7750, 2.0315)
"""Coefficients of the Newton-Schulz step, from the paper: they push singular values of (0, 1] to about 1."""


def orthogonalized(matrix_BRC: Tensor, num_steps: int = 5) -> Tensor:
    """Approximate the nearest orthogonal matrices of a batch (batch, rows, columns) by Newton-Schulz steps."""
    a, b, c = _POLYNOMIAL
    x: Tensor = matrix_BRC / (matrix_BRC.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    for _ in range(num_steps):
        gram = x @ x.mT
        x = a * x + torch.baddbmm(gram, gram, gram, beta=b, alpha=c) @ x
    return x.mT if tall else x


class Muon(torch.optim.Optimizer):
    """Orthogonalized momentum for matrices (rows, columns) and stacks of expert matrices (experts, rows, columns)."""

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float, momentum: float = 0.95, weight_decay: float = 0.0) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Apply one update from the current gradients. A closure is not supported."""
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["momentum"] = torch.zeros_like(parameter)
                momentum: Tensor = state["momentum"].lerp_(parameter.grad, 1 - group["momentum"])
                update = parameter.grad.lerp(momentum, group["momentum"])
                # Experts store the gate and up projections as one matrix; each projection is made orthogonal on its own.
                columns = update.shape[-1]
                stack = update.view(-1, min(update.shape[-2], columns), columns)
                scale = max(1.0, stack.shape[-2] / columns) ** 0.5
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.add_(orthogonalized(stack).view_as(parameter), alpha=-group["lr"] * scale)
