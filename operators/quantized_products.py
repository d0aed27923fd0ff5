"""Multiplies rows by a matrix whose weights are kept in 8 bits: integers, or floats with 4 bits of exponent (E4M3), with scales.

Decoding is bound by memory: half the bytes of bfloat16 are read. The matrix lies in panels (kernels/cpu/_quantized.c), and weights are
widened to float32 in registers. Rows are not quantized, and a result is rounded once, to the dtype of the rows. The bits of a row depend
on that row alone. xDeepServe, section 4.7, keeps INT8 weights with one scale per output, which `quantize` makes.
"""

from __future__ import annotations

from copy import copy
from functools import lru_cache

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_unary

from flowrt.operators.checkpoint_files import KEPT_AS
from flowrt.operators.int8_rows import quantize_rows
from flowrt.operators.model_config import KeptWeights, ModelConfig, ModelError
from flowrt.operators.products import PANEL_OUTPUTS, InPanels, Product, lay_out
from flowrt.operators.restored_weights import QUANTIZED_DTYPES, QuantizedMatrix
from flowrt.operators.weights import Checkpoint

try:
    from flowrt.operators.kernels.cpu import _quantized
except ImportError:  # built without a compiler
    _levels = list[int]()
else:
    _levels = _quantized.levels()

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
    return lay_out(weight_NK) if kept == "dtype" else QuantizedPanels(quantize(weight_NK, kept))


def read_product(
    checkpoint: Checkpoint, config: ModelConfig, part: str, shape: tuple[int, int], *, layer: int, device: torch.device | str = "cpu"
) -> Product:
    """A part of the checkpoint (Checkpoint.read_part), laid out."""
    return lay_out_part(part, checkpoint.read_part(config, part, shape, layer=layer, device=device), config)


class QuantizedPanels(InPanels[QuantizedMatrix]):
    """Holds codes in panels of 16 outputs, column by column, and behind them the scales, group by group."""

    def __init__(self, matrix: QuantizedMatrix) -> None:
        super().__init__(matrix.codes_NK)
        if not _levels:
            lacking = "a processor with AVX2, and a compiler when flowrt is installed"
            raise ModelError(f"products with weights in 8 bits need {lacking}; remove model.weights and model.expert_weights")
        self._level = _levels[-1]
        self._kind, self._num_groups, self._group = _kinds()[matrix.codes_NK.dtype], matrix.scales_NC.shape[1], matrix.group
        self._memory = torch.empty(self.num_bytes, dtype=torch.uint8)
        self.write(matrix, self._memory)

    @classmethod
    def zeros(cls, shape: tuple[int, int], kept: KeptWeights, group: int) -> QuantizedPanels:
        """A matrix of zeros, from which `over` makes others."""
        codes_NK = torch.zeros(shape, dtype=KEPT_DTYPES[kept])
        return cls(QuantizedMatrix(codes_NK, torch.zeros(shape[0], -(-shape[1] // group)), group))

    @property
    def num_bytes(self) -> int:
        return self.shape[0] * (self.shape[1] + 4 * self._num_groups)

    def write(self, matrix: QuantizedMatrix, memory: Tensor) -> None:
        codes_NK, scales_NC = matrix.codes_NK.view(torch.uint8), matrix.scales_NC
        if (*codes_NK.shape, *scales_NC.shape) != (*self.shape, self.shape[0], self._num_groups):
            raise ModelError(f"scales of shape {list(scales_NC.shape)} do not fit the matrices of other layers")
        if self._kind == _quantized.FLOAT8 and bool(((codes_NK & 127) == 127).any()):
            raise ModelError("a weight that is kept as fp8 is NaN; copy the model's files again")
        num_panels, num_codes = self.shape[0] // PANEL_OUTPUTS, codes_NK.numel()
        memory[:num_codes].view(num_panels, -1, PANEL_OUTPUTS).copy_(codes_NK.view(num_panels, PANEL_OUTPUTS, -1).transpose(1, 2))
        scales = memory[num_codes:].view(torch.float32).view(num_panels, -1, PANEL_OUTPUTS)
        scales.copy_(scales_NC.view(num_panels, PANEL_OUTPUTS, -1).transpose(1, 2))

    def over(self, memory: Tensor) -> QuantizedPanels:
        made = copy(self)
        made._memory = memory
        return made

    def __call__(self, x_TK: Tensor, bias_N: Tensor | None = None) -> Tensor:
        y_TN = quantized_product(x_TK, self)
        return y_TN if bias_N is None else y_TN.add_(bias_N)

    def checked(self, x_TK: Tensor) -> Tensor:
        if x_TK.dim() != 2 or x_TK.shape[1] != self.shape[1] or not x_TK.is_cpu:
            raise ValueError(f"{list(x_TK.shape)} on {x_TK.device} were given to a matrix on the CPU that takes rows of {self.shape[1]}")
        return x_TK.float().contiguous()

    def into(self, x: int, y: int, num_rows: int, num_threads: int) -> None:
        codes = self._memory.data_ptr()
        scales = codes + self.shape[0] * self.shape[1]
        _quantized.product(self._level, self._kind, x, codes, scales, y, num_rows, *self.shape, self._group, num_threads)


def quantized_product(x_TK: Tensor, matrix: QuantizedPanels) -> Tensor:
    """y_TN in the dtype of x. Passes through torch's function overrides, so that a proof of strict blocks sees what is computed."""
    if has_torch_function_unary(x_TK):
        seen: Tensor = handle_torch_function(quantized_product, (x_TK,), x_TK, matrix)
        return seen
    wide_TK = matrix.checked(x_TK)
    y_TN = wide_TK.new_empty(x_TK.shape[0], matrix.shape[0])
    matrix.into(wide_TK.data_ptr(), y_TN.data_ptr(), x_TK.shape[0], torch.get_num_threads())
    return y_TN.to(x_TK.dtype)


@lru_cache
def _kinds() -> dict[torch.dtype, int]:
    return {torch.int8: _quantized.INT8, torch.float8_e4m3fn: _quantized.FLOAT8}
