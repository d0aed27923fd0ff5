"""Multiplies rows by a weight matrix that is held in one of several forms, and chooses the form for a dtype on this machine.

A matrix is held once, in one form, and is laid out while it is loaded. expert_products.py chooses forms by measurement.

Why forms: a decode step has few rows, so a product reads more than it computes. The library's plain product first reorders the matrix,
which costs more than the product itself at 2 to 64 rows; *packed* reorders once, at loading. Where the processor has no instructions for
16-bit numbers, the library's product of many rows runs at a tenth of its float32 rate; *widened* first converts blocks of the matrix,
small enough to stay in the cache, to float32.

*Panels* are this package's own form, used where the processor has the instructions and the matrix fits. The bits of a row depend on that
row alone, for any number of rows. No library guarantees this, and strict numerics need it. A product of few rows takes as long as reading
the matrix once. Where there are no instructions for the dtype of a matrix, *wide panels* hold it: its weights are widened to float32 in
registers, and a result is rounded once.
"""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Sequence
from copy import copy
from functools import lru_cache
from pathlib import Path
from typing import Any, Generic, Literal, Self, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import handle_torch_function, has_torch_function_unary

try:
    from flowrt.operators.kernels.cpu import _panels
except ImportError:  # built without a compiler, or with one that does not support the instructions
    has_panels = False
else:
    has_panels = True
try:
    from flowrt.operators.kernels.cpu import _wide_panels
except ImportError:
    has_wide_panels, wide_levels = False, list[int]()
else:
    has_wide_panels, wide_levels = True, _wide_panels.levels()

MatrixT = TypeVar("MatrixT")
Form = Literal["plain", "packed", "widened", "panels", "wide panels"]

WIDEN_FROM_ROWS = 5  # with fewer rows, one plain pass over the matrix costs less than widening it
WIDENED_BYTES = 1 << 20  # size of a block of the matrix in float32, which fits the private cache of a core
PANEL_OUTPUTS, PANEL_INPUTS = 16, 32  # the dimensions of a matrix in panels are multiples of these


class Product(ABC):
    """x @ weight.T (+ bias) for a matrix [N, K] that is held in some form."""

    def __init__(self, weight_NK: Tensor) -> None:
        self.shape = weight_NK.shape[0], weight_NK.shape[1]

    @abstractmethod
    def __call__(self, x_TK: Tensor, bias_N: Tensor | None = None) -> Tensor:
        """y_TN in the dtype of x."""


class Plain(Product):
    """Holds the matrix unchanged and uses torch's product."""

    def __init__(self, weight_NK: Tensor) -> None:
        super().__init__(weight_NK)
        self.weight_NK = weight_NK

    def __call__(self, x_TK: Tensor, bias_N: Tensor | None = None) -> Tensor:
        return F.linear(x_TK, self.weight_NK, bias_N)


