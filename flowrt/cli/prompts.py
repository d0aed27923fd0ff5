"""Reads and checks prompts with their parameters, from the command line, a text or a JSON lines file, before any process starts."""

from __future__ import annotations

import difflib
import json
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from flowrt.errors import UserError, shown
from flowrt.sampling_params import PARAMETER_TYPES, SamplingParams, check_text, checked_value
from flowrt.serving.chat import Chat, ChatError, check_chat

STDIN = "-"
MAX_LINE_BYTES = 16 << 20
MAX_DIGITS = 600  # of a number: more than any float has, and within what the interpreter reads whatever its settings
KEYS = ("prompt", "prompt_token_ids", *PARAMETER_TYPES)
EXAMPLE = '{"prompt": "text"} or {"prompt_token_ids": [1, 2]}'


@dataclass(frozen=True)
class PromptRequest:
    """One request as the user wrote it: text or token ids."""

    prompt: str | tuple[int, ...]
    params: SamplingParams


def checked_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters that the command line's options give (None: not given). Raises UserError naming the option."""
    given = {}
    for name, value in options.items():
        if value is not None:
            try:
                given[name] = checked_value(name, value)
            except ValueError as error:
                raise UserError(f"--{name.replace('_', '-')} {error}") from None
    return given


def option_number(kind: type[int | float], word: str) -> int | float:
    """The number of an option, in the decimal notation of JSON. Raises ValueError, one line."""
    pattern = r"[+-]?[0-9]+" if kind is int else r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?"
    if len(word) <= MAX_DIGITS and re.fullmatch(pattern, word):
        return kind(word)
    raise ValueError(f"is {shown(word)}, must be {'a whole number' if kind is int else 'a number'} in decimal digits")


def checked_text(value: str) -> str:
    """The text of a --prompt. Raises UserError."""
    try:
        check_text(value)
    except ValueError as error:
        raise UserError(f"--prompt {error}") from None
    return value


def checked_template_kwargs(text: str) -> dict[str, Any]:
    """The value of --chat-template-kwargs. Raises UserError."""
    try:
        kwargs = msgspec.json.decode(text, type=dict[str, Any])
        check_chat(Chat([], kwargs=kwargs))
    except ChatError as error:
        raise UserError(f"--chat-template-kwargs: {error}") from None
    except ValueError:
        example = '{"enable_thinking": false}'
        raise UserError(f"--chat-template-kwargs is {shown(text)}, it must be a JSON object, such as {example}") from None
    return kwargs


def read_prompts(name: str, defaults: SamplingParams) -> list[PromptRequest]:
    """The requests of a file, in order: of a .txt file a prompt per line, of any other JSON lines; "-" reads JSON lines from standard
    input. `defaults` apply to keys that a line does not have.

    Raises UserError "FILE:LINE: ..." for the first line that is wrong, and for a file without a line.
    """
    if name == STDIN:
        if sys.stdin is None:
            raise UserError("standard input is closed; give --prompts a file, or send the prompts through a pipe")
        requests = list(_read("standard input", sys.stdin.buffer, defaults))
    else:
        try:
            with Path(name).open("rb") as file:
                requests = list(_read(name, file, defaults))
        except FileNotFoundError:
            raise UserError(f"{name}: no such file; give --prompts the path of a file with one prompt per line") from None
        except OSError as error:
            raise UserError(f"{name}: cannot be read ({error.strerror}); give --prompts a file that you may read") from None
    if not requests:
        raise UserError(f"{name}: holds no prompt; write one per line")
    return requests


def _read(name: str, file: BinaryIO, defaults: SamplingParams) -> Iterator[PromptRequest]:
    read = _text_request if name.endswith(".txt") else _request
    number = 0
    while line := file.readline(MAX_LINE_BYTES + 1):
        number += 1
        if len(line) > MAX_LINE_BYTES:
            raise UserError(f"{name}:{number}: is longer than {MAX_LINE_BYTES >> 20} MiB; write one prompt per line")
        if line.strip():
            try:
                yield read(_decoded(line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line), defaults)
            except ValueError as error:
                raise UserError(f"{name}:{number}: {error}") from None


def _decoded(line: bytes) -> str:
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError:
        raise ValueError("is not UTF-8 text; save the file as UTF-8") from None


def _text_request(line: str, defaults: SamplingParams) -> PromptRequest:
    return PromptRequest(line.rstrip("\r\n"), defaults)


def _request(line: str, defaults: SamplingParams) -> PromptRequest:
    given = _object(line)
    values = {}
    for key, value in given.items():
        if key not in KEYS:
            near = difflib.get_close_matches(key, KEYS, 1)
            raise ValueError(f"unknown key {shown(key)}; {f'did you mean {near[0]}?' if near else 'known are ' + ', '.join(KEYS)}")
        try:
            values[key] = _checked(key, value)
        except ValueError as error:
            raise ValueError(f"{key} {error}") from None
    prompts = [values.pop(key) for key in ("prompt", "prompt_token_ids") if key in values]
    if len(prompts) != 1:
        raise ValueError(f"{'both prompt and prompt_token_ids' if prompts else 'no prompt'}; write {EXAMPLE}")
    return PromptRequest(prompts[0], msgspec.structs.replace(defaults, **values))


def _object(line: str) -> dict[str, Any]:
    try:
        value = json.loads(line, object_pairs_hook=_once, parse_constant=_no_constant, parse_int=_integer)
    except json.JSONDecodeError as error:
        raise ValueError(f"is not JSON ({error.msg} at column {error.colno}); write {EXAMPLE}, or plain prompts in a .txt file") from None
    except RecursionError:
        raise ValueError(f"is nested too deep; write {EXAMPLE}") from None
    if not isinstance(value, dict):
        raise ValueError(f"is not a JSON object; write {EXAMPLE}")
    return value


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [key for key, _ in pairs]
        raise ValueError(f"the key {shown(next(key for key in names if names.count(key) > 1))} exists twice; keep one")
    return values


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON; write a number")


def _integer(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise ValueError(f"holds a number of {len(digits)} digits, which is too large")
    return int(digits)


def _checked(key: str, value: Any) -> Any:
    """The value of one key. ValueError, one line that does not name the key."""
    if key == "prompt":
        if not isinstance(value, str):
            raise ValueError("must be a text in quotes")
        check_text(value)
        return value
    if key == "prompt_token_ids":
        if not isinstance(value, list) or not all(type(token_id) is int for token_id in value):
            raise ValueError("must be a list of whole numbers, such as [1, 2, 3]")
        return tuple(value)
    return checked_value(key, value)
