"""Reads from a Hugging Face directory exactly the tensors, or parts of tensors, that a process holds.

It reads safetensors files, with or without an index, and finds the parts of a model under the names that its family defines.

Files are read with positioned reads straight into the memory where the weights stay. The safetensors package maps files instead. Mapped
pages count as resident until they are unmapped, so a loading server would use twice the memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Annotated

import msgspec
import torch
from torch import Tensor

from flowrt.operators.families.config_file import read_config_file, regular_file_bytes
from flowrt.operators.families.family import PARTS, Piece
from flowrt.operators.families.registry import family_named
from flowrt.operators.model_config import DTYPES, ModelConfig, ModelError

INDEX_NAME = "model.safetensors.index.json"
MAX_HEADER_BYTES = 100_000_000  # the format's own bound
MAX_DIMENSIONS, MAX_SIZE = 8, 1 << 40  # of a stored tensor; checked before sizes are multiplied
# Tensors that are converted pass through one buffer of this size (more, where a row or a transposed piece needs it).
SCRATCH_BYTES = 4 << 20

STORED_DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
TORCH_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in DTYPES}


def torch_dtype(config: ModelConfig) -> torch.dtype:
    """The dtype that weights are held in."""
    return TORCH_DTYPES[config.dtype]


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """The location of one tensor: file, first byte, dtype and shape."""

    path: Path
    offset_bytes: int
    stored_dtype: str  # as the file spells it, "F32", "BF16", ...
    shape: tuple[int, ...]

    @property
    def dtype(self) -> torch.dtype:
        return STORED_DTYPES[self.stored_dtype]


_Size = Annotated[int, msgspec.Meta(ge=0, le=MAX_SIZE)]


class _HeaderEntry(msgspec.Struct):
    dtype: str
    shape: Annotated[tuple[_Size, ...], msgspec.Meta(max_length=MAX_DIMENSIONS)]
    data_offsets: tuple[_Size, _Size]


class Checkpoint:
    """The tensors of a model directory, by name. Nothing stays open or mapped between reads."""

    def __init__(self, directory: Path) -> None:
        """Finds the files. Raises ModelError when there are none or the index is broken. Headers are read when first needed."""
        self.directory = Path(directory)
        self._tensors: dict[Path, dict[str, StoredTensor]] = {}
        # One buffer for all conversions. With one buffer each, the allocator keeps holes between weights, a fifth of the loaded size.
        self._scratch = torch.empty(0, dtype=torch.uint8)
        index_path = self.directory / INDEX_NAME
        if index_path.exists():
            self._files = _read_index(index_path)
            return
        paths = sorted(self.directory.glob("*.safetensors"))
        if not paths:
            raise ModelError(f"{self.directory} holds no *.safetensors file; weights in that format are needed")
        self._files = {}
        for path in paths:
            for name in self._header(path):
                if name in self._files:
                    both = f"{self._files[name].name} and {path.name}"
                    raise ModelError(f"{self.directory}: tensor {name} is in {both}; an index ({INDEX_NAME}) must name the file to use")
                self._files[name] = path

    def stored(self, name: str) -> StoredTensor:
        """The location of tensor `name`. Raises ModelError when it is missing or its dtype is not supported."""
        path = self._files.get(name)
        if path is None:
            raise ModelError(f"tensor {name} is missing from the checkpoint in {self.directory}")
        tensor = self._header(path).get(name)
        if tensor is None:
            raise ModelError(f"tensor {name} is missing from {path}, which {INDEX_NAME} names for it")
        if tensor.stored_dtype not in STORED_DTYPES:
            raise ModelError(f"tensor {name} in {path} is stored as {tensor.stored_dtype}; {', '.join(STORED_DTYPES)} are supported")
        return tensor

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

        Raises ModelError, naming the tensor and the file, when it is missing or has another shape.
        """
        family = family_named(config.family)
        layouts = family.parts.get(part)
        if not layouts:
            raise ModelError(f"model family {family.name} does not define the tensors of part {part!r} ({PARTS.get(part, 'unknown part')})")
        found = [layout for layout in layouts if all(_fill(piece, layer, expert) in self._files for piece in layout)]
        if not found:
            missing = [_fill(piece, layer, expert) for piece in layouts[0] if _fill(piece, layer, expert) not in self._files]
            raise ModelError(f"tensor {missing[0]} ({part}) is missing from the checkpoint in {self.directory}")
        if out is None:
            out = torch.empty(shape, dtype=dtype or torch_dtype(config), device=device)
        start = 0
        for piece in found[0]:
            start += self._read_piece(_fill(piece, layer, expert), piece, config.num_experts, expert, shape, out, start)
        if start != shape[0]:
            names = " + ".join(_fill(piece, layer, expert) for piece in found[0])
            raise ModelError(f"{names} in {self.directory} have {start} rows; config.json requires {shape[0]}")
        return out

    def _read_piece(self, name: str, piece: Piece, num_experts: int, expert: int, shape: tuple[int, ...], out: Tensor, start: int) -> int:
        """Read one piece into out[start:]; returns its number of rows."""
        stored = self.stored(name)
        taken, offset = stored.shape, stored.offset_bytes
        if piece.expert is not None:
            if not taken or taken[0] % num_experts or (piece.expert == "index" and taken[0] != num_experts):
                raise ModelError(f"tensor {name} in {stored.path} has shape {list(taken)}, which is not that of {num_experts} experts")
            taken = taken[1:] if piece.expert == "index" else (taken[0] // num_experts, *taken[1:])
            offset += expert * prod(taken) * stored.dtype.itemsize
        placed = tuple(reversed(taken)) if piece.transpose else taken
        if len(placed) != len(shape) or placed[1:] != shape[1:] or start + placed[0] > shape[0]:
            fits = f"does not fit the {list(shape)} that config.json requires"
            raise ModelError(f"tensor {name} in {stored.path} has shape {list(stored.shape)}, which {fits}")
        destination = out[start : start + placed[0]]
        if piece.transpose:
            buffer = self._buffer(taken, stored.dtype)
            _read_bytes(stored.path, offset, buffer)
            destination.copy_(buffer.t())
        elif destination.dtype == stored.dtype and destination.device.type == "cpu" and destination.is_contiguous():
            _read_bytes(stored.path, offset, destination)
        else:
            self._read_converted(stored, offset, destination)
        return placed[0]

    def _read_converted(self, stored: StoredTensor, offset: int, destination: Tensor) -> None:
        row_bytes = prod(destination.shape[1:]) * stored.dtype.itemsize
        rows = max(1, SCRATCH_BYTES // max(1, row_bytes))
        for first in range(0, destination.shape[0], rows):
            chunk = destination[first : first + rows]
            buffer = self._buffer(tuple(chunk.shape), stored.dtype)
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
            self._tensors[path] = _read_header(path)
        return self._tensors[path]


def _fill(piece: Piece, layer: int, expert: int) -> str:
    return piece.name.format(layer=layer, expert=expert)


def _read_index(path: Path) -> dict[str, Path]:
    weight_map = read_config_file(path).mapping("weight_map")
    files: dict[str, Path] = {}
    for name, file_name in weight_map.items():
        if not isinstance(file_name, str) or Path(file_name).name != file_name:
            raise ModelError(f"{path}: weight_map: {name} is in {file_name!r}; the name of a file beside the index is needed")
        files[name] = path.parent / file_name
    if not files:
        raise ModelError(f"{path}: weight_map: is missing or empty; it must map tensor names to files")
    return files


def _read_header(path: Path) -> dict[str, StoredTensor]:
    """The header of one safetensors file: 8 bytes of length, then JSON, then the data. Everything is checked here, once."""
    try:
        file_bytes = regular_file_bytes(path)
        with path.open("rb") as file:
            header_bytes = int.from_bytes(file.read(8), "little")
            if file_bytes < 8 or header_bytes > min(MAX_HEADER_BYTES, file_bytes - 8):
                sizes = f"its header would be {header_bytes} bytes of {file_bytes}"
                raise ModelError(f"{path} is not a safetensors file, or was cut off: {sizes}; copy it again")
            entries = msgspec.json.decode(file.read(header_bytes), type=dict[str, msgspec.Raw])
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from error
    except ModelError:
        raise
    except RecursionError:
        raise ModelError(f"{path} is not a safetensors file: its header is nested too deeply") from None
    except ValueError as error:
        raise ModelError(f"{path} is not a safetensors file: its header is not a JSON object ({error})") from error
    data_start = 8 + header_bytes
    tensors: dict[str, StoredTensor] = {}
    entries.pop("__metadata__", None)
    for name, raw in entries.items():
        try:
            entry = msgspec.json.decode(raw, type=_HeaderEntry)
        except ValueError as error:
            bounds = f"at most {MAX_DIMENSIONS} dimensions, and whole numbers from 0 to {MAX_SIZE}"
            raise ModelError(f"{path}: tensor {name}: its shape and data_offsets must be lists of {bounds} ({error})") from None
        begin, end = entry.data_offsets
        dtype = STORED_DTYPES.get(entry.dtype)  # None: masks or quantized data, refused only when a part asks for them
        num_bytes = end - begin if dtype is None else prod(entry.shape) * dtype.itemsize
        if end - begin != num_bytes or data_start + end > file_bytes:
            where = f"bytes {begin} to {end} do not fit its shape or the file's {file_bytes} bytes"
            raise ModelError(f"{path}: tensor {name}: {where}; copy the file again")
        tensors[name] = StoredTensor(path, data_start + begin, entry.dtype, entry.shape)
    return tensors


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
