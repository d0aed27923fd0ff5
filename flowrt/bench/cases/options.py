"""Options of the commands that decode, with their help, defaults and bounds: once for the command line and for the benchmarks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from cyclopts import Parameter
from cyclopts.validators import Number

Positive = Annotated[int, Parameter(validator=Number(gte=1))]
Positives = Annotated[tuple[int, ...], Parameter(negative=(), consume_multiple=True, validator=Number(gte=1))]


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class DecodeOptions:
    """What is decoded."""

    dtype: Annotated[tuple[str, ...], Parameter(negative=(), consume_multiple=True, help="float32, bfloat16.")] = ("float32", "bfloat16")
    batch: Annotated[Positives, Parameter(help="Batch sizes.")] = (1, 8, 32)
    prompt_tokens: Annotated[Positive, Parameter(help="Tokens of each prompt.")] = 64
    new_tokens: Annotated[
        int, Parameter(validator=Number(gte=2), help="New tokens of each sequence; the first belongs to the prefill.")
    ] = 32
    overrides: Annotated[tuple[str, ...], Parameter(name="--set", negative=(), help="path=value, for the graph.")] = ()
