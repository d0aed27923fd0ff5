"""Finds model families: those of this package, and those that other packages register.

Another package adds a family with an entry point in group `flowrt.models`: the name is the model_type of config.json, the value
is `module:FAMILY` (a families.family.Family). A built-in family takes precedence over an entry point of the same name. Free of torch.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache, lru_cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Literal, Unpack

from flowrt.operators.families import dbrx, deepseek_v2, deepseek_v3, library, mixtral, qwen3_moe, qwen3_next
from flowrt.operators.families.config_file import ConfigFile, parse_config_file, read_json_bytes
from flowrt.operators.families.end_tokens import read_end_tokens
from flowrt.operators.families.family import Family
from flowrt.operators.families.quantization import stored_group
from flowrt.operators.model_config import HeldIn, ModelConfig, ModelError

Implementation = Literal["auto", "native", "transformers"]
ENTRY_POINT_GROUP = "flowrt.models"
_FAMILIES = (qwen3_moe.FAMILY, qwen3_next.FAMILY, mixtral.FAMILY, deepseek_v2.FAMILY, deepseek_v3.FAMILY, dbrx.FAMILY)
BUILT_IN = {name: family for family in _FAMILIES for name in (family.name, *family.also)}


def known_families() -> tuple[str, ...]:
    """The names of all families, sorted."""
    return tuple(sorted(BUILT_IN.keys() | _offered().keys()))


def family_named(name: str) -> Family:
    """The family `name`; ModelError, listing the known ones, when there is none."""
    if name in BUILT_IN:
        return BUILT_IN[name]
    if name == library.FAMILY.name:
        return library.FAMILY
    offered = _offered().get(name)
    if offered is None:
        raise ModelError(f"model family {name!r} is not known; known are: {', '.join(known_families())}")
    try:
        loaded = offered.load()
    except Exception as error:  # another package's import may fail in any way; the user needs to know which one
        raise ModelError(f"model family {name!r}: entry point {offered.value!r} cannot be loaded: {error}") from error
    if not isinstance(loaded, Family) or name not in (loaded.name, *loaded.also):
        raise ModelError(f"model family {name!r}: {offered.value} must be a Family with that name, not {loaded!r:.80}")
    return loaded


def find_family(file: ConfigFile, implementation: Implementation = "auto") -> Family:
    """The family that a config.json names in `model_type`; where that is not known, the one of ours that its `architectures` name. All
    others run through transformers, and with that `implementation` ours do, too."""
    name = file.values.get("model_type")
    if implementation == "transformers":
        return library.FAMILY
    if name not in known_families() and (family := _of_architecture(file.values.get("architectures"))) is not None:
        return family
    if not isinstance(name, str):
        raise file.error("model_type", f"is {name!r}; one of these is needed: {', '.join(known_families())}")
    if name in known_families():
        return family_named(name)
    if implementation == "native":
        raise file.error("model_type", f"{name!r} is not one of flowrt's own families ({', '.join(known_families())})")
    return library.FAMILY


def _of_architecture(names: object) -> Family | None:
    known = [name for name in names if isinstance(name, str)] if isinstance(names, list) else []
    return next((family for family in _FAMILIES if set(family.architectures).intersection(known)), None)


@cache  # called once per part that is read, and a scan of all installed packages takes milliseconds
def _offered() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=ENTRY_POINT_GROUP)}


def read_model_config(
    directory: Path,
    dtype: str | None = None,
    implementation: Implementation = "auto",
    **kept: Unpack[HeldIn],
) -> ModelConfig:
    """The config of the Hugging Face model directory `directory`, in `dtype` if given, else in the checkpoint's own. `implementation`: what
    computes the model, flowrt's operators or transformers. `kept`: what weights and KV are held in.

    Raises ModelError: no directory or config.json, a family that is not known (the known ones are listed), a value that is
    missing, of the wrong type or impossible, a feature that is not supported. End-of-sequence ids are those of all files (end_tokens.py).
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise ModelError(f"model directory {directory} does not exist; give a directory with config.json and *.safetensors")
    config = _parse_model_config(directory / "config.json", read_json_bytes(directory / "config.json"), dtype, implementation)
    end_tokens = read_end_tokens(directory, config.eos_token_ids, config.vocab_size).token_ids
    return replace(config, eos_token_ids=end_tokens, **kept)


def note_on_end_tokens(directory: Path, implementation: Implementation = "auto") -> str:
    """What the user should know about the end-of-sequence ids of a model directory; "": nothing. Raises ModelError."""
    config = _parse_model_config(directory / "config.json", read_json_bytes(directory / "config.json"), None, implementation)
    return read_end_tokens(directory, config.eos_token_ids, config.vocab_size).note


@lru_cache(maxsize=16)  # a worker asks for its model's config again and again
def _parse_model_config(path: Path, data: bytes, dtype: str | None, implementation: Implementation) -> ModelConfig:
    file = parse_config_file(path, data)
    config = replace(find_family(file, implementation).read_config(file), stored_group=stored_group(file.values))
    return config if dtype is None else config.with_dtype(dtype)
