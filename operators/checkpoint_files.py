"""Finds the safetensors files of a model directory and checks their headers: what is knowable before any weight is read. Free of torch."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Container, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from math import prod
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec

from flowrt.operators.families.config_file import LFS_HEAD, LFS_PROBLEM, read_config_file, regular_file_bytes
from flowrt.operators.families.family import Layout, Piece, part_shapes, parts_to_read
from flowrt.operators.families.quantization import refuse_quantized_tensors
from flowrt.operators.families.registry import Implementation, family_named, note_on_end_tokens, read_model_config
from flowrt.operators.model_config import EXPERT_PARTS, KeptWeights, ModelConfig, ModelError

T = TypeVar("T")
INDEX_NAME, WHOLE_NAME = "model.safetensors.index.json", "model.safetensors"
MAX_HEADER_BYTES = 100_000_000  # the format's own bound
MAX_DIMENSIONS, MAX_SIZE = 8, 1 << 40  # of a stored tensor; checked before sizes are multiplied
STORED_BYTES = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2}  # of one number, by the dtypes that can be read
QUANTIZED_BYTES = {"F8_E4M3": 1, "F8_E5M2": 1, "I8": 1, "I32": 4}  # the same of quantized weights, which scales belong to; I32: several
KEPT_AS: dict[KeptWeights, str] = {"int8": "I8", "fp8": "F8_E4M3"}  # how files spell the 8 bits that weights can be kept in
_ITEM_BYTES = STORED_BYTES | QUANTIZED_BYTES | {"U8": 1}
PACKED = "_packed"  # ends the name of a tensor whose numbers of I32 hold several of 4 or 8 bits, as compressed-tensors packs them
MXFP4_BLOCKS, MXFP4_SCALES = "_blocks", "_scales"  # end the names of pairs of 4-bit floats, and of the exponents of their blocks
MXFP4_COLUMNS, MXFP4_BYTES = 32, 16  # of a block
_SCALES = ("_scale_inv", "_scale")  # end the name of the scales of a tensor; the first one of 8-bit floats only
_UNRESTORED = {  # end the names of what is not restored
    "_zero_point": "zero points",
    "_g_idx": "columns in another order",
    "_scale_2": "scales of scales",
}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """The location of one tensor: file, first byte, dtype and shape."""

    path: Path
    offset_bytes: int
    stored_dtype: str  # as the file spells it, "F32", "BF16", ...
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class QuantizedTensor(StoredTensor):
    """One or more matrices, in the first dimension, with their scales."""

    scales: StoredTensor

    @property
    def matrix_scales(self) -> tuple[int, int]:
        """How many scales a matrix has along its rows, and along its columns. Raises ModelError."""
        of, shape, leading = self.scales, self.scales.shape, self.shape[:-2]
        if shape in ((), (1,)) and not leading:
            return 1, 1
        if shape == self.shape[-2:-1] and shape[0] > 0:
            return shape[0], 1
        if len(shape) == len(self.shape) > 1 and shape[:-2] == leading and min(shape[-2:]) > 0:
            return shape[-2], shape[-1]
        raise ModelError(f"scales of shape {list(shape)} in {of.path} do not belong to a tensor of shape {list(self.shape)}")

    def block(self, columns: int) -> tuple[int, int]:
        """Rows and columns of a matrix that share a scale. Blocks of 8-bit floats have sizes that are powers of two, and the last one may
        be smaller; others have equal parts. Raises ModelError when the scales fit no such block."""
        return self._block(self.shape[-2], self.matrix_scales[0]), self._block(columns, self.matrix_scales[1])

    def _block(self, size: int, num_scales: int) -> int:
        if num_scales == 1:
            return size
        is_float = self.stored_dtype.startswith("F8")
        found = 1 << (-(-size // num_scales) - 1).bit_length() if is_float else size // num_scales
        if not found or -(-size // found) != num_scales or (size % found and not is_float):
            raise ModelError(f"{num_scales} scales in {self.path} do not cut {size} rows or columns into blocks")
        return found


@dataclass(frozen=True, slots=True)
class Mxfp4Tensor(StoredTensor):
    """Matrices in blocks of 4-bit floats, one per expert, as gpt-oss stores them. `shape` is that of the restored tensor, [E, columns,
    rows]: the library's module multiplies from the other side."""

    scales: StoredTensor

    @property
    def num_blocks(self) -> int:
        """Of a row."""
        return self.shape[1] // MXFP4_COLUMNS


