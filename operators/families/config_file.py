"""Reads typed values from a config.json, with errors that name the file, the key and the expected value.

Used by the family files, their registry and weights.py. Free of torch.
"""

from __future__ import annotations

import json
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flowrt.operators.model_config import DTYPES, ModelError

MAX_JSON_BYTES = 64 << 20
LFS_HEAD = b"version https://git-lfs"  # how a Git LFS pointer begins, which stands for a file that was not downloaded
LFS_PROBLEM = "is a Git LFS pointer, not the file itself; run git lfs pull in its folder"
_LAYERS, _HEADS, _EXPERTS, _WIDTH, _VOCABULARY, _OTHER = 1000, 4096, 1 << 16, 1 << 20, 1 << 24, (1 << 31) - 1
# Upper bound of each key, far above any existing model: a damaged file is refused before anything of its size is built.
MAX_VALUES: dict[str, int] = {
    **dict.fromkeys(("num_hidden_layers", "n_layers", "first_k_dense_replace", "decoder_sparse_step"), _LAYERS),
    **dict.fromkeys(("num_attention_heads", "n_heads", "num_key_value_heads", "kv_n_heads"), _HEADS),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), _EXPERTS),
    **dict.fromkeys(("num_experts_per_tok", "moe_top_k", "n_shared_experts", "n_group", "topk_group"), _EXPERTS),
    **dict.fromkeys(("hidden_size", "d_model", "intermediate_size", "moe_intermediate_size", "ffn_hidden_size", "head_dim"), _WIDTH),
    **dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "q_lora_rank", "kv_lora_rank"), _WIDTH),
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads", "linear_conv_kernel_dim"), _HEADS),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "shared_expert_intermediate_size"), _WIDTH),
    "vocab_size": _VOCABULARY,
}


