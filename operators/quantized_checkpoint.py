"""Writes a checkpoint with INT8 or FP8 weights, in the form of compressed-tensors, from one in 16 or 32 bits (xDeepServe, section 4.7).

The matrices of attention, dense and shared MLPs and routed experts get the nearest codes, with one scale per output. Norms, gates, the
embedding, the output matrix and recurrent layers stay as they are. Files are read and written tensor by tensor.

*Smoothing* (SmoothQuant, Xiao et al., ICML 2023, section 4) moves a part of the range of a norm's output into the matrices behind it:
each channel is divided by a factor, in the norm, and the columns that read it are multiplied by it. Rows that travel or are
multiplied as INT8 then lose less. The factors are powers of two, so that without quantization no bit of the model changes.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from flowrt.operators.checkpoint_files import INDEX_NAME, KEPT_AS, QUANTIZED_BYTES, STORED_BYTES, read_header, tensor_files
from flowrt.operators.families.config_file import read_config_file
from flowrt.operators.families.family import Piece, parts_to_read
from flowrt.operators.families.quantization import KEYS
from flowrt.operators.families.registry import family_named, read_model_config
from flowrt.operators.model_config import KeptWeights, ModelConfig, ModelError
from flowrt.operators.quantized_products import quantize
from flowrt.operators.weights import STORED_DTYPES, Checkpoint

SCALE = "_scale"  # ends the name of the scales of a tensor
STRENGTH = 0.5  # of smoothing: how much of the range moves into the matrices (alpha of SmoothQuant)
_QUANTIZED = (
    *("qkv", "attention_output", "latent_down", "query_up"),
    *("dense_gate_up", "dense_down", "shared_gate_up", "shared_down", "expert_gate_up", "expert_down"),
)
_BEHIND = {  # norm -> what reads its output
    "attention_norm": ("qkv", "latent_down", "delta_in"),
    "mlp_norm": ("gate", "dense_gate_up", "shared_gate_up", "shared_gate", "expert_gate_up"),
}
_HEADER_ALIGNMENT = 8
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")


@dataclass(frozen=True)
class Written:
    """What was written. `errors`: of each matrix that was quantized, the mean square of the error relative to that of its weights."""

    num_tensors: int
    bytes_before: int
    bytes_after: int
    errors: Mapping[str, float]


@dataclass
class Plan:
    """What happens to each tensor of a checkpoint, by name. `norms`: those that can be smoothed."""

    config: ModelConfig
    quantized: set[str] = field(default_factory=set)
    norms: set[str] = field(default_factory=set)
    behind: dict[str, set[str]] = field(default_factory=dict)  # norm -> the matrices that read its output

    @classmethod
    def of(cls, directory: Path) -> Plan:
        """Raises ModelError for a checkpoint that is quantized already, that is of no family of flowrt, or that has one tensor for all
        experts."""
        config = read_model_config(directory)
        values = read_config_file(directory / "config.json").values
        if key := next((key for key in KEYS if values.get(key)), None):
            raise ModelError(f"{directory / 'config.json'}: {key}: the checkpoint is quantized already; give one in bfloat16")
        if config.library is not None:
            instead = "flowrt run keeps their experts in 8 bits with model.expert_weights: int8"
            raise ModelError(f"{directory}: models in transformers are not quantized; {instead}")
        plan = cls(config)
        read, checkpoint = parts_to_read(config), Checkpoint(directory)
        for part in (part for part in _QUANTIZED if part in read):
            plan.quantized |= {piece.tensor(*place) for piece, *place in _pieces(checkpoint, config, part, read[part])}
        for norm, parts in _BEHIND.items():
            for layer in read[norm]:
                ((piece, *_),) = _pieces(checkpoint, config, norm, (layer,))
                if piece.added:
                    continue  # stored minus one: near -1 a small weight has too few digits
                plan.norms.add(name := piece.tensor(layer, 0))
                here = [part for part in parts if part in read and layer in read[part]]
                plan.behind[name] = {piece.tensor(*place) for part in here for piece, *place in _pieces(checkpoint, config, part, (layer,))}
        return plan


def factors(plan: Plan, directory: Path, largest: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Norm -> the factor of each channel [H], a power of two. `largest`: norm -> the largest magnitude in each channel of its output."""
    checkpoint, found = Checkpoint(directory), {}
    for norm, names in plan.behind.items():
        weights = torch.zeros_like(largest[norm], dtype=torch.float32)
        for name in names:
            weights = torch.maximum(weights, checkpoint.read_tensor(name).float().abs().flatten(0, -2).amax(0))
        rows, is_used = largest[norm].float(), (largest[norm] > 0) & (weights > 0)
        wanted = torch.where(is_used, rows**STRENGTH / weights.clamp_min(1e-30) ** (1 - STRENGTH), 1.0)
        wanted = wanted / wanted[is_used].log().mean().exp() if bool(is_used.any()) else wanted
        found[norm] = torch.exp2(wanted.log2().round()).where(is_used, torch.ones(()))
    return found


