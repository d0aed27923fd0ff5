"""Prompts of a load: random ones of a given length, of a trace, or with common beginnings; or those of a file. The same seed gives the
same prompts."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, cycle, islice
from os.path import isfile
from pathlib import Path
from typing import Any

from flowrt.bench.load.load_options import LoadOptions
from flowrt.errors import TokenizerError, UserError
from flowrt.planner.traffic import BLOCK_TOKENS, parse_traffic, prompt_of
from flowrt.serving.tokenizer import Tokenizer
from flowrt.text_files import TextFileError, read_text_file

_PLAIN_IDS = range(16, 256)  # token ids that every vocabulary has, above the special tokens that many begin with
_MAX_FILE_BYTES = 4 << 30
_TRIES = 10  # to find text of exactly so many tokens
# vLLM's bounds for conversations of ShareGPT.
_MIN_TOKENS, _MAX_PROMPT_TOKENS, _MAX_TOKENS = 4, 1024, 2048


@dataclass(frozen=True)
class LoadPrompt:
    """`num_tokens` of the prompt as the client counts them; 0: unknown. `at_seconds`: when the trace has it."""

    prompt: str | tuple[int, ...]
    num_tokens: int
    max_tokens: int
    at_seconds: float = 0.0


def make_prompts(options: LoadOptions) -> list[LoadPrompt]:
    """Raises UserError."""
    draw = random.Random(options.seed)
    try:
        tokenizer = Tokenizer(options.tokenizer) if options.tokenizer is not None else None
        if options.dataset_name == "random":
            return [_random_prompt(options, tokenizer, draw) for _ in range(options.num_prompts)]
        if options.dataset_name == "prefix_repetition":
            return _repeating_prompts(options, tokenizer, draw)
        assert options.dataset_path is not None
        if options.dataset_name == "mooncake":
            return _trace_prompts(options, tokenizer, options.dataset_path)
        if options.dataset_name == "custom":
            return _custom_prompts(options, tokenizer, options.dataset_path)
        return _sharegpt_prompts(options, tokenizer, draw, options.dataset_path)
    except TokenizerError as error:
        raise UserError(f"--tokenizer: {error}") from None


def _random_prompt(options: LoadOptions, tokenizer: Tokenizer | None, draw: random.Random) -> LoadPrompt:
    low, high = 1 - options.random_range_ratio, 1 + options.random_range_ratio
    num_tokens, max_tokens = (
        max(1, draw.randint(math.floor(length * low), math.ceil(length * high)))
        for length in (options.random_input_len, options.random_output_len)
    )
    prompt = _drawn(tokenizer, num_tokens, draw)
    return LoadPrompt(prompt, _count(tokenizer, prompt), max_tokens)


def _drawn(tokenizer: Tokenizer | None, num_tokens: int, draw: random.Random) -> str | tuple[int, ...]:
    """Token ids, or text of as many tokens, or nearly: tokens of random ids do not all survive being decoded and encoded again."""
    if tokenizer is None:
        return tuple(draw.choices(_PLAIN_IDS, k=num_tokens))
    ids: list[int] = []
    text = ""
    for _ in range(_TRIES):
        while len(ids) < num_tokens:
            if (drawn := draw.randrange(tokenizer.vocab_size)) not in tokenizer.special_token_ids:
                ids.append(drawn)
        text = tokenizer.decode(ids[:num_tokens])
        ids = tokenizer.encode(text)
        if len(ids) == num_tokens:
            break
    return text


def _repeating_prompts(options: LoadOptions, tokenizer: Tokenizer | None, draw: random.Random) -> list[LoadPrompt]:
    """As many prompts with each common beginning, in random order."""
    lengths = options.prefix_repetition_prefix_len, options.prefix_repetition_suffix_len
    num_prefixes = min(options.prefix_repetition_num_prefixes, options.num_prompts)
    prefixes = [_drawn(tokenizer, lengths[0], draw) for _ in range(num_prefixes)]
    prompts = []
    for number in range(options.num_prompts):
        prompt = _joined([prefixes[number % num_prefixes], _drawn(tokenizer, lengths[1], draw)])
        prompts.append(LoadPrompt(prompt, _count(tokenizer, prompt), options.prefix_repetition_output_len))
    draw.shuffle(prompts)
    return prompts


def _trace_prompts(options: LoadOptions, tokenizer: Tokenizer | None, path: Path) -> list[LoadPrompt]:
    """The first requests of a trace, at its times. Prompts that share blocks there begin alike."""
    if not isfile(path):  # else it could be taken for traffic to draw
        raise UserError(f"--dataset-path {path}: no such file")
    try:
        arrivals = parse_traffic(str(path), options.num_prompts).arrivals
    except UserError as error:
        raise UserError(str(error).replace("--traffic", "--dataset-path", 1)) from None
    prompts = []
    for number, arrival in enumerate(arrivals):
        prompt: str | tuple[int, ...]
        if tokenizer is None:
            prompt = prompt_of(number, arrival, _PLAIN_IDS)
        else:
            blocks = arrival.blocks[: arrival.num_input // BLOCK_TOKENS]
            parts = [_drawn(tokenizer, BLOCK_TOKENS, random.Random(f"block {block}")) for block in blocks]
            rest = arrival.num_input - BLOCK_TOKENS * len(blocks)
            prompt = _joined([*parts, _drawn(tokenizer, rest, random.Random(f"request {number}"))])
        prompts.append(LoadPrompt(prompt, _count(tokenizer, prompt), arrival.num_output, arrival.at_seconds))
    return prompts


def _custom_prompts(options: LoadOptions, tokenizer: Tokenizer | None, path: Path) -> list[LoadPrompt]:
    """A line of JSON per prompt, with `prompt` and, if it likes, `output_tokens`; from the first one again where they are too few."""
    prompts = []
    lines = _read(path).split("\n")  # JSON may have other ends of lines within a text
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            prompt, max_tokens = entry["prompt"], entry.get("output_tokens", options.custom_output_len)
            prompt.encode()  # fails for what is not text, and for text that cannot be sent: JSON may name half of a character
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            prompt = max_tokens = None
        if type(max_tokens) is not int or max_tokens < 1:
            raise UserError(f'--dataset-path {path}:{number}: is not {{"prompt": "...", "output_tokens": 64}}')
        prompts.append(LoadPrompt(prompt, _count(tokenizer, prompt), max_tokens))
        if len(prompts) == options.num_prompts:
            break
    if not prompts:
        raise UserError(f"--dataset-path {path}: has no prompt")
    return list(islice(cycle(prompts), options.num_prompts))


def _read(path: Path) -> str:
    try:
        return read_text_file(path, _MAX_FILE_BYTES)
    except TextFileError as error:
        raise UserError(f"--dataset-path {path}: {error}") from None


def _joined(parts: Sequence[str | tuple[int, ...]]) -> str | tuple[int, ...]:
    """Texts, or token ids, behind each other."""
    ids = [part for part in parts if not isinstance(part, str)]
    return tuple(chain(*ids)) if ids else "".join(map(str, parts))


def _count(tokenizer: Tokenizer | None, prompt: str | tuple[int, ...]) -> int:
    if not isinstance(prompt, str):
        return len(prompt)
    return len(tokenizer.encode(prompt)) if tokenizer is not None else 0


def _sharegpt_prompts(options: LoadOptions, tokenizer: Tokenizer | None, draw: random.Random, path: Path) -> list[LoadPrompt]:
    try:
        found = list(_turns(json.loads(_read(path))))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise UserError(f'--dataset-path {path}: is not a list of {{"conversations": [{{"from": ..., "value": ...}}, ...]}}') from None
    draw.shuffle(found)
    prompts = []
    for prompt, response in found:
        num_tokens = _count(tokenizer, prompt)
        max_tokens = options.sharegpt_output_len or _count(tokenizer, response)
        is_short = tokenizer is not None and (num_tokens < _MIN_TOKENS or max_tokens < _MIN_TOKENS)
        if not is_short and num_tokens <= _MAX_PROMPT_TOKENS and num_tokens + max_tokens <= _MAX_TOKENS:
            prompts.append(LoadPrompt(prompt, num_tokens, max_tokens))
        if len(prompts) == options.num_prompts:
            break
    if not prompts:
        raise UserError(f"--dataset-path {path}: has no conversation of {_MIN_TOKENS} to {_MAX_PROMPT_TOKENS} tokens")
    return list(islice(cycle(prompts), options.num_prompts))


def _turns(conversations: Any) -> Iterator[tuple[str, str]]:
    """The first prompt and response of each conversation that has both."""
    for each in conversations:
        turns = each["conversations"]
        if len(turns) >= 2:
            prompt, response = turns[0]["value"], turns[1]["value"]
            if isinstance(prompt, str) and isinstance(response, str):
                yield prompt, response