@dataclass(frozen=True, slots=True)
class ConfigFile:
    """The keys and values of one JSON file. Each reader takes the key's names, newest first: files of older writers differ.

    A default is for a key that is not there. A null is a value of its own, as in transformers: it is refused, unless `null` gives the
    meaning that transformers gives it.
    """

    path: Path
    values: Mapping[str, Any]

    def error(self, key: str, problem: str) -> ModelError:
        return ModelError(f"{self.path}: {key}: {problem}")

    def has(self, key: str) -> bool:
        return self.values.get(key) is not None

    def _find(self, keys: tuple[str, ...]) -> tuple[str, Any]:
        for key in keys:
            if self.has(key):
                return key, self.values[key]
        return keys[0], None

    def _read(self, keys: tuple[str, ...], types: tuple[type, ...], needed: str, default: Any, null: Any = None) -> tuple[str, Any]:
        """The key that is there, and its value, of one of these JSON types; `default` where there is none of the keys."""
        key, value = self._find(keys)
        if value is None and (given := next((key for key in keys if key in self.values), None)) is not None:
            if null is None:
                raise self.error(given, f"is null; {needed} is needed" + (", or no such key" if default is not None else ""))
            return given, null
        if value is None:
            if default is None:
                raise self.error(" or ".join(keys), f"is missing; {needed} is needed")
            return key, default
        if type(value) not in types:
            raise self.error(key, f"is {shortened(value)}; {needed} is needed")
        return key, value

    def integer(self, *keys: str, default: int | None = None, null: int | None = None, at_least: int = 1) -> int:
        key, value = self._read(keys, (int,), "a whole number", default, null)
        if value < at_least:
            raise self.error(key, f"is {shortened(value)}; at least {at_least} is needed")
        if value > (maximum := MAX_VALUES.get(key, _OTHER)):
            raise self.error(key, f"is {shortened(value)}; at most {maximum} is supported")
        return int(value)

    def number(self, *keys: str, default: float | None = None, null: float | None = None) -> float:
        key, value = self._read(keys, (int, float), "a positive number", default, null)
        if not 0 < value < 1e300:
            raise self.error(key, f"is {shortened(value)}; a positive number is needed")
        return float(value)

    def flag(self, *keys: str, default: bool, null: bool | None = None) -> bool:
        return bool(self._read(keys, (bool,), "true or false", default, null)[1])

    def integers(self, key: str) -> tuple[int, ...]:
        """A list of whole numbers from 0; an absent key or null is an empty list."""
        _, value = self._read((key,), (list,), "a list of whole numbers", [], null=[])
        if any(type(item) is not int or item < 0 for item in value):
            raise self.error(key, f"is {shortened(value)}; a list of whole numbers is needed")
        return tuple(value)

    def texts(self, key: str, known: tuple[str, ...]) -> tuple[str, ...]:
        """A list of some of the `known` words; an absent key or null is an empty list."""
        _, value = self._read((key,), (list,), "a list", [], null=[])
        if unknown := [item for item in value if item not in known]:
            raise self.error(key, f"has {shortened(unknown[0])}; each must be one of {', '.join(known)}")
        return tuple(value)

    def mapping(self, key: str) -> Mapping[str, Any]:
        mapping: Mapping[str, Any] = self._read((key,), (dict,), "a mapping", {}, null={})[1]
        return mapping

    def token_id(self, key: str) -> int | None:
        return self.integer(key, at_least=0) if self.has(key) else None

    def token_ids(self, key: str) -> tuple[int, ...]:
        """One id, a list of ids, or none."""
        if isinstance(self.values.get(key), list):
            return self.integers(key)
        value = self.token_id(key)
        return () if value is None else (value,)

    def must_be(self, key: str, allowed: object, default: object) -> None:
        """Refuse a feature that is not supported: `key` must hold `allowed` (absent: `default`)."""
        if (value := self.values.get(key, default)) != allowed:
            raise self.error(key, f"is {value!r}; only {allowed!r} is supported")

    def dtype(self) -> str:
        """The checkpoint's own dtype (newer writers use `dtype`, older ones `torch_dtype`); absent: float32."""
        key, value = self._find(("dtype", "torch_dtype"))
        name = "float32" if value is None else str(value).removeprefix("torch.")
        if name not in DTYPES:
            raise self.error(key, f"is {value!r}; use one of {', '.join(DTYPES)}")
        return name


def read_config_file(path: Path) -> ConfigFile:
    """Parse one JSON file; ModelError when it is missing, unreadable, over MAX_JSON_BYTES or not a mapping."""
    return parse_config_file(path, read_json_bytes(path))


def read_json_bytes(path: Path) -> bytes:
    """The content of one JSON file. Raises ModelError when it is missing, unreadable or over MAX_JSON_BYTES."""
    try:
        if (num_bytes := regular_file_bytes(path)) > MAX_JSON_BYTES:
            raise ModelError(f"{path} has {num_bytes} bytes; at most {MAX_JSON_BYTES} are supported")
        return path.read_bytes()
    except FileNotFoundError:
        raise ModelError(f"{path} does not exist; a Hugging Face model directory has one") from None
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from error


def parse_config_file(path: Path, data: bytes) -> ConfigFile:
    """Parse the content of the JSON file `path`. Raises ModelError when it is not valid JSON, or not a mapping."""
    if data.startswith(LFS_HEAD):
        raise ModelError(f"{path} {LFS_PROBLEM}")
    try:
        values = json.loads(data)
    except RecursionError:
        raise ModelError(f"{path} is not valid JSON: it is nested too deeply") from None
    except ValueError as error:
        raise ModelError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(values, dict):
        raise ModelError(f"{path} holds a {type(values).__name__}; a mapping of keys to values is needed")
    return ConfigFile(path, values)


def regular_file_bytes(path: Path) -> int:
    """The size of a regular file. Raises ModelError for other kinds, where a read may never return, and OSError if stat fails."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise ModelError(f"{path} is not a regular file; a file or a link to one is needed")
    return status.st_size


def shortened(value: object) -> str:
    """As Python writes it, cut to what fits into one line of text."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
