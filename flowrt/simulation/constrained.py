"""Draws constraints for the requests of a simulation, and checks that outputs keep to them, degraded ones too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

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