_Size = Annotated[int, msgspec.Meta(ge=0, le=MAX_SIZE)]


class _HeaderEntry(msgspec.Struct):
    dtype: str
    shape: Annotated[tuple[_Size, ...], msgspec.Meta(max_length=MAX_DIMENSIONS)]
    data_offsets: tuple[_Size, _Size]


def tensor_files(directory: Path, header: Callable[[Path], Collection[str]]) -> dict[str, Path]:
    """Tensor name -> its file, by the index or, without one, by the `header` of each file.

    A model.safetensors that the index does not name is a model of its own: it is read, and the index is not, as in transformers. Raises
    ModelError when there is no file, the index is broken or names a file that is not there, or two files hold the same tensor.
    """
    if (index := _index_in_use(directory)) is not None:
        return _with_packed(index)
    whole = directory / WHOLE_NAME
    paths = [whole] if whole.exists() else sorted(directory.glob("*.safetensors"))
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


def _with_packed(by_name: dict[str, T]) -> dict[str, T]:
    """Packed tensors by their usual names, too."""
    ends = (PACKED, MXFP4_BLOCKS)
    return by_name | {name.removesuffix(end): value for name, value in by_name.items() for end in ends if name.endswith(end)}


def find_stored(name: str, files: Mapping[str, Path], header: Callable[[Path], Mapping[str, StoredTensor]]) -> StoredTensor:
    """Tensor `name` of `files`, with its scales if it is quantized. Raises ModelError when its file does not hold it, and when it cannot be
    restored."""
    if name + MXFP4_BLOCKS in files:
        return _mxfp4(name, files, header)
    stored = _listed(name, files, header)
    if stored.stored_dtype not in QUANTIZED_BYTES:
        return stored
    if more := next((what for end, what in _UNRESTORED.items() if name + end in files), None):
        raise ModelError(f"tensor {name} in {stored.path} has {more}, which flowrt does not restore; give the folder in bfloat16")
    ends = _SCALES if stored.stored_dtype.startswith("F8") else _SCALES[1:]  # integers with the first one are pairs of 4-bit floats
    scales = next((name + end for end in ends if name + end in files), None)
    if scales is None:
        missing = f"has no scales ({' or '.join(name + end for end in ends)})"
        raise ModelError(f"tensor {name} in {stored.path} is stored as {stored.stored_dtype}, and {missing}; copy the model's files again")
    found = _listed(scales, files, header)
    if found.stored_dtype not in STORED_BYTES:
        raise ModelError(f"tensor {scales} in {found.path} is stored as {found.stored_dtype}; {', '.join(STORED_BYTES)} are supported")
    return QuantizedTensor(stored.path, stored.offset_bytes, stored.stored_dtype, stored.shape, found)


def _mxfp4(name: str, files: Mapping[str, Path], header: Callable[[Path], Mapping[str, StoredTensor]]) -> Mxfp4Tensor:
    if name + MXFP4_SCALES not in files:
        raise ModelError(f"tensor {name + MXFP4_BLOCKS} has no scales ({name + MXFP4_SCALES}); copy the model's files again")
    blocks, scales = (_listed(name + end, files, header) for end in (MXFP4_BLOCKS, MXFP4_SCALES))
    shape = blocks.shape
    if (blocks.stored_dtype, scales.stored_dtype) != ("U8", "U8") or len(shape) != 4 or shape != (*scales.shape, MXFP4_BYTES):
        found = f"{blocks.stored_dtype} {list(shape)} and {scales.stored_dtype} {list(scales.shape)}"
        raise ModelError(f"tensor {name} in {blocks.path} is stored as {found}, which are not blocks of MXFP4 and their scales")
    return Mxfp4Tensor(blocks.path, blocks.offset_bytes, "MXFP4", (shape[0], shape[2] * MXFP4_COLUMNS, shape[1]), scales)


def is_scale(name: str, files: Container[str]) -> bool:
    """Whether a tensor holds the scales of another one, or is another one under its packed name."""
    if name.endswith((PACKED, MXFP4_BLOCKS)):
        return True
    return any(name.endswith(end) and name.removesuffix(end) in files for end in (*_SCALES, MXFP4_SCALES))


def _listed(name: str, files: Mapping[str, Path], header: Callable[[Path], Mapping[str, StoredTensor]]) -> StoredTensor:
    if (stored := header(files[name]).get(name)) is None:
        raise ModelError(f"tensor {name} is missing from {files[name]}, which {INDEX_NAME} names for it; copy both files again")
    return stored


