"""Options of several commands, with their help, defaults and bounds: once for the command line and for the benchmarks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter
from cyclopts.validators import Number


def option(help: str | None = None, **more: Any) -> Parameter:
    """The help of an option, before all else."""
    return Parameter(help=help, **more)


Positive = Annotated[int, Parameter(validator=Number(gte=1))]
Pairs = Annotated[int, option("Alternating pairs per figure; a claim takes 20 or more.", validator=Number(gte=1))]
JsonFile = Annotated[
    str | None, option('Write figures and machine to this file as JSON; "-" for standard output.', allow_leading_hyphen=True)
]
ModelOption = Annotated[Path | None, option("Use this Hugging Face model directory instead of the graph's.")]
SET = Parameter(name="--set", negative=(), show_default=False)
FLAG = Parameter(negative=(), show_default=False)
Overrides = Annotated[tuple[str, ...], SET, option("Override a key of every graph, as path=value; repeatable.")]
PlotFile = Annotated[str | None, option("Draw the figures into this file (.svg, .png, .pdf).")]


def _words(values: tuple[object, ...]) -> str:
    """A default of several values, as it is typed."""
    return " ".join(map(str, values))


_SEVERAL = Parameter(negative=(), consume_multiple=True, show_default=_words)
Positives = Annotated[tuple[int, ...], _SEVERAL, Parameter(validator=Number(gte=1))]
_AtLeast2 = Annotated[int, Parameter(validator=Number(gte=2))]


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class DecodeOptions:
    """What is decoded."""

    dtype: Annotated[tuple[str, ...], _SEVERAL, option("Dtypes: float32, bfloat16.")] = ("float32", "bfloat16")
    batch: Annotated[Positives, option("Batch sizes.")] = (1, 8, 32)
    prompt_tokens: Annotated[Positive, option("Tokens of each prompt.")] = 64
    new_tokens: Annotated[_AtLeast2, option("New tokens of each sequence; the first belongs to the prefill.")] = 32
    overrides: Overrides = ()


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class ServedOptions:
    """The load on a served graph, with and without what is measured."""

    pairs: Pairs = 20
    batch: Annotated[Positive, option("Prompts at a time.")] = 8
    prompt_tokens: Annotated[Positive, option("Tokens of each prompt.")] = 16
    new_tokens: Annotated[_AtLeast2, option("New tokens of each sequence.")] = 64
    model: ModelOption = None
    overrides: Overrides = ()
    json: JsonFile = None

    @property
    def decode(self) -> DecodeOptions:
        return DecodeOptions(batch=(self.batch,), prompt_tokens=self.prompt_tokens, new_tokens=self.new_tokens, overrides=self.overrides)


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class ManyRequestsOptions(ServedOptions):
    """Options of a load that has more requests."""

    batch: Annotated[Positive, option("Prompts at a time.")] = 32


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class OperatorOptions:
    """The calls that are timed, and the sizes of random weights where no model is given."""

    dtype: Annotated[Literal["float32", "bfloat16"], option("Dtype of weights and products.")] = "float32"
    rows: Annotated[Positives, option("Numbers of rows.")] = (1, 4, 8, 32, 128, 512)
    context: Annotated[Positives, option("Tokens that each row attends to; two or more lengths give the cost per token.")] = (64, 256)
    layers: Annotated[Positive, option("Number of MoE layers that are timed in turn.")] = 4
    threads: Annotated[Positive, option("Compute threads; one thread is timed by its processor time.")] = 1
    hidden: Annotated[Positive, option("Without a model: width of a row.")] = 1024
    width: Annotated[Positive, option("Width of an expert.")] = 512
    experts: Annotated[Positive, option("Experts of a layer.")] = 32
    top_k: Annotated[Positive, option("Experts of a row.")] = 4
    vocabulary: Annotated[Positive, option("Tokens of the vocabulary.")] = 32000

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


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class LatencyOptions:
    """The load: sequences that run at a time, and prompts that arrive meanwhile, one after the other."""

    streams: Annotated[Positive, option("Sequences that run at a time.")] = 8
    prompt_tokens: Annotated[Positive, option("Tokens of their prompts.")] = 16
    new_tokens: Annotated[int, option("New tokens of each sequence.", validator=Number(gte=4))] = 64
    arriving_tokens: Annotated[int, option("Tokens of the prompts that arrive meanwhile; 0: none.", validator=Number(gte=0))] = 0
    first: Annotated[bool, FLAG, option("Measure the first request after a start.")] = False
    overrides: Overrides = ()
    against: Annotated[
        tuple[str, ...],
        FLAG,
        Parameter(name="--against-set", help="Override a key of the graph to compare with, as path=value; repeatable."),
    ] = ()


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class StreamOptions:
    """Sequences that run while prompts arrive."""

    streams: Annotated[int, option("Sequences that run at a time; 0: measure transfers alone.", validator=Number(gte=0))] = 0
    new_tokens: Annotated[int, option("New tokens of each sequence.", validator=Number(gte=4))] = 64
    chunks: Annotated[Positives, option("Maximum rows of a step of the group that computes prompts and tokens; the best counts.")] = (
        64,
        128,
        256,
        512,
    )


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class SweepOptions:
    """How the variants of a sweep are measured."""

    processes: Annotated[bool, FLAG, option("Measure between real processes, in alternating pairs, not in virtual time.")] = False
    dilation: Annotated[float, option("With --processes: factor of all modelled times.", validator=Number(gte=1))] = 1000.0
    pairs: Pairs = 20
    json: JsonFile = None
    plot: PlotFile = None
