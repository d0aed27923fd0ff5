"""Finds the safetensors files of a model directory and checks their headers: what is knowable before any weight is read. Free of torch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cache
from math import prod
from pathlib import Path
from typing import Annotated

import msgspec

from flowrt.operators.families.config_file import read_config_file, regular_file_bytes
from flowrt.operators.families.family import parts_to_read
from flowrt.operators.families.registry import family_named, read_model_config
from flowrt.operators.model_config import ModelError

INDEX_NAME = "model.safetensors.index.json"
MAX_HEADER_BYTES = 100_000_000  # the format's own bound
MAX_DIMENSIONS, MAX_SIZE = 8, 1 << 40  # of a stored tensor; checked before sizes are multiplied
STORED_BYTES = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2}  # of one number, by the dtypes that can be read


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """The location of one tensor: file, first byte, dtype and shape."""

    path: Path
    offset_bytes: int
    stored_dtype: str  # as the file spells it, "F32", "BF16", ...
    shape: tuple[int, ...]


_Size = Annotated[int, msgspec.Meta(ge=0, le=MAX_SIZE)]


class _HeaderEntry(msgspec.Struct):
    dtype: str
    shape: Annotated[tuple[_Size, ...], msgspec.Meta(max_length=MAX_DIMENSIONS)]
    data_offsets: tuple[_Size, _Size]


def tensor_files(directory: Path, header: Callable[[Path], Collection[str]]) -> dict[str, Path]:
    """Tensor name -> its file, by the index or, without one, by the `header` of each file.

    Raises ModelError when there is no file, the index is broken, or two files hold the same tensor.
    """
    index_path = directory / INDEX_NAME
    if index_path.exists():
        return _read_index(index_path)
    paths = sorted(directory.glob("*.safetensors"))
    if not paths:
        raise ModelError(f"{directory} holds no *.safetensors file; weights in that format are needed")
    files: dict[str, Path] = {}
    for path in paths:
        for name in header(path):
            if name in files:
                both = f"{files[name].name} and {path.name}"
                raise ModelError(f"{directory}: tensor {name} is in {both}; an index ({INDEX_NAME}) must name the file to use")
            files[name] = path
    return files


def named_place(directory: Path, files: Mapping[str, Path]) -> str:
    """Where a tensor that is not among `files` should be, for errors: the only file, the index, or the directory."""
    index_path = directory / INDEX_NAME
    paths = {index_path} if index_path.exists() else set(files.values())
    return str(paths.pop() if len(paths) == 1 else directory)


def check_files(directory: Path) -> None:
    """Raises ModelError for a weight file that is missing or cut off, for a tensor of the index that its file does not hold, and for a
    tensor of the model that no file holds.
    """
    header = cache(read_header)
    files = tensor_files(directory, header)
    for name, path in files.items():
        if name not in header(path):
            raise ModelError(f"tensor {name} is missing from {path}, which {INDEX_NAME} names for it; copy both files again")
    config = read_model_config(directory)
    family, place = family_named(config.family), named_place(directory, files)
    for part, layers in parts_to_read(config).items():
        for layer in layers:
            for expert in range(config.num_experts if part.startswith("expert_") else 1):
                family.find_layout(part, layer, expert, files, place)


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


def read_header(path: Path) -> dict[str, StoredTensor]:
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
        item_bytes = STORED_BYTES.get(entry.dtype)  # None: masks or quantized data, refused only when a part asks for them
        num_bytes = end - begin if item_bytes is None else prod(entry.shape) * item_bytes
        if end - begin != num_bytes or data_start + end > file_bytes:
            where = f"bytes {begin} to {end} do not fit its shape or the file's {file_bytes} bytes"
            raise ModelError(f"{path}: tensor {name}: {where}; copy the file again")
        tensors[name] = StoredTensor(path, data_start + begin, entry.dtype, entry.shape)
    return tensors
