"""Replaces the linear layers of a module of transformers by flowrt's products: the library's reorder a matrix for each few rows."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch import Tensor, nn

from flowrt.operators.products import form_for, lay_out


class PanelLinear(nn.Module):
    """A linear layer whose matrix lies in panels. Takes over the weight of `linear`."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features, self.bias = linear.in_features, linear.out_features, linear.bias
        self._product: Any = lay_out(linear.weight.detach())
        linear._parameters.clear()

    @property
    def weight(self) -> Tensor:
        """A copy of the matrix [outputs, inputs], for code that reads it itself."""
        restored: Tensor = self._product.restored()
        return restored

    def forward(self, x: Tensor) -> Tensor:
        y_TN: Tensor = self._product(x.reshape(-1, self.in_features), self.bias)
        return y_TN.view(*x.shape[:-1], self.out_features)


def lay_out_linears(model: nn.Module) -> None:
    """Replaces the linear layers that fit. A weight that other modules read, too, such as a tied embedding, stays."""
    readers = Counter(id(parameter) for module in model.modules() for parameter in module._parameters.values() if parameter is not None)
    for module in list(model.modules()):
        for name, part in module._modules.items():
            if isinstance(part, nn.Linear) and type(part) is nn.Linear:
                weight = part._parameters.get("weight")  # those of experts have none
                if weight is not None and readers[id(weight)] == 1 and _fits(weight):
                    module._modules[name] = PanelLinear(part)


def _fits(weight: Tensor) -> bool:
    shape = (weight.shape[0], weight.shape[1])
    return form_for(weight.dtype, weight.device.type, shape) in ("panels", "wide panels")