def write_quantized(
    directory: Path,
    out: Path,
    kept: KeptWeights,
    plan: Plan,
    channels: Mapping[str, Tensor] | None = None,
    on_tensor: Callable[[int, int], None] = lambda done, total: None,
) -> Written:
    """Write the checkpoint into the folder `out`, which must not exist. `channels`: the factors, norm by norm. `on_tensor` is called with
    the number of tensors that are written, and of all. config.json comes last: a folder without it is not a model.

    Raises ModelError, and OSError where a file cannot be written.
    """
    by_matrix = {name: factor for norm, factor in (channels or {}).items() for name in plan.behind[norm]}
    checkpoint, files, errors = Checkpoint(directory), tensor_files(directory, read_header), dict[str, float]()
    headers = {path: {name: each for name, each in read_header(path).items() if files.get(name) == path} for path in {*files.values()}}
    total, done, places = sum(map(len, headers.values())), 0, dict[str, str]()

    def changed(name: str) -> Iterator[Tensor]:
        tensor = checkpoint.read_tensor(name)
        if not bool(tensor.isfinite().all()):
            raise ModelError(f"{files[name]}: tensor {name} has values that are not finite; copy the model's files again")
        if name in by_matrix:
            tensor = tensor * by_matrix[name].to(tensor.dtype)
        if (factor := (channels or {}).get(name)) is not None:
            tensor = tensor / factor.to(tensor.dtype)
        if name not in plan.quantized:
            yield tensor
            return
        matrix = quantize(tensor.flatten(0, -2), kept)
        wide = tensor.flatten(0, -2).float()
        errors[name] = float((matrix.restored() - wide).square().mean() / wide.square().mean().clamp_min(1e-30))
        yield matrix.codes_NK.view(tensor.shape)
        yield matrix.scales_NC.view(*tensor.shape[:-1], 1)

    for path, header in headers.items():
        for name, stored in header.items():
            if stored.stored_dtype not in STORED_DTYPES or not stored.shape:
                found = f"{stored.stored_dtype} {list(stored.shape)}"
                raise ModelError(f"{path}: tensor {name} is {found}; vectors and matrices of {', '.join(STORED_DTYPES)} are written")
    out.mkdir(parents=True)
    for path in sorted(headers):
        entries: dict[str, tuple[str, tuple[int, ...]]] = {}
        for name, stored in headers[path].items():
            entries[name] = (KEPT_AS[kept] if name in plan.quantized else stored.stored_dtype, stored.shape)
            if name in plan.quantized:
                entries[name + SCALE] = ("F32", (*stored.shape[:-1], 1))
        with (out / path.name).open("wb") as file:
            _write_header(file, entries)
            for name in headers[path]:
                for tensor in changed(name):
                    file.write(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
                on_tensor(done := done + 1, total)
        places |= dict.fromkeys(entries, path.name)
    if len(headers) > 1 or (directory / INDEX_NAME).exists():
        size = sum(each.stat().st_size for each in out.iterdir())
        (out / INDEX_NAME).write_text(json.dumps({"metadata": {"total_size": size}, "weight_map": places}, indent=2) + "\n")
    _copy_others(directory, out)
    values = dict(read_config_file(directory / "config.json").values)
    linear = {name for header in headers.values() for name, stored in header.items() if len(stored.shape) > 1}
    values["quantization_config"] = _quantization_config(kept, {*linear, "lm_head"} - plan.quantized)
    before, after = (sum(each.stat().st_size for each in paths) for paths in (headers, out.glob("*.safetensors")))
    (out / "config.json").write_text(json.dumps(values, indent=2) + "\n")
    return Written(total, before, after, errors)


def _pieces(checkpoint: Checkpoint, config: ModelConfig, part: str, layers: Any) -> Iterator[tuple[Piece, int, int]]:
    """The stored tensors of a part, with layer and expert. Raises ModelError for one that is not a matrix of outputs as rows."""
    family = family_named(config.family)
    for layer in layers:
        for expert in range(config.num_experts if part.startswith("expert_") else 1):
            for piece in family.find_layout(part, layer, expert, checkpoint.tensor_names(), str(checkpoint.directory)):
                name = piece.tensor(layer, expert)
                if piece.transpose or piece.expert is not None:
                    raise ModelError(f"{checkpoint.directory}: {name} holds all experts; give a checkpoint with a tensor for each")
                yield piece, layer, expert


def _write_header(file: BinaryIO, entries: Mapping[str, tuple[str, tuple[int, ...]]]) -> None:
    """The beginning of a safetensors file; the tensors follow in the order of `entries`."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, (dtype, shape) in entries.items():
        item_bytes = (STORED_BYTES | QUANTIZED_BYTES)[dtype]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": (offset, offset := offset + item_bytes * prod(shape))}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % _HEADER_ALIGNMENT)
    file.write(len(text).to_bytes(8, "little") + text)


def _copy_others(directory: Path, out: Path) -> None:
    """Tokenizer, generation config, licence and the like."""
    for path in directory.iterdir():
        if path.is_file() and path.suffix not in _WEIGHTS and path.name not in (INDEX_NAME, "config.json"):
            shutil.copyfile(path, out / path.name)


def _quantization_config(kept: KeptWeights, unchanged: set[str]) -> dict[str, Any]:
    """What other programs need: weights with a scale per output, rows with a scale each. flowrt's products do not quantize rows."""
    common = {"num_bits": 8, "type": "int" if kept == "int8" else "float", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": common | {"strategy": "channel", "dynamic": False},
        "input_activations": common | {"strategy": "token", "dynamic": True},
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "int-quantized" if kept == "int8" else "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": sorted({name.removesuffix(".weight") for name in unchanged}),
    }
