"""Finds the end-of-sequence ids of a model folder: those of generation_config.json, config.json and the tokenizer. Free of torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec

from flowrt.operators.families.config_file import ConfigFile, parse_config_file, read_json_bytes
from flowrt.operators.model_config import ModelError

CONFIG, GENERATION, TOKENIZER_CONFIG = "config.json", "generation_config.json", "tokenizer_config.json"
SPECIAL_TOKENS, TOKENIZER = "special_tokens_map.json", "tokenizer.json"
_KEY, _TEXT_KEY = "eos_token_id", "eos_token"
_FILES = (GENERATION, TOKENIZER_CONFIG, SPECIAL_TOKENS, TOKENIZER)


@dataclass(frozen=True, slots=True)
class EndTokens:
    """`token_ids`: those of the vocabulary that any file names, in the order of the files. `note`: what the user should know; "": the files
    agree."""

    token_ids: tuple[int, ...]
    note: str = ""


class _AddedToken(msgspec.Struct):
    id: int
    content: str


class _AddedTokens(msgspec.Struct):
    added_tokens: list[_AddedToken] = []


def read_end_tokens(directory: Path, of_config: tuple[int, ...], vocab_size: int) -> EndTokens:
    """The ids of the folder, whose config.json names `of_config`. Raises ModelError for a file that is not JSON, or a wrong id."""
    return _read(directory, of_config, vocab_size, tuple(_signature(directory / name) for name in _FILES))


@lru_cache(maxsize=16)  # by the times and sizes of the files: a worker asks again and again
def _read(directory: Path, of_config: tuple[int, ...], vocab_size: int, signatures: tuple[object, ...]) -> EndTokens:
    generation = _json(directory / GENERATION)
    text, text_file = next(_texts(directory), ("", ""))
    token_id = _token_id(directory, text) if text else None
    named = {GENERATION: generation.token_ids(_KEY), CONFIG: of_config, text_file: () if token_id is None else (token_id,)}
    inside = {name: kept for name, ids in named.items() if (kept := [each for each in ids if each < vocab_size])}
    found = tuple(dict.fromkeys(each for ids in inside.values() for each in ids))
    problems = []
    if text and token_id is None and (directory / TOKENIZER).exists():
        problems.append(f"{text_file} names {text!r}, which is not a token of {TOKENIZER}")
    for name, ids in named.items():
        if outside := [each for each in ids if each >= vocab_size]:
            problems.append(f"{name} names {_listed(outside)}, outside of the vocabulary of {vocab_size} tokens")
    if not found:
        problems.append(f"no file names an end-of-sequence token ({_KEY} in {GENERATION}), so answers end at max_tokens")
    elif not set(found) <= {*next(iter(inside.values()))}:  # the first file has all that the others have, or they differ
        each = ", ".join(f"{name} {_listed(ids)}" for name, ids in inside.items())
        problems.append(f"the files name different end-of-sequence tokens ({each}), and an answer ends at each of them")
    return EndTokens(found, f"{directory}: {'; '.join(problems)}" if problems else "")


def _listed(ids: Iterable[int]) -> str:
    return " and ".join(map(str, ids))


def _signature(path: Path) -> object:
    with suppress(OSError):
        status = path.stat()
        return status.st_mtime_ns, status.st_size, status.st_ino
    return None


def _json(path: Path) -> ConfigFile:
    return parse_config_file(path, read_json_bytes(path) if path.exists() else b"{}")


def _texts(directory: Path) -> Iterator[tuple[str, str]]:
    """The text of the end-of-sequence token, and the file that has it. The first one counts."""
    for name in (TOKENIZER_CONFIG, SPECIAL_TOKENS):
        value = _json(directory / name).values.get(_TEXT_KEY)
        text = value.get("content") if isinstance(value, Mapping) else value
        if isinstance(text, str) and text:
            yield text, name


def _token_id(directory: Path, text: str) -> int | None:
    """The id of a token. None: the tokenizer does not have it, or cannot be read, which its reader reports."""
    added = _json(directory / TOKENIZER_CONFIG).values.get("added_tokens_decoder")
    for key, token in added.items() if isinstance(added, Mapping) else ():
        if isinstance(token, Mapping) and token.get("content") == text and key.isdecimal() and len(key) < 10:
            return int(key)
    with suppress(ModelError, msgspec.MsgspecError):
        data = read_json_bytes(directory / TOKENIZER)
        for each in msgspec.json.decode(data, type=_AddedTokens).added_tokens:  # most of the file is skipped
            if each.content == text and each.id >= 0:
                return each.id
        return _id_in_vocabulary(msgspec.json.decode(data), text)
    return None


def _id_in_vocabulary(tokenizer: Any, text: str) -> int | None:
    model = tokenizer.get("model") if isinstance(tokenizer, Mapping) else None
    vocabulary = model.get("vocab") if isinstance(model, Mapping) else None
    if isinstance(vocabulary, Mapping):
        found = vocabulary.get(text)
    else:  # of a Unigram model: pairs of a token and its score, in the order of the ids
        pairs = vocabulary if isinstance(vocabulary, list) else []
        found = next((number for number, pair in enumerate(pairs) if isinstance(pair, list) and pair[:1] == [text]), None)
    return found if type(found) is int and found >= 0 else None