class Widened(Plain):
    """Holds a 16-bit matrix, multiplies several rows in float32, block by block, and rounds once."""

    def __call__(self, x_TK: Tensor, bias_N: Tensor | None = None) -> Tensor:
        if x_TK.shape[0] < WIDEN_FROM_ROWS:
            return F.linear(x_TK, self.weight_NK, bias_N)
        (num_outputs, num_inputs), wide_TK = self.shape, x_TK.float()
        y_TN = wide_TK.new_empty(x_TK.shape[0], num_outputs)
        rows = max(16, WIDENED_BYTES // (4 * num_inputs))
        block = wide_TK.new_empty(min(rows, num_outputs), num_inputs)
        for start in range(0, num_outputs, rows):
            weight = self.weight_NK[start : start + rows]
            torch.mm(wide_TK, block[: weight.shape[0]].copy_(weight).t(), out=y_TN[:, start : start + rows])
        if bias_N is not None:
            y_TN += bias_N
        return y_TN.to(x_TK.dtype)


class Copied(Product, Generic[MatrixT]):
    """A form that does not keep the matrix from which it is made. Its memory may be the caller's, such as memory that processes share."""

    @property
    @abstractmethod
    def num_bytes(self) -> int: ...

    @abstractmethod
    def write(self, matrix: MatrixT, memory: Tensor) -> None:
        """Write another matrix of this shape, in this form, into `memory` (uint8, `num_bytes`, aligned)."""

    @abstractmethod
    def over(self, memory: Tensor) -> Self:
        """The product of the matrix that `write` has written. `memory` is not copied."""


class Packed(Copied[Tensor]):
    """Holds the matrix in the memory order of oneDNN; the plain matrix is not kept."""

    def __init__(self, weight_NK: Tensor) -> None:
        super().__init__(weight_NK)
        self._packed = _reordered(weight_NK)
        self._memory: Tensor | None = None  # which the library does not own

    @property
    def num_bytes(self) -> int:
        return int(torch.ops.mkldnn._nbytes(self._packed))

    def write(self, weight_NK: Tensor, memory: Tensor) -> None:
        packed = _reordered(weight_NK)
        ctypes.memmove(memory.data_ptr(), torch.ops.mkldnn.data_ptr(packed), self.num_bytes)

    def over(self, memory: Tensor) -> Packed:
        made = copy(self)
        made._packed, made._memory = _packed_over(memory, self._packed), memory
        return made

    def __call__(self, x_TK: Tensor, bias_N: Tensor | None = None) -> Tensor:
        if not x_TK.shape[0]:
            return x_TK.new_empty(0, self.shape[0])
        y_TN: Tensor = torch.ops.mkldnn._linear_pointwise(x_TK, self._packed, bias_N, "none", [], "")
        return y_TN


class InPanels(Copied[MatrixT]):
    """A form in which one call multiplies rows by many matrices."""

    def __call__(self, x_TK: Tensor, bias_N: Tensor | None = None) -> Tensor:
        y_TN = panel_product(x_TK, self)
        return y_TN if bias_N is None else y_TN.add_(bias_N)

    @abstractmethod
    def checked(self, x_TK: Tensor) -> Tensor:
        """The rows as `into` takes them, contiguous. Raises ValueError for rows that do not fit, as the library does."""

    @abstractmethod
    def restored(self) -> MatrixT:
        """The matrix, copied out of its panels."""

    @property
    def result_dtype(self) -> torch.dtype | None:
        """The dtype of what `into` writes; None: that of `checked`."""
        return None

    @property
    @abstractmethod
    def address(self) -> int: ...

    @abstractmethod
    def into(self, x: int, y: int, num_rows: int, addresses: Sequence[int], counts: Sequence[int], num_threads: int) -> None:
        """Writes the products of the rows at address x to address y, without bias: the first counts[0] rows are multiplied by the matrix
        at addresses[0], and so on. All matrices have this one's form and shape. Raises ValueError if not all rows are counted."""


class Panels(InPanels[Tensor]):
    """Holds the matrix in panels of 16 outputs, column by column. A column is 32 bits: one float32 or two bfloat16 (_panels.c)."""

    def __init__(self, weight_NK: Tensor) -> None:
        super().__init__(weight_NK)
        self._panels = _in_panels(weight_NK).contiguous()
        self._kind, self._dtype = _kinds()[weight_NK.dtype], weight_NK.dtype

    @property
    def num_bytes(self) -> int:
        return self._panels.nbytes

    def write(self, weight_NK: Tensor, memory: Tensor) -> None:
        memory.view(torch.float32).view(self._panels.shape).copy_(_in_panels(weight_NK))

    def restored(self) -> Tensor:
        columns = self._panels.transpose(1, 2).reshape(self.shape[0], -1)
        return columns.contiguous().view(self._dtype)

    def over(self, memory: Tensor) -> Panels:
        made = copy(self)
        made._panels = memory.view(torch.float32).view(self._panels.shape)
        return made

    def checked(self, x_TK: Tensor) -> Tensor:
        if x_TK.dtype is not self._dtype or x_TK.dim() != 2 or x_TK.shape[1] != self.shape[1] or not x_TK.is_cpu:
            wanted = f"rows of {self.shape[1]} {self._dtype}"
            raise ValueError(f"{list(x_TK.shape)} {x_TK.dtype} on {x_TK.device} were given to a matrix on the CPU that takes {wanted}")
        return x_TK.contiguous()

    @property
    def address(self) -> int:
        return self._panels.data_ptr()

    def into(self, x: int, y: int, num_rows: int, addresses: Sequence[int], counts: Sequence[int], num_threads: int) -> None:
        _panels.products(self._kind, x, y, num_rows, self.shape[0], self._panels.shape[1], num_threads, addresses, counts)


class WidePanels(InPanels[MatrixT]):
    """Holds weights of any dtype of `wide_kinds` in panels of 16 outputs, column by column, and multiplies rows of any dtype in float32
    (_wide_panels.c). With `group` each output has a scale for so many columns, behind all weights."""

    _level = wide_levels[-1] if wide_levels else 0
    _in_column = 1  # inputs of an output that lie together

    def __init__(self, weight_NK: Tensor, group: int = 0) -> None:
        super().__init__(weight_NK)
        self._kind, self._dtype, self._group = wide_kinds()[weight_NK.dtype], weight_NK.dtype, group or self.shape[1]
        self._num_codes, self._num_groups = self.shape[0] * self.shape[1] * weight_NK.itemsize, -(-self.shape[1] // group) if group else 0
        self._memory = torch.empty(self.num_bytes, dtype=torch.uint8)

    @property
    def num_bytes(self) -> int:
        return self._num_codes + 4 * self.shape[0] * self._num_groups

    def over(self, memory: Tensor) -> Self:
        made = copy(self)
        made._memory = memory
        return made

    def checked(self, x_TK: Tensor) -> Tensor:
        if x_TK.dim() != 2 or x_TK.shape[1] != self.shape[1] or not x_TK.is_cpu:
            raise ValueError(f"{list(x_TK.shape)} on {x_TK.device} were given to a matrix on the CPU that takes rows of {self.shape[1]}")
        return self._convert(x_TK)

    def _convert(self, x_TK: Tensor) -> Tensor:
        return x_TK.float().contiguous()

    @property
    def address(self) -> int:
        return self._memory.data_ptr()

    def into(self, x: int, y: int, num_rows: int, addresses: Sequence[int], counts: Sequence[int], num_threads: int) -> None:
        _wide_panels.products(self._level, self._kind, x, y, num_rows, *self.shape, self._group, num_threads, addresses, counts)

    def _write(self, codes_NK: Tensor, memory: Tensor) -> None:
        self._codes(memory).copy_(codes_NK.unflatten(0, (-1, PANEL_OUTPUTS)).unflatten(2, (-1, self._in_column)).transpose(1, 2))

    def _read(self, memory: Tensor) -> Tensor:
        """The codes [N, K]."""
        return self._codes(memory).transpose(1, 2).reshape(self.shape).contiguous()

    def _codes(self, memory: Tensor) -> Tensor:
        """[N / PANEL_OUTPUTS, K / in column, PANEL_OUTPUTS, in column]."""
        return memory[: self._num_codes].view(self._dtype).view(-1, self.shape[1] // self._in_column, PANEL_OUTPUTS, self._in_column)


class FloatPanels(WidePanels[Tensor]):
    """Holds a matrix of floating-point numbers in wide panels."""

    def __init__(self, weight_NK: Tensor) -> None:
        super().__init__(weight_NK)
        self.write(weight_NK, self._memory)

    def write(self, weight_NK: Tensor, memory: Tensor) -> None:
        self._write(weight_NK, memory)

    def restored(self) -> Tensor:
        return self._read(self._memory)


def segment_products(x_PK: Tensor, like: InPanels[Any], addresses: Sequence[int], counts: Sequence[int]) -> Tensor:
    """y_PN: the first counts[0] rows multiplied by the matrix at addresses[0], and so on. All matrices are `like` this one."""
    rows_PK = like.checked(x_PK)
    y_PN = rows_PK.new_empty(len(rows_PK), like.shape[0], dtype=like.result_dtype)
    like.into(rows_PK.data_ptr(), y_PN.data_ptr(), len(rows_PK), addresses, counts, torch.get_num_threads())
    return y_PN


def panel_product(x_TK: Tensor, matrix: InPanels[Any]) -> Tensor:
    """y_TN in the dtype of x. Passes through torch's function overrides, so that a proof of strict blocks sees what is computed."""
    if has_torch_function_unary(x_TK):
        seen: Tensor = handle_torch_function(panel_product, (x_TK,), x_TK, matrix)
        return seen
    return segment_products(x_TK, matrix, (matrix.address,), (len(x_TK),)).to(x_TK.dtype)


FORMS: dict[Form, type[Plain | Widened | Packed | Panels | FloatPanels]] = {
    "plain": Plain,
    "widened": Widened,
    "packed": Packed,
    "panels": Panels,
    "wide panels": FloatPanels,
}
COPIED = frozenset(form for form, product in FORMS.items() if issubclass(product, Copied))


def form_for(dtype: torch.dtype, device_type: str = "cpu", *shapes: tuple[int, int]) -> Form:
    """The form for matrices of `dtype` and `shapes`. It follows from the machine without measurement: the same in every process and run."""
    if shapes and device_type == "cpu":
        if dtype in _kinds() and all(fits_panels(shape) for shape in shapes):
            return "panels"
        if _has_wide_panels(dtype) and all(shape[0] % PANEL_OUTPUTS == 0 for shape in shapes):
            return "wide panels"
    return _library_form(dtype, device_type)


def fits_panels(shape: tuple[int, int]) -> bool:
    """Whether a matrix [N, K] is made of whole panels and, in bfloat16, of whole tiles."""
    return shape[0] % PANEL_OUTPUTS == 0 and shape[1] % PANEL_INPUTS == 0


@lru_cache
def _kinds() -> dict[torch.dtype, int]:
    """Maps each dtype that this processor supports to its product kind in _panels.c."""
    if not has_panels:
        return {}
    dtypes = {_panels.FLOAT32: torch.float32, _panels.BFLOAT16_TILES: torch.bfloat16}
    return {dtypes[kind]: kind for kind in _panels.kinds()}


@lru_cache
def wide_kinds() -> dict[torch.dtype, int]:
    """Maps each dtype of weights that this processor can widen to its kind in _wide_panels.c."""
    if not wide_levels:
        return {}
    c = _wide_panels
    eights = {torch.int8: c.INT8, torch.float8_e4m3fn: c.FLOAT8}
    return eights | {torch.float16: c.FLOAT16, torch.bfloat16: c.BFLOAT16, torch.float32: c.FLOAT32}


@lru_cache
def _has_wide_panels(dtype: torch.dtype) -> bool:
    """Whether they are faster than the library: where it has no instructions for the dtype, and in float32 without AVX-512."""
    if dtype not in wide_kinds():
        return False
    return dtype not in _kinds() if dtype == torch.float32 else not (dtype == torch.bfloat16 and _has_bfloat16_instructions())


@lru_cache
def _library_form(dtype: torch.dtype, device_type: str) -> Form:
    if device_type != "cpu":
        return "plain"
    instructions = dtype == torch.float32 or (dtype == torch.bfloat16 and _has_bfloat16_instructions())
    if instructions and _can_pack(dtype):
        return "packed"
    return "widened" if dtype in (torch.bfloat16, torch.float16) and not instructions else "plain"


def shared_form(weight: Tensor) -> Form:
    """The form for a matrix that another module also reads, and that must therefore stay unchanged."""
    form = _library_form(weight.dtype, weight.device.type)
    return "plain" if form in COPIED else form


def lay_out(weight_NK: Tensor, form: Form | None = None) -> Product:
    """The matrix in `form`, or in the form that suits it. Packed and panels copy the matrix; other forms keep the tensor."""
    shape = (weight_NK.shape[0], weight_NK.shape[1])
    return FORMS[form or form_for(weight_NK.dtype, weight_NK.device.type, shape)](weight_NK)


def can_share(form: Form) -> bool:
    """Whether matrices in a form of COPIED can lie in memory that this process does not own."""
    return form != "packed" or _can_pack_elsewhere()


def _in_panels(weight_NK: Tensor) -> Tensor:
    """The matrix as [N / PANEL_OUTPUTS, columns, PANEL_OUTPUTS] in float32: a view."""
    columns = weight_NK.contiguous().view(torch.float32)
    return columns.view(-1, PANEL_OUTPUTS, columns.shape[1]).transpose(1, 2)


def _reordered(weight_NK: Tensor) -> Tensor:
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight_NK.contiguous())
    return packed


def _packed_over(memory: Tensor, like: Tensor) -> Tensor:
    """A packed matrix of the shape and order of `like`, in `memory`. The calls are those of torch's own ahead-of-time compiler."""
    library, order = _torch_library(), torch.ops.mkldnn._get_mkldnn_serialized_md(like)
    made, sizes, strides = ctypes.c_void_p(), (ctypes.c_int64 * 2)(*like.shape), (ctypes.c_int64 * 2)(like.shape[1], 1)
    dtype = getattr(library, f"aoti_torch_dtype_{str(like.dtype).removeprefix('torch.')}")()
    failed = library.aoti_torch_create_tensor_from_blob_v2(
        *(ctypes.c_void_p(memory.data_ptr()), ctypes.c_int64(2), sizes, strides, ctypes.c_int64(0), ctypes.c_int32(dtype)),
        *(ctypes.c_int32(library.aoti_torch_device_type_cpu()), ctypes.c_int32(0), ctypes.byref(made)),
        *(ctypes.c_int32(library.aoti_torch_layout__mkldnn()), ctypes.c_void_p(order.data_ptr()), ctypes.c_int64(order.numel())),
    )
    if failed:
        raise RuntimeError("torch made no packed matrix in given memory")
    capsule = ctypes.pythonapi.PyCapsule_New
    capsule.restype, capsule.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    packed: Tensor = torch._C._aoti.alloc_tensor_by_stealing_from_void_ptr(capsule(made, None, None))
    return packed


@lru_cache
def _torch_library() -> ctypes.CDLL:
    """The library of torch that has the C calls of its compiler. Raises OSError where there is none."""
    return ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))


@lru_cache
def _can_pack_elsewhere() -> bool:
    """Whether this build of torch computes correct products with a packed matrix in memory that it does not own."""
    weight, x = torch.arange(2048, dtype=torch.float32).view(32, 64), torch.ones(2, 64)
    try:
        packed = Packed(weight)
        memory = torch.empty(packed.num_bytes, dtype=torch.uint8)
        packed.write(weight.neg(), memory)
        return torch.equal(packed.over(memory)(x), -packed(x))
    except (AttributeError, OSError, RuntimeError):
        return False


def _can_pack(dtype: torch.dtype) -> bool:
    """Whether this build of torch packs matrices and computes correct products with them. The calls are those of torch's own compiler."""
    if not torch.backends.mkldnn.is_available():
        return False
    weight, x = torch.eye(32, dtype=dtype), torch.arange(64, dtype=dtype).view(2, 32)
    try:
        return torch.equal(Packed(weight)(x), x)
    except (AttributeError, RuntimeError):
        return False


def _has_bfloat16_instructions() -> bool:
    names = ("_is_avx512_bf16_supported", "_is_amx_tile_supported", "_is_arm_bf16_supported")
    return any(bool(getattr(torch.cpu, name)()) for name in names if hasattr(torch.cpu, name))
