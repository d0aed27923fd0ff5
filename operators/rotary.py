"""Rotary positions: the table of cosines and sines, and the rotation. Called by attention.py."""

from __future__ import annotations

import torch
from torch import Tensor

FIRST_LENGTH = 4096  # rows of the first table; it doubles when a longer context comes


class RotaryTable:
    """Cosines and signed sines by position, computed in float32 whatever the model's dtype, as transformers does.

    The table grows with the longest context seen, so that a model which allows a million positions does not pay for them.
    """

    def __init__(self, head_dim: int, theta: float, dtype: torch.dtype, device: torch.device | str = "cpu") -> None:
        self._inverse_frequency = 1.0 / (theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim))
        self._dtype, self._device = dtype, device
        self._cos, self._sin = self._table(FIRST_LENGTH)

    def rows(self, positions_T: Tensor, num_positions: int) -> tuple[Tensor, Tensor]:
        """(cos, signed sin), [T, 1, D] each, for positions below `num_positions`."""
        if num_positions > self._cos.shape[0]:
            self._cos, self._sin = self._table(1 << (num_positions - 1).bit_length())
        return self._cos.index_select(0, positions_T).unsqueeze(1), self._sin.index_select(0, positions_T).unsqueeze(1)

    def _table(self, length: int) -> tuple[Tensor, Tensor]:
        angles = torch.arange(length, dtype=torch.float32)[:, None] * self._inverse_frequency
        cos, sin = angles.cos(), angles.sin()
        return (
            torch.cat((cos, cos), dim=-1).to(dtype=self._dtype, device=self._device),
            torch.cat((-sin, sin), dim=-1).to(dtype=self._dtype, device=self._device),
        )


def rotate(x_TND: Tensor, cos_T1D: Tensor, signed_sin_T1D: Tensor) -> Tensor:
    """Rotate each pair (x[i], x[i + D/2]) by its position's angle. The sign of the sine's first half is in the table."""
    first, second = x_TND.chunk(2, dim=-1)
    return x_TND * cos_T1D + torch.cat((second, first), dim=-1) * signed_sin_T1D
