"""Reads the sampling defaults of a model folder: the values of generation_config.json for requests that give none of their own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flowrt.errors import UserError
from flowrt.operators.families.config_file import parse_config_file, read_json_bytes
from flowrt.operators.families.end_tokens import GENERATION
from flowrt.operators.model_config import ModelError
from flowrt.sampling_params import PARAMETER_TYPES, checked_value

AUTO, NONE = "auto", "none"
# Key of the file -> parameter, those that vLLM takes. `do_sample` is not looked at, as in vLLM.
_KEYS = {name: name for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")} | {"max_new_tokens": "max_tokens"}


@dataclass(frozen=True)
class SamplingDefaults:
    """`values`: by the names of SamplingParams. `text`: one line on them for the user; "": there are none. `notes`: on values of the file
    that cannot be used, one line each."""

    values: Mapping[str, Any] = field(default_factory=dict)
    text: str = ""
    notes: tuple[str, ...] = ()


def read_sampling_defaults(model: Path, choice: str = AUTO) -> SamplingDefaults:
    """The defaults of a model folder by `choice`: AUTO, NONE, or another folder with the file. Raises UserError."""
    if choice == NONE:
        return SamplingDefaults()
    path = (model if choice == AUTO else Path(choice)) / GENERATION
    if not path.exists():
        if choice == AUTO:
            return SamplingDefaults()
        raise UserError(f"--generation-config {choice}: there is no {path}; give {AUTO}, {NONE}, or a folder with that file")
    try:
        given = parse_config_file(path, read_json_bytes(path)).values
    except ModelError as error:
        raise UserError(str(error)) from None
    values, notes = dict[str, Any](), []
    for key, name in _KEYS.items():
        value = given.get(key)
        if value is None or name not in PARAMETER_TYPES:
            continue
        try:
            values[name] = checked_value(name, 0 if key == "top_k" and value == -1 else value)
        except ValueError as error:
            notes.append(f"{path}: {key} {error}; it is not used")
    listed = ", ".join(f"{name} {value:g}" for name, value in values.items())
    hint = f"--generation-config {NONE} turns them off"
    return SamplingDefaults(values, f"defaults of requests, from {path}: {listed} ({hint})" if values else "", tuple(notes))
