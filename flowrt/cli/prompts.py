"""What a user asks: the prompts of a command line or of a JSON lines file, with their parameters, checked before anything starts.

Here: Asked, `read_prompts` and the checks of single values, which options and file lines share. Not here: what only the model can refuse
(prompts too long, tokens outside its vocabulary: flowrt/engine/validation.py). Called by cli_run.py. Every error is one line.
"""

from __future__ import annotations

import difflib
import json
import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from flowrt.engine.validation import MAX_CHOICES, MAX_LOGPROBS
from flowrt.errors import UserError
from flowrt.gateway.gateway import Parameters
from flowrt.gateway.request_log import shown

STDIN = "-"
MAX_LINE_BYTES = 16 << 20
MAX_DIGITS = 600  # of a number: more than any float has, and within what the interpreter reads whatever its settings
MAX_SEED = (1 << 63) - 1
EXAMPLE = '{"prompt": "text"} or {"prompt_token_ids": [1, 2]}'


@dataclass(frozen=True)
class Asked:
    """One request as its user put it: text, or token ids."""

    prompt: str | tuple[int, ...]
    parameters: Parameters


def text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError("must be a text in quotes")
    if any("\ud800" <= character <= "\udfff" for character in value):
        raise ValueError("holds half a character (an unpaired surrogate, or bytes that are no UTF-8); write whole characters")
    return value


def token_ids(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(token_id) is int for token_id in value):
        raise ValueError("must be a list of whole numbers, such as [1, 2, 3]")
    return tuple(value)


def max_tokens(value: Any) -> int:
    return _whole(value, 1, None)


def top_k(value: Any) -> int:
    return _whole(value, 0, None, "; 0 is off")


def seed(value: Any) -> int:
    return _whole(value, 0, MAX_SEED)


def temperature(value: Any) -> float:
    number = _number(value)
    if not (math.isfinite(number) and number >= 0):
        raise ValueError(f"is {shown(value)}, must be 0 (greedy) or more")
    return number


def top_p(value: Any) -> float:
    number = _number(value)
    if not 0 < number <= 1:
        raise ValueError(f"is {shown(value)}, must be above 0 and at most 1; 1 is off")
    return number


def stop(value: Any) -> tuple[str, ...]:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(each, str) and each for each in texts):
        raise ValueError("must be a text or a list of texts, none of them empty")
    return tuple(text(each) for each in texts)


def min_tokens(value: Any) -> int:
    return _whole(value, 0, None)


def n(value: Any) -> int:
    return _whole(value, 1, MAX_CHOICES)


def logprobs(value: Any) -> int:
    return _whole(value, 0, MAX_LOGPROBS)


def presence_penalty(value: Any) -> float:
    number = _number(value)
    if not -2 <= number <= 2:
        raise ValueError(f"is {shown(value)}, must be from -2 to 2; 0 is off")
    return number


def frequency_penalty(value: Any) -> float:
    return presence_penalty(value)


def repetition_penalty(value: Any) -> float:
    number = _number(value)
    if not (math.isfinite(number) and number > 0):
        raise ValueError(f"is {shown(value)}, must be above 0; 1 is off")
    return number


