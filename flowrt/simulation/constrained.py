"""Draws constraints for the requests of a simulation, and checks that outputs keep to them, degraded ones too."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import tokenizers

from flowrt.engine.constraint_builder import ConstraintBuilder
from flowrt.operators.families.registry import read_model_config
from flowrt.sampling_params import SamplingParams
from flowrt.structured_outputs import StructuredOutputs

_SCHEMA = '{"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "boolean"}}, "required": ["b"]}'


def drawn_constraints(directory: Path, vocabulary: int) -> Mapping[int, dict[str, Any]]:
    """Parameters by number of a request in the pool. Those with text need a tokenizer, and the library for grammars."""
    drawn: dict[int, dict[str, Any]] = {4: {"allowed_token_ids": tuple(range(0, vocabulary, 3))}}
    if (directory / "tokenizer.json").is_file() and find_spec("llguidance") is not None:
        drawn[10] = {"structured_outputs": StructuredOutputs(regex="[a-f][0-9]([a-f][0-9])?(-[a-z]+)*")}
        drawn[13] = {"structured_outputs": StructuredOutputs(json=_SCHEMA)}
        drawn[16] = {"structured_outputs": StructuredOutputs(choice=("true", "false", "tea10", "10abc"))}
        drawn[17] = {"bad_words": ("a", "ab", "10", "{")}
    return drawn


def is_whole(directory: Path, outputs: StructuredOutputs | None, token_ids: Sequence[int]) -> bool:
    """Whether the text of an output, without the token that ended it, is one of those that `outputs` asks for. Needs no grammar."""
    if outputs is None:
        return True
    text = _tokenizer(directory).decode(list(token_ids))
    if outputs.json is not None:
        try:
            value = json.loads(text)
        except ValueError:
            return False
        return isinstance(value.get("b"), bool) and isinstance(value.get("a", 1), int)
    return text in outputs.choice if outputs.choice else re.fullmatch(outputs.regex or "", text) is not None


def first_mismatch(directory: Path, params: SamplingParams, token_ids: Sequence[int]) -> int | None:
    """The index of the first token that its constraint does not allow behind the earlier ones."""
    if not params.is_constrained:
        return None
    constraint = _builder(directory).constraint(params)
    for index, token_id in enumerate(token_ids):
        if not constraint.mask()[token_id >> 3] >> (token_id & 7) & 1:
            return index
        constraint.accept(token_id)
    return None


@lru_cache(maxsize=16)
def _builder(directory: Path) -> ConstraintBuilder:
    config = read_model_config(directory)
    return ConstraintBuilder(directory, config.vocab_size, config.eos_token_ids)


@lru_cache(maxsize=16)
def _tokenizer(directory: Path) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))


def ends_output(directory: Path, params: SamplingParams, token_id: int) -> bool:
    return token_id in params.stop_token_ids or token_id in read_model_config(directory).eos_token_ids
