"""Restores the weights of quantized checkpoints: 8-bit floats and integers with a scale per block, row or group, and packed integers.

A weight is its stored number times the scale of its block, computed in float32, which is what transformers (FineGrainedFP8Config) and
compressed-tensors compute. Zero points, and columns that are stored in another order, are refused (checkpoint_files.py).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flowrt.operators.checkpoint_files import packed_bits

_FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])  # by their 4 bits
_EXPONENT_OF_ONE = 127
QUANTIZED_DTYPES = {"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "I8": torch.int8, "I32": torch.int32}


@dataclass(frozen=True)
class QuantizedMatrix:
    """A weight is its code times the scale of its output and of its group of columns: codes_NK, int8 or float8_e4m3fn; scales_NC,
    float32, one per group; `group`: columns of a group, of which the last one may be smaller."""

    codes_NK: Tensor
    scales_NC: Tensor
    group: int

    def has_groups(self, group: int) -> bool:
        """Whether groups of so many columns are parts of those that have a scale."""
        return self.group >= self.codes_NK.shape[1] or self.group % group == 0

    def in_groups(self, group: int) -> QuantizedMatrix:
        """The same matrix with a scale for each of these smaller groups."""
        columns = self.codes_NK.shape[1]
        return QuantizedMatrix(self.codes_NK, self.scales_NC[:, torch.arange(0, columns, group) // self.group], group)

    def restored(self) -> Tensor:
        """The matrix in float32."""
        scales_NK = self.scales_NC.repeat_interleave(self.group, 1)[:, : self.codes_NK.shape[1]]
        return self.codes_NK.float() * scales_NK


def restored_rows(stored_RP: Tensor, scales_SC: Tensor, first: int, block: tuple[int, int], columns: int) -> Tensor:
    """The rows from `first` on of a matrix, float32 [R, columns]. `stored_RP`: as they are stored, with P numbers of 32 bits in a row where
    they are packed. `scales_SC`: of the whole matrix, one per `block` of rows and columns."""
    values = _unpacked(stored_RP, columns) if stored_RP.dtype == torch.int32 else stored_RP.to(torch.float32)
    scales_RC = scales_SC[torch.arange(first, first + len(stored_RP)) // block[0]]
    if scales_RC.shape[1] > 1:
        scales_RC = scales_RC.repeat_interleave(block[1], 1)[:, :columns]
    return values.mul_(scales_RC)


def restored_mxfp4(blocks_RGB: Tensor, exponents_RG: Tensor) -> Tensor:
    """A matrix, float32 [R, G * 32]. `blocks_RGB`: uint8, two 4-bit floats (E2M1) in each of the 16 bytes of a block, the lower bits first;
    `exponents_RG`: uint8, the power of two of each block (OCP Microscaling Formats 1.0, sections 5.2 and 5.4.1)."""
    pairs = torch.stack((blocks_RGB & 15, blocks_RGB >> 4), dim=-1).flatten(2)
    values = _FP4[pairs.to(torch.int64)]
    return torch.ldexp(values, exponents_RG[..., None].to(torch.int32) - _EXPONENT_OF_ONE).flatten(1)


def _unpacked(stored_RP: Tensor, columns: int) -> Tensor:
    """Signed integers out of numbers of 32 bits, the lowest bits first; they are stored with half of their range added."""
    bits = packed_bits(stored_RP.shape[1], columns)
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    values = (stored_RP.unsqueeze(-1) >> shifts).bitwise_and_((1 << bits) - 1).flatten(1)[:, :columns]
    return values.to(torch.float32).sub_(1 << (bits - 1))
