"""Options of the commands that decode, with their help, defaults and bounds: once for the command line and for the benchmarks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from cyclopts import Parameter
from cyclopts.validators import Number

Positive = Annotated[int, Parameter(validator=Number(gte=1))]


def _words(values: tuple[object, ...]) -> str:
    """A default of several values, as it is typed."""
    return " ".join(map(str, values))


_SEVERAL = Parameter(negative=(), consume_multiple=True, show_default=_words)
Positives = Annotated[tuple[int, ...], _SEVERAL, Parameter(validator=Number(gte=1))]


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class DecodeOptions:
    """What is decoded."""

    dtype: Annotated[tuple[str, ...], _SEVERAL, Parameter(help="float32, bfloat16.")] = ("float32", "bfloat16")
    batch: Annotated[Positives, Parameter(help="Batch sizes.")] = (1, 8, 32)
    prompt_tokens: Annotated[Positive, Parameter(help="Tokens of each prompt.")] = 64
    new_tokens: Annotated[
        int, Parameter(validator=Number(gte=2), help="New tokens of each sequence; the first belongs to the prefill.")
    ] = 32
    overrides: Annotated[tuple[str, ...], Parameter(name="--set", negative=(), show_default=False, help="path=value, for the graph.")] = ()


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class OperatorOptions:
    """The calls that are timed, and the sizes of random weights where no model is given."""

    dtype: Annotated[Literal["float32", "bfloat16"], Parameter(help="Of weights and products.")] = "float32"
    rows: Annotated[Positives, Parameter(help="Numbers of rows.")] = (1, 4, 8, 32, 128, 512)
    context: Annotated[Positives, Parameter(help="Tokens that each row attends to; two lengths or more tell its cost per token.")] = (
        64,
        256,
    )
    layers: Annotated[Positive, Parameter(help="Layers with experts that are timed in turn.")] = 4
    threads: Annotated[Positive, Parameter(help="Compute threads. A single one is timed by its processor time.")] = 1
    hidden: Annotated[Positive, Parameter(help="Without a model: width of a row.")] = 1024
    width: Annotated[Positive, Parameter(help="Width of an expert.")] = 512
    experts: Annotated[Positive, Parameter(help="Experts of a layer.")] = 32
    top_k: Annotated[Positive, Parameter(help="Experts of a row.")] = 4
    vocabulary: Annotated[Positive, Parameter(help="Tokens of the vocabulary.")] = 32000

    @property
    def sizes(self) -> dict[str, Any]:
        """Fields of the configuration of a model with random weights."""
        return {
            "hidden_size": self.hidden,
            "expert_width": self.width,
            "num_experts": self.experts,
            "num_experts_per_token": self.top_k,
            "vocab_size": self.vocabulary,
            "num_layers": self.layers,
            "moe_layers": tuple(range(self.layers)),
        }
