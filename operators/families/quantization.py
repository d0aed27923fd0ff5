"""Recognizes the schemes of quantized checkpoints. Those that flowrt restores are checked here; all others are refused, each by its name,
with what to do. Free of torch.

A key of config.json names a scheme, or a file beside it, or only the names of its tensors. A scheme that is loaded is not in the table: its
tensors say by their dtype, and by the scales beside them, how they are restored (checkpoint_files.py, restored_weights.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flowrt.operators.model_config import KeptWeights, ModelError

KEYS = ("quantization_config", "compression_config")  # of config.json; the second one is of older writers of compressed-tensors
_PLAIN = "give the folder of the model in bfloat16 or float16"
_FP8, _COMPRESSED, _MXFP4 = ("fp8", "fbgemm_fp8"), "compressed-tensors", "mxfp4"  # values of `quant_method` of what is restored
_PACKED = "pack-quantized"
_FORMATS = ("naive-quantized", "float-quantized", "int-quantized", _PACKED)  # of compressed-tensors


@dataclass(frozen=True, slots=True)
class Scheme:
    """`methods`: values of `quant_method`. `file`: the file beside config.json that only checkpoints of this scheme have. `tensors`: a
    pattern of the ends of tensor names. `remedy`: what the user can do."""

    name: str
    methods: tuple[str, ...]
    remedy: str
    tensors: str = ""
    file: str = ""


SCHEMES = (
    Scheme("AWQ", ("awq",), _PLAIN, file="quant_config.json"),
    Scheme("GPTQ", ("gptq", "auto-round"), _PLAIN, r"\.qweight", "quantize_config.json"),
    Scheme("ModelOpt", ("modelopt", "modelopt_fp4"), _PLAIN, r"\.(weight_scale_2|input_scale)", "hf_quant_config.json"),
    Scheme("bitsandbytes", ("bitsandbytes",), _PLAIN, r"\.weight\.(absmax|quant_map|quant_state\..*)"),
)
_BY_METHOD = {method: scheme for scheme in SCHEMES for method in scheme.methods}


def refuse_quantized_config(path: Path, values: Mapping[str, Any]) -> None:
    """Raises ModelError when config.json, or a file beside it, names a scheme."""
    for key in KEYS:
        given = values.get(key)
        if given is not None and not _is_restored(f"{path}: {key}", given):
            method = given.get("quant_method") if isinstance(given, Mapping) else given
            scheme = _BY_METHOD.get(method) if isinstance(method, str) else None
            name = scheme.name if scheme is not None else f"quantized (quant_method {str(method)[:40]!r})"
            raise _error(f"{path}: {key}", name, scheme)
    for scheme in SCHEMES:
        if scheme.file and (path.parent / scheme.file).exists():
            raise _error(str(path.parent / scheme.file), scheme.name, scheme)


def _is_restored(where: str, given: Any) -> bool:
    """Whether the weights are of a scheme that is restored. Raises ModelError for a variant of one that is not."""
    if not isinstance(given, Mapping):
        return False
    if given.get("quant_method") in _FP8:
        sizes = given.get("weight_block_size")
        if sizes is not None and not (isinstance(sizes, list) and len(sizes) == 2 and all(map(_is_power_of_two, sizes))):
            raise ModelError(f"{where}.weight_block_size: is {str(sizes)[:40]}; two powers of two are needed, or null")
        return True
    if given.get("quant_method") == _MXFP4:
        return True
    if given.get("quant_method") != _COMPRESSED:
        return False
    form, sparsity = given.get("format"), given.get("sparsity_config")
    if form not in _FORMATS:
        raise ModelError(f"{where}.format: is {str(form)[:40]!r}; {', '.join(_FORMATS)} are restored; {_PLAIN}")
    if isinstance(sparsity, Mapping) and sparsity.get("format", "dense") != "dense":
        raise ModelError(f"{where}.sparsity_config: sparse weights are not restored; {_PLAIN}")
    if given.get("transform_config"):
        raise ModelError(f"{where}.transform_config: rotations of what enters a matrix are not computed; {_PLAIN}")
    groups = given.get("config_groups")
    for name, group in groups.items() if isinstance(groups, Mapping) else ():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if isinstance(weights, Mapping) and weights.get("symmetric") is False:
            raise ModelError(f"{where}.config_groups.{name}.weights.symmetric: weights with zero points are not restored; {_PLAIN}")
    return True


def stored_group(values: Mapping[str, Any]) -> tuple[KeptWeights, int] | None:
    """The form of weights in 8 bits and the columns that share a scale, where config.json says that these are fewer than those of a row."""
    given: Mapping[str, Any] = next((values[key] for key in KEYS if isinstance(values.get(key), Mapping)), {})
    sizes, groups = given.get("weight_block_size"), given.get("config_groups")
    is_e4m3 = given.get("quant_method") in _FP8 and given.get("fmt", "e4m3") == "e4m3"
    if is_e4m3 and isinstance(sizes, list) and len(sizes) == 2 and _is_power_of_two(sizes[1]):
        return "fp8", sizes[1]
    is_packed = given.get("format") == _PACKED
    for group in groups.values() if isinstance(groups, Mapping) and not is_packed else ():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if isinstance(weights, Mapping) and type(size := weights.get("group_size")) is int and size > 0 and weights.get("num_bits") == 8:
            return "int8" if weights.get("type") == "int" else "fp8", size
    return None


def _is_power_of_two(value: Any) -> bool:
    return type(value) is int and value > 0 and not value & (value - 1)


def refuse_quantized_tensors(directory: Path, names: Iterable[str]) -> None:
    """Raises ModelError when the names of tensors are those of a scheme."""
    names = list(names)
    for scheme in SCHEMES:
        pattern = re.compile(f"(?:{scheme.tensors})$")
        if scheme.tensors and (name := next(filter(pattern.search, names), None)) is not None:
            raise _error(f"{directory}: tensor {name}", scheme.name, scheme)


def _error(where: str, name: str, scheme: Scheme | None) -> ModelError:
    return ModelError(f"{where}: the weights are {name}, which flowrt does not load; {_PLAIN if scheme is None else scheme.remedy}")
