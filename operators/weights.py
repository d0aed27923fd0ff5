"""Reads from a Hugging Face directory exactly the tensors, or parts of tensors, that a process holds.

It reads safetensors files, with or without an index, and finds the parts of a model under the names that its family defines.

Files are read with positioned reads straight into the memory where the weights stay. The safetensors package maps files instead. Mapped
pages count as resident until they are unmapped, so a loading server would use twice the memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flowrt.operators.checkpoint_files import (
    MXFP4_BYTES,
    Mxfp4Tensor,
    QuantizedTensor,
    StoredTensor,
    check_rows,
    find_stored,
    is_scale,
    kept_as,
    named_place,
    piece_shape,
    read_header,
    tensor_files,
)
from flowrt.operators.families.config_file import read_config_file
from flowrt.operators.families.family import Piece, part_bytes
from flowrt.operators.families.registry import family_named
from flowrt.operators.model_config import DTYPES, ModelConfig, ModelError
from flowrt.operators.restored_weights import QUANTIZED_DTYPES, QuantizedMatrix, restored_mxfp4, restored_rows
from flowrt.operators.weight_memory import WeightMemory

# Tensors that are converted pass through one buffer of this size (more, where a row or a transposed piece needs it).
SCRATCH_BYTES = 4 << 20

# Not checked for NaN and infinity when they are read: experts, most of all bytes, whose results are checked instead, and what has a row
# per token, as those of tokens that do not exist may hold anything. Nor are models in transformers, which reads tensors by their names.
UNCHECKED_PARTS = ("embedding", "head", "expert_gate_up", "expert_down")

STORED_DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
TORCH_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in DTYPES}


def torch_dtype(config: ModelConfig) -> torch.dtype:
    """The dtype that weights are held in."""
    return TORCH_DTYPES[config.dtype]


Hold = Callable[[str, tuple[int, ...], torch.dtype, Callable[[Tensor], None], torch.device | str], Tensor]


def allocate(
    name: str, shape: tuple[int, ...], dtype: torch.dtype, fill: Callable[[Tensor], None], device: torch.device | str = "cpu"
) -> Tensor:
    """A newly allocated tensor that `fill` has filled."""
    out = torch.empty(shape, dtype=dtype, device=device)
    fill(out)
    return out


class Checkpoint:
    """The tensors of a model directory, by name. Nothing stays open or mapped between reads."""

    memory: WeightMemory | None = None

    def __init__(
        self, directory: Path, memory: WeightMemory | None = None, on_read: Callable[[int], None] = lambda num_bytes: None
    ) -> None:
        """Finds the files. Raises ModelError when there are none or the index is broken. Headers are read when first needed.

        `memory` holds weights on the CPU that other processes of the host use too. `on_read` is called with the bytes
        of each weight that has been read, as the model holds it.
        """
        self.directory, self.memory, self._on_read = Path(directory), memory, on_read
        self._tensors: dict[Path, dict[str, StoredTensor]] = {}
        # One buffer for all conversions. With one buffer each, the allocator keeps holes between weights, a fifth of the loaded size.
        self._scratch = torch.empty(0, dtype=torch.uint8)
        self._files = tensor_files(self.directory, self._header)
        self._place = named_place(self.directory, self._files)

    def stored(self, name: str) -> StoredTensor:
        """The location of tensor `name`. Raises ModelError when it is missing."""
        if name not in self._files:
            raise ModelError(f"tensor {name} is missing from the checkpoint in {self.directory}")
        return find_stored(name, self._files, self._header)

    def has_part(self, config: ModelConfig, part: str) -> bool:
        """Whether the checkpoint holds a part of the whole model."""
        return family_named(config.family).has_part(part, self._files)

    def read_part(
        self,
        config: ModelConfig,
        part: str,
        shape: tuple[int, ...],
        *,
        layer: int = 0,
        expert: int = 0,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Part `part` (families.family.PARTS) of `shape`: in `out` if given, else newly allocated, in `dtype` or the config's.

        Raises ModelError, naming the tensor and the file, when it is missing, has another shape, or holds NaN (see UNCHECKED_PARTS).
        """
        family = family_named(config.family)
        layout = family.find_layout(part, layer, expert, self._files, self._place)
        if out is None:
            out = torch.empty(shape, dtype=dtype or torch_dtype(config), device=device)
        start = 0
        for piece in layout:
            name = piece.tensor(layer, expert)
            num_rows = self._read_piece(name, piece, config.num_experts, expert, shape, out, start)
            if part not in UNCHECKED_PARTS:
                self._check_finite(name, out[start : start + num_rows])
            start += num_rows
        check_rows(start, shape, layout, layer, expert, self.directory)
        self._on_read(part_bytes(config, part, shape))
        return out

    def _check_finite(self, name: str, rows: Tensor) -> None:
        if math.isfinite(rows.sum()) or bool(rows.isfinite().all()):  # the sum of large numbers may not be
            return
        stored = self.stored(name)
        is_narrower = STORED_DTYPES.get(stored.stored_dtype) not in (None, rows.dtype)
        remedy = "copy the model's files again" + (", or take a wider model.dtype" if is_narrower else "")
        raise ModelError(f"{stored.path}: {name} has values that are not finite in {str(rows.dtype).removeprefix('torch.')}; {remedy}")

    def read_codes(self, config: ModelConfig, part: str, shape: tuple[int, ...], *, layer: int, expert: int) -> QuantizedMatrix | None:
        """A matrix of an expert as it is stored, if that is the config's `expert_weights`, else None. Raises ModelError as read_part."""
        layout = family_named(config.family).find_layout(part, layer, expert, self._files, self._place)
        codes, scales, groups, start = list[Tensor](), list[Tensor](), set[int](), 0
        for piece in layout:
            name = piece.tensor(layer, expert)
            stored = self.stored(name)
            if not isinstance(stored, QuantizedTensor) or kept_as(stored, piece) != config.expert_weights:
                return None
            taken = piece_shape(stored, name, piece, config.num_experts, shape, start)
            start += taken[0]
            offset, scales_SC, first = self._matrix(stored, piece, taken, expert)
            codes.append(torch.empty(taken, dtype=QUANTIZED_DTYPES[stored.stored_dtype]))
            _read_bytes(stored.path, offset, codes[-1])
            block = stored.block(taken[-1])
            scales.append(scales_SC[torch.arange(first, first + taken[0]) // block[0]])
            groups.add(block[1])
        check_rows(start, shape, layout, layer, expert, self.directory)
        self._on_read(part_bytes(config, part, shape))
        return QuantizedMatrix(torch.cat(codes), torch.cat(scales), groups.pop()) if len(groups) == 1 else None

    def tensor_names(self) -> tuple[str, ...]:
        """The tensors of the checkpoint, without the scales of quantized ones."""
        return tuple(name for name in self._files if not is_scale(name, self._files))

    def config_values(self) -> dict[str, Any]:
        """The keys and values of config.json."""
        return dict(read_config_file(self.directory / "config.json").values)

    def tensor_form(
        self, name: str, rows: Sequence[int] | None = None, held: torch.dtype | None = None
    ) -> tuple[tuple[int, ...], torch.dtype]:
        """Shape and dtype of what `read_tensor` returns. Raises ModelError for a tensor that is not there or cannot be read."""
        stored = self.stored(name)
        if stored.stored_dtype == "I32":
            raise ModelError(f"tensor {name} in {stored.path} is packed, which is not restored for models in transformers")
        if not isinstance(stored, Mxfp4Tensor):
            piece_shape(stored, name, Piece(name), 1, stored.shape, 0)
        shape = stored.shape if rows is None else (len(rows), *stored.shape[1:])
        return shape, STORED_DTYPES.get(stored.stored_dtype, held or torch.bfloat16)

    def read_tensor(self, name: str, rows: Sequence[int] | None = None, held: torch.dtype | None = None) -> Tensor:
        """A whole tensor, or some rows of its first dimension, as stored. `held`: what the model holds it in, if that is another dtype. A
        quantized tensor is restored to that, or to bfloat16."""
        shape, dtype = self.tensor_form(name, rows, held)
        stored, out, item_bytes = self.stored(name), torch.empty(shape, dtype=dtype), (held or dtype).itemsize
        if rows is None and not isinstance(stored, Mxfp4Tensor):
            self._read_piece(name, Piece(name), 1, 0, shape, out, 0)
            self._on_read(out.numel() * item_bytes)
            return out
        for place, row in zip(out, range(stored.shape[0]) if rows is None else rows, strict=True):
            if isinstance(stored, Mxfp4Tensor):
                self._read_mxfp4(stored, row, place)
            else:
                self._read_piece(name, Piece(name, expert="index"), stored.shape[0], row, stored.shape[1:], place, 0)
            self._on_read(place.numel() * item_bytes)
        return out

    def hold(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype, fill: Callable[[Tensor], None], device: torch.device | str = "cpu"
    ) -> Tensor:
        """A tensor that `fill` fills: in the shared memory if there is one and no process has filled it before, else newly allocated."""
        if self.memory is None:
            return allocate(name, shape, dtype, fill, device)
        return self.memory.hold(name, shape, dtype, fill)

    def note(self, name: str, find: Callable[[], Any]) -> Any:
        """The JSON value that `find` finds, or that it found in the process that filled the shared memory."""
        return find() if self.memory is None else self.memory.note(name, find)

    def _read_piece(self, name: str, piece: Piece, num_experts: int, expert: int, shape: tuple[int, ...], out: Tensor, start: int) -> int:
        """Read one piece into out[start:]; returns its number of rows."""
        stored = self.stored(name)
        taken, offset = piece_shape(stored, name, piece, num_experts, shape, start), stored.offset_bytes
        if isinstance(stored, QuantizedTensor):
            self._read_restored(stored, piece, taken, expert, out[start:])
            return taken[-1] if piece.transpose else taken[0]
        if piece.expert is not None:
            offset += expert * prod(taken) * STORED_DTYPES[stored.stored_dtype].itemsize
        placed = tuple(reversed(taken)) if piece.transpose else taken
        destination = out[start : start + placed[0]]
        if piece.transpose:
            buffer = self._buffer(taken, STORED_DTYPES[stored.stored_dtype])
            _read_bytes(stored.path, offset, buffer)
            destination.copy_(buffer.t())
        elif destination.dtype == STORED_DTYPES[stored.stored_dtype] and destination.device.type == "cpu" and destination.is_contiguous():
            _read_bytes(stored.path, offset, destination)
        else:
            self._read_converted(stored, offset, destination)
        if piece.added:
            destination += piece.added
        return placed[0]

    def _read_restored(self, stored: QuantizedTensor, piece: Piece, taken: tuple[int, ...], expert: int, out: Tensor) -> None:
        """Restore a matrix, or an expert's, of a quantized checkpoint: rows by rows, in float32, into the beginning of `out`."""
        rows, columns = taken
        offset, scales, first = self._matrix(stored, piece, taken, expert)
        place = out[:columns].t() if piece.transpose else out[:rows]
        dtype, block = QUANTIZED_DTYPES[stored.stored_dtype], stored.block(columns)
        row_bytes = stored.shape[-1] * dtype.itemsize
        step = max(1, SCRATCH_BYTES // (16 * columns))  # so that its temporaries leave no holes between weights
        for start in range(0, rows, step):
            raw = self._buffer((min(step, rows - start), stored.shape[-1]), dtype)
            _read_bytes(stored.path, offset + start * row_bytes, raw)
            place[start : start + len(raw)].copy_(restored_rows(raw, scales, first + start, block, columns))
        if piece.added:
            place += piece.added

    def _matrix(self, stored: QuantizedTensor, piece: Piece, taken: tuple[int, ...], expert: int) -> tuple[int, Tensor, int]:
        """First byte of a matrix, or an expert's, the scales of the stored matrix of which it is a part, and its first row there."""
        row_bytes = stored.shape[-1] * QUANTIZED_DTYPES[stored.stored_dtype].itemsize
        offset = stored.offset_bytes + (expert * taken[0] if piece.expert is not None else 0) * row_bytes
        scales = self._scales(stored, expert if piece.expert == "index" else 0)
        return offset, scales, expert * taken[0] if piece.expert == "rows" else 0

    def _read_mxfp4(self, stored: Mxfp4Tensor, row: int, out_CR: Tensor) -> None:
        """Restore the matrix of one expert."""
        num_rows, num_blocks = stored.shape[2], stored.num_blocks
        exponents_RG = torch.empty(num_rows, num_blocks, dtype=torch.uint8)
        _read_bytes(stored.scales.path, stored.scales.offset_bytes + row * exponents_RG.nbytes, exponents_RG)
        row_bytes = num_blocks * MXFP4_BYTES
        step = max(1, SCRATCH_BYTES // (64 * row_bytes))
        for start in range(0, num_rows, step):
            blocks_RGB = self._buffer((min(step, num_rows - start), num_blocks, MXFP4_BYTES), torch.uint8)
            _read_bytes(stored.path, stored.offset_bytes + (row * num_rows + start) * row_bytes, blocks_RGB)
            end = start + len(blocks_RGB)
            out_CR[:, start:end].copy_(restored_mxfp4(blocks_RGB, exponents_RG[start:end]).t())

    def _scales(self, stored: QuantizedTensor, matrix: int) -> Tensor:
        """The scales of one matrix of a quantized tensor: float32 [scales along the rows, along the columns]."""
        of, shape = stored.scales, stored.matrix_scales
        found = torch.empty(shape, dtype=STORED_DTYPES[of.stored_dtype])
        _read_bytes(of.path, of.offset_bytes + matrix * found.nbytes, found)
        return found.to(torch.float32)

    def _read_converted(self, stored: StoredTensor, offset: int, destination: Tensor) -> None:
        row_bytes = prod(destination.shape[1:]) * STORED_DTYPES[stored.stored_dtype].itemsize
        rows = max(1, SCRATCH_BYTES // max(1, row_bytes))
        for first in range(0, destination.shape[0], rows):
            chunk = destination[first : first + rows]
            buffer = self._buffer(tuple(chunk.shape), STORED_DTYPES[stored.stored_dtype])
            _read_bytes(stored.path, offset + first * row_bytes, buffer)
            chunk.copy_(buffer)

    def _buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A tensor in the scratch buffer, valid until the next one."""
        num_bytes = prod(shape) * dtype.itemsize
        if self._scratch.numel() < num_bytes:
            self._scratch = torch.empty(max(SCRATCH_BYTES, num_bytes), dtype=torch.uint8)
        return self._scratch[:num_bytes].view(dtype).view(shape)

    def _header(self, path: Path) -> dict[str, StoredTensor]:
        if path not in self._tensors:
            self._tensors[path] = read_header(path)
        return self._tensors[path]


def _read_bytes(path: Path, offset_bytes: int, destination: Tensor) -> None:
    """Fill a contiguous CPU tensor from a file."""
    if destination.numel() == 0:
        return
    left = destination.reshape(-1).view(torch.uint8).numpy().data
    try:
        with path.open("rb", buffering=0) as file:
            file.seek(offset_bytes)
            while left:
                count = file.readinto(left)
                if not count:
                    raise ModelError(f"{path} ends early; copy it again")
                left = left[count:]
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from error