def ignore_eos(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError("must be true or false")
    return value


PARAMETERS: dict[str, Callable[[Any], Any]] = {
    check.__name__: check
    for check in (
        max_tokens,
        temperature,
        top_p,
        top_k,
        seed,
        stop,
        ignore_eos,
        min_tokens,
        n,
        presence_penalty,
        frequency_penalty,
        repetition_penalty,
        logprobs,
    )
}
KEYS: dict[str, Callable[[Any], Any]] = {"prompt": text, "prompt_token_ids": token_ids, **PARAMETERS}


def checked_parameters(options: Mapping[str, Any]) -> Parameters:
    """Parameters from the command line's options (None: not given). Raises UserError naming the option."""
    given = {}
    for name, value in options.items():
        if value is not None:
            try:
                given[name] = PARAMETERS[name](value)
            except ValueError as error:
                raise UserError(f"--{name.replace('_', '-')} {error}") from None
    return Parameters(**given)


def option_number(kind: type[int | float], word: str) -> int | float:
    """The number of an option, in the decimal notation of JSON. Raises ValueError, one line."""
    pattern = r"[+-]?[0-9]+" if kind is int else r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?"
    if len(word) <= MAX_DIGITS and re.fullmatch(pattern, word):
        return kind(word)
    raise ValueError(f"is {shown(word)}, must be {'a whole number' if kind is int else 'a number'} in decimal digits")


def checked_text(value: str) -> str:
    """The text of a --prompt. Raises UserError."""
    try:
        return text(value)
    except ValueError as error:
        raise UserError(f"--prompt {error}") from None


def read_prompts(name: str, defaults: Parameters) -> list[Asked]:
    """The requests of a JSON lines file, in order; "-" reads standard input. `defaults` hold where a line says nothing.

    Raises UserError "FILE:LINE: ..." for the first line that is wrong, and for a file without a line.
    """
    if name == STDIN:
        asked = list(_read("standard input", sys.stdin.buffer, defaults))
    else:
        try:
            with Path(name).open("rb") as file:
                asked = list(_read(name, file, defaults))
        except FileNotFoundError:
            raise UserError(f"{name}: no such file; give --prompts the path of a file with one {EXAMPLE} per line") from None
        except OSError as error:
            raise UserError(f"{name}: cannot be read ({error.strerror}); give --prompts a file that you may read") from None
    if not asked:
        raise UserError(f"{name}: holds no prompt; write one {EXAMPLE} per line")
    return asked


def _read(name: str, file: BinaryIO, defaults: Parameters) -> Iterator[Asked]:
    number = 0
    while line := file.readline(MAX_LINE_BYTES + 1):
        number += 1
        if len(line) > MAX_LINE_BYTES:
            raise UserError(f"{name}:{number}: is longer than {MAX_LINE_BYTES >> 20} MiB; write one prompt per line")
        if line.strip():
            try:
                yield _asked(line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line, defaults)
            except ValueError as error:
                raise UserError(f"{name}:{number}: {error}") from None


def _asked(line: bytes, defaults: Parameters) -> Asked:
    given = _object(line)
    values = {}
    for key, value in given.items():
        if key not in KEYS:
            near = difflib.get_close_matches(key, KEYS, 1)
            raise ValueError(f"unknown key {shown(key)}; {f'did you mean {near[0]}?' if near else 'known are ' + ', '.join(KEYS)}")
        try:
            values[key] = KEYS[key](value)
        except ValueError as error:
            raise ValueError(f"{key} {error}") from None
    prompts = [values.pop(key) for key in ("prompt", "prompt_token_ids") if key in values]
    if len(prompts) != 1:
        raise ValueError(f"{'both prompt and prompt_token_ids' if prompts else 'no prompt'}; write {EXAMPLE}")
    return Asked(prompts[0], msgspec.structs.replace(defaults, **values))


def _object(line: bytes) -> dict[str, Any]:
    try:
        value = json.loads(line.decode("utf-8"), object_pairs_hook=_once, parse_constant=_no_constant, parse_int=_integer)
    except UnicodeDecodeError:
        raise ValueError("is not UTF-8 text; save the file as UTF-8") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"is not JSON ({error.msg} at column {error.colno}); write {EXAMPLE}") from None
    except RecursionError:
        raise ValueError(f"is nested too deep; write {EXAMPLE}") from None
    if not isinstance(value, dict):
        raise ValueError(f"is no JSON object; write {EXAMPLE}")
    return value


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [key for key, _ in pairs]
        raise ValueError(f"the key {shown(next(key for key in names if names.count(key) > 1))} is there twice; keep one")
    return values


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON; write a number")


def _integer(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise ValueError(f"holds a number of {len(digits)} digits, which is too large")
    return int(digits)


def _whole(value: Any, least: int, most: int | None, hint: str = "") -> int:
    bounds = f"a whole number of at least {least}" if most is None else f"a whole number from {least} to {most}"
    if type(value) is not int or value < least or (most is not None and value > most):
        raise ValueError(f"is {_shown_json(value)}, must be {bounds}{hint}")
    return value


def _shown_json(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _number(value: Any) -> float:
    if type(value) not in (int, float):
        raise ValueError("must be a number")
    try:
        return float(value)
    except OverflowError:
        raise ValueError("is too large") from None
