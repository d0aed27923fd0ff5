"""Multiplies rows by a matrix whose weights are kept in 8 bits: integers, or floats with 4 bits of exponent (E4M3), with scales.

Decoding is bound by memory: half the bytes of bfloat16 are read. The matrix lies in panels (kernels/cpu/_wide_panels.c), and weights are
widened to float32 in registers. Only IntegerPanels quantizes rows. A result is rounded once, to the dtype of the rows. The bits of a row
depend on that row alone. xDeepServe, section 4.7, keeps INT8 weights with one scale per output, which `quantize` makes.
"""

from __future__ import annotations

from typing import Self

import torch
from torch import Tensor

from flowrt.operators.checkpoint_files import KEPT_AS
from flowrt.operators.int8_rows import packed_rows, quantize_rows
from flowrt.operators.kernels.cpu import rows as cpu_rows
from flowrt.operators.model_config import KEPT_COLUMNS, DtypeOrInt8, KeptWeights, ModelConfig, ModelError
from flowrt.operators.products import PANEL_OUTPUTS, Product, WidePanels, lay_out, wide_levels
from flowrt.operators.restored_weights import QUANTIZED_DTYPES, QuantizedMatrix
from flowrt.operators.weights import Checkpoint

if wide_levels:
    from flowrt.operators.kernels.cpu import _wide_panels

KEPT_DTYPES = {kept: QUANTIZED_DTYPES[stored] for kept, stored in KEPT_AS.items()}
_LARGEST = 448.0  # of E4M3
_ELEMENTS = 1 << 20  # that are quantized at a time, so that temporaries stay small


def quantize(weight_NK: Tensor, kept: KeptWeights) -> QuantizedMatrix:
    """The nearest codes, with one scale per output, with which the largest weight of the output has the largest code."""
    num_outputs, num_inputs = weight_NK.shape
    codes_NK, scales_N1 = torch.empty(weight_NK.shape, dtype=KEPT_DTYPES[kept]), torch.empty(num_outputs, 1)
    for rows in torch.arange(num_outputs).split(max(1, _ELEMENTS // num_inputs)):
        block = slice(int(rows[0]), int(rows[-1]) + 1)
        if kept == "int8":
            codes_NK[block], scales_N1[block, 0] = quantize_rows(weight_NK[block])
        else:
            wide = weight_NK[block].float()
            scales_N1[block] = wide.abs().amax(dim=1, keepdim=True) / _LARGEST
            codes_NK[block] = (wide / torch.where(scales_N1[block] > 0, scales_N1[block], 1.0)).to(codes_NK.dtype)
    return QuantizedMatrix(codes_NK, scales_N1, num_inputs)


def lay_out_part(part: str, weight_NK: Tensor, config: ModelConfig) -> Product:
    """A part that is one matrix, or a share of its rows: in the 8 bits in which the config keeps it, else in the form that suits it."""
    kept = config.kept(part, tuple(weight_NK.shape))
    return lay_out(weight_NK) if kept == "dtype" else quantized_panels(weight_NK, kept, config.activations)


def read_product(
    checkpoint: Checkpoint, config: ModelConfig, part: str, shape: tuple[int, int], *, layer: int, device: torch.device | str = "cpu"
) -> Product:
    """A part of the checkpoint (Checkpoint.read_part), laid out."""
    return lay_out_part(part, checkpoint.read_part(config, part, shape, layer=layer, device=device), config)


class QuantizedPanels(WidePanels[QuantizedMatrix]):
    """Holds codes in wide panels, and their scales group by group."""

    def __init__(self, matrix: QuantizedMatrix) -> None:
        if not wide_levels:
            lacking = "a processor with AVX2, and a compiler when flowrt is installed"
            raise ModelError(f"products with weights in 8 bits need {lacking}; remove model.weights and model.expert_weights")
        super().__init__(matrix.codes_NK, matrix.group)
        self.write(matrix, self._memory)

    @classmethod
    def zeros(cls, shape: tuple[int, int], kept: KeptWeights, group: int) -> Self:
        """A matrix of zeros, from which `over` makes others."""
        codes_NK = torch.zeros(shape, dtype=KEPT_DTYPES[kept])
        return cls(QuantizedMatrix(codes_NK, torch.zeros(shape[0], -(-shape[1] // group)), group))

    def write(self, matrix: QuantizedMatrix, memory: Tensor) -> None:
        codes_NK, scales_NC = matrix.codes_NK, matrix.scales_NC
        if (*codes_NK.shape, *scales_NC.shape) != (*self.shape, self.shape[0], self._num_groups):
            raise ModelError(f"scales of shape {list(scales_NC.shape)} do not fit the matrices of other layers")
        if self._dtype is torch.float8_e4m3fn and bool(((codes_NK.view(torch.uint8) & 127) == 127).any()):
            raise ModelError("a weight that is kept as fp8 is NaN; copy the model's files again")
        self._write(codes_NK, memory)
        self._scales(memory).copy_(scales_NC.view(self.shape[0] // PANEL_OUTPUTS, PANEL_OUTPUTS, -1).transpose(1, 2))

    def restored(self) -> QuantizedMatrix:
        return QuantizedMatrix(self._read(self._memory), self._scales(self._memory).transpose(1, 2).reshape(self.shape[0], -1), self._group)

    def _scales(self, memory: Tensor) -> Tensor:
        return memory[self._num_codes :].view(torch.float32).view(self.shape[0] // PANEL_OUTPUTS, -1, PANEL_OUTPUTS)


class IntegerPanels(QuantizedPanels):
    """Holds INT8 codes, and takes rows as INT8 with a scale each (xDeepServe, section 4.7): integers need no widening, and their sums are
    exact. A column is four inputs."""

    _in_column = KEPT_COLUMNS

    def __init__(self, matrix: QuantizedMatrix) -> None:
        if odd := next((size for size in (matrix.codes_NK.shape[1], matrix.group) if size % KEPT_COLUMNS), None):
            raise ModelError(f"rows as INT8 need columns and groups of a multiple of {KEPT_COLUMNS}, not {odd}; remove model.activations")
        super().__init__(matrix)
        self._kind = _wide_panels.BOTH_INT8

    @property
    def result_dtype(self) -> torch.dtype:
        return torch.float32

    def _convert(self, x_TK: Tensor) -> Tensor:
        return cpu_rows.int8_rows(x_TK) if cpu_rows.fits(x_TK.dtype, x_TK.device) else packed_rows(x_TK)


def panels_of(kept: KeptWeights, activations: DtypeOrInt8) -> type[QuantizedPanels]:
    """The class for matrices that are kept so, and rows that become this."""
    return IntegerPanels if (kept, activations) == ("int8", "int8") else QuantizedPanels


def quantized_panels(weight_NK: Tensor, kept: KeptWeights, activations: DtypeOrInt8) -> QuantizedPanels:
    return panels_of(kept, activations)(quantize(weight_NK, kept))