def named_place(directory: Path, files: Mapping[str, Path]) -> str:
    """Where a tensor that is not among `files` should be, for errors: the only file, the index, or the directory."""
    paths = set(files.values())
    if len(paths) > 1 and (directory / INDEX_NAME).exists():
        paths = {directory / INDEX_NAME}
    return str(paths.pop() if len(paths) == 1 else directory)


def piece_shape(stored: StoredTensor, name: str, piece: Piece, num_experts: int, shape: tuple[int, ...], start: int) -> tuple[int, ...]:
    """The shape, as stored, of what `piece` takes of tensor `name`. Raises ModelError for a dtype that cannot be read, and when the piece
    does not fit into `shape` from row `start` on."""
    if stored.stored_dtype not in STORED_BYTES and not isinstance(stored, QuantizedTensor):
        raise ModelError(f"tensor {name} in {stored.path} is stored as {stored.stored_dtype}; {', '.join(STORED_BYTES)} are supported")
    taken = stored.shape
    if isinstance(stored, QuantizedTensor):
        if len(taken) < 2:
            raise ModelError(f"tensor {name} in {stored.path} has shape {list(taken)}; only matrices are restored")
        columns = shape[0 if piece.transpose else -1]
        if stored.stored_dtype == "I32" and packed_bits(taken[-1], columns):
            taken = (*taken[:-1], columns)
        stored.block(taken[-1])
    if piece.expert is not None:
        if not taken or taken[0] % num_experts or (piece.expert == "index" and taken[0] != num_experts):
            raise ModelError(f"tensor {name} in {stored.path} has shape {list(taken)}, which is not that of {num_experts} experts")
        taken = taken[1:] if piece.expert == "index" else (taken[0] // num_experts, *taken[1:])
    placed = tuple(reversed(taken)) if piece.transpose else taken
    if len(placed) != len(shape) or placed[1:] != shape[1:] or start + placed[0] > shape[0]:
        fits = f"does not fit the {list(shape)} that config.json requires"
        raise ModelError(f"tensor {name} in {stored.path} has shape {list(stored.shape)}, which {fits}")
    return taken


def packed_bits(num_packed: int, columns: int) -> int:
    """Bits of each of `columns` integers that are packed into `num_packed` numbers of 32 bits; 0: they are not that many."""
    return next((bits for bits in (4, 8) if -(-columns * bits // 32) == num_packed), 0)


def check_rows(num_rows: int, shape: tuple[int, ...], layout: Layout, layer: int, expert: int, directory: Path) -> None:
    """Raises ModelError when the pieces of a layout do not fill `shape`."""
    if num_rows != shape[0]:
        names = " + ".join(piece.tensor(layer, expert) for piece in layout)
        raise ModelError(f"{names} in {directory} have {num_rows} rows; config.json requires {shape[0]}")


def check_files(directory: Path, implementation: Implementation = "auto", expert_weights: KeptWeights = "dtype") -> tuple[str, ...]:
    """Checks the headers of all weight files against the index and config.json, without a read of any weight.

    Raises ModelError for a file that is missing or cut off, for a tensor of the index that its file does not hold, and for a tensor of the
    model that no file holds or that has another dtype or shape. Returns notes, one line each, on files that contradict each other.
    """
    header = cache(read_header)
    files = tensor_files(directory, header)
    for name in files:
        _listed(name, files, header)
    config = read_model_config(directory, None, implementation, expert_weights=expert_weights)
    family, place = family_named(config.family), named_place(directory, files)
    shapes, read = part_shapes(config), {} if config.library is not None else parts_to_read(config)
    used = set[str]()
    has_both = config.tie_word_embeddings and family.has_part("head", files)
    try:
        if config.library is not None:
            import_module("flowrt.operators.library_weights").check_weights(config, directory)
        for part, layers in (read | ({"head": (0,)} if has_both else {})).items():
            shape = shapes[part]
            for layer in layers:
                for expert in range(config.num_experts if part.startswith("expert_") else 1):
                    layout, num_rows = family.find_layout(part, layer, expert, files, place), 0
                    for piece in layout:
                        used.add(name := piece.tensor(layer, expert))
                        taken = piece_shape(find_stored(name, files, header), name, piece, config.num_experts, shape, num_rows)
                        num_rows += taken[-1] if piece.transpose else taken[0]
                    check_rows(num_rows, shape, layout, layer, expert, directory)
    except ModelError:
        refuse_quantized_tensors(directory, files)  # the better reason, where there is one
        raise
    notes = [note] if (note := note_on_end_tokens(directory, implementation)) else []
    if used and (unused := _unused(files, used, config, read_config_file(directory / "config.json").values)):
        notes.append(f"{directory}: {len(unused)} tensors that config.json has no use for are not read, such as {unused[0]}")
    if has_both:
        notes.append(f"{directory}: config.json ties the output matrix to the embedding, and a file holds one of its own, which is used")
    index = directory / INDEX_NAME
    if index.exists() and set(files.values()) == {directory / WHOLE_NAME} and _index_in_use(directory) is None:
        notes.append(f"{directory / WHOLE_NAME} is read, and the files that {INDEX_NAME} names are not: remove those of the other model")
    return tuple(notes)


def _unused(names: Iterable[str], used: Collection[str], config: ModelConfig, values: Mapping[str, object]) -> list[str]:
    """The tensors, in order, that no part reads: but for those of quantized weights, of layers that predict further tokens, of a tied
    output matrix, and of positions, which follow from the config."""
    own, has_further = {name.rpartition(".")[0] for name in used}, bool(values.get("num_nextn_predict_layers"))

    def is_read(name: str) -> bool:
        module, _, what = name.rpartition(".")
        layer = re.match(r"model\.layers\.(\d+)\.", name)
        is_further = has_further and layer is not None and int(layer[1]) >= config.num_layers
        of_weight = module in own and what not in ("weight", "bias")
        is_tied = config.tie_word_embeddings and module == "lm_head"
        return name in used or of_weight or is_further or is_tied or name.startswith("mtp.") or what == "inv_freq"

    return sorted(name for name in names if not is_read(name))


def kept_as(stored: StoredTensor, piece: Piece) -> KeptWeights:
    """The 8 bits in which weights that are stored so can be used as they are; `dtype`: they are restored."""
    if not isinstance(stored, QuantizedTensor) or piece.transpose or piece.added:
        return "dtype"
    return next((kept for kept, spelt in KEPT_AS.items() if spelt == stored.stored_dtype), "dtype")


def stored_expert_weights(directory: Path, config: ModelConfig) -> KeptWeights:
    """What the matrices of the first expert are stored in. Raises ModelError where a file lacks them."""
    if config.library is not None or not config.moe_layers:
        return "dtype"
    header = cache(read_header)
    files = tensor_files(directory, header)
    family, layer = family_named(config.family), config.moe_layers[0]
    found = set[KeptWeights]()
    for part in EXPERT_PARTS:
        for piece in family.find_layout(part, layer, 0, files, named_place(directory, files)):
            found.add(kept_as(find_stored(piece.tensor(layer, 0), files, header), piece))
    return found.pop() if len(found) == 1 else "dtype"


def _index_in_use(directory: Path) -> dict[str, Path] | None:
    """The tensors of the index. None: there is none, or model.safetensors holds another model. Raises ModelError."""
    path, whole = directory / INDEX_NAME, directory / WHOLE_NAME
    if not path.exists():
        return None
    files = _read_index(path)
    named = set(files.values())
    if whole not in named and whole.exists():
        return None
    if missing := sorted(each.name for each in named if not each.exists()):
        count = f" ({len(missing)} of {len(named)} files are missing)" if len(named) > 1 else ""
        raise ModelError(f"{path} names {missing[0]}, which is not there{count}; copy the model's files again")
    return files


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
            head = file.read(len(LFS_HEAD))
            if head == LFS_HEAD:
                raise ModelError(f"{path} {LFS_PROBLEM}")
            header_bytes = int.from_bytes(head[:8], "little")
            file.seek(8)
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
        item_bytes = _ITEM_BYTES.get(entry.dtype)  # None: masks and others, refused only when a part asks for them
        num_bytes = end - begin if item_bytes is None else prod(entry.shape) * item_bytes
        if end - begin != num_bytes or data_start + end > file_bytes:
            where = f"bytes {begin} to {end} do not fit its shape or the file's {file_bytes} bytes"
            raise ModelError(f"{path}: tensor {name}: {where}; copy the file again")
        tensors[name] = StoredTensor(path, data_start + begin, entry.dtype, entry.shape)
    return _with_packed(tensors)
