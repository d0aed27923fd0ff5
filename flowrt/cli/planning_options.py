"""Options of `flowrt sim`, `plan`, `fleet` and `profile`, with their help, defaults and bounds."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, TypeAlias

from cyclopts import Parameter
from cyclopts.validators import Number

from flowrt.cli.options import SET_HELP, read_number

DEFAULT_TRAFFIC = "in=512,out=128"
SHOWN_PLANS = 8
_Overrides: TypeAlias = Annotated[tuple[str, ...], Parameter(name="--set", negative=(), help=SET_HELP)]
_Int: TypeAlias = Annotated[int, Parameter(converter=read_number)]
_Float: TypeAlias = Annotated[float, Parameter(converter=read_number)]
_AllFigures: TypeAlias = Annotated[
    str | None, Parameter(allow_leading_hyphen=True, help='Write all figures to this file; "-" for standard output.')
]


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class SimOptions:
    """What is simulated, at which level, and what is reported."""

    traffic: Annotated[
        str | None,
        Parameter(
            help="in=2048,out=256,rate=8 (requests per second), concurrency=64 in place of rate for a closed loop, or a trace (Mooncake, "
            f"BurstGPT, Azure). [default: {DEFAULT_TRAFFIC} in a closed loop that fills the groups]"
        ),
    ] = None
    requests: Annotated[
        int | None, Parameter(validator=Number(gte=1), help="Maximum number of requests. [default: all of a trace, 1000 drawn ones]")
    ] = None
    level: Annotated[
        Literal["L1", "L2"], Parameter(help="L1: the runtime itself in virtual time. L2: a model of its steps, for any size.")
    ] = "L2"
    skew: Annotated[
        float, Parameter(validator=Number(gte=0, lte=4), help="L2: exponent of the power law by which rows choose experts; 0: evenly.")
    ] = 0.0
    seed: Annotated[int, Parameter(validator=Number(gte=0), help="L2: seed of what is drawn.")] = 0
    overrides: _Overrides = ()
    scenario: Annotated[
        Path | None,
        Parameter(help="L1: inject the faults of this scenario file, with detector, hedging and recovery as the graph has them."),
    ] = None
    restart: Annotated[
        str | None, Parameter(help="With --scenario: time until a process that died has loaded its weights elsewhere. [default: 3min]")
    ] = None
    trace: Annotated[str | None, Parameter(help="L1: write what each process computed and sent to this file, for ui.perfetto.dev.")] = None
    sweep: Annotated[
        Path | None,
        Parameter(help="Simulate all combinations of the values in this file, as set: {deploy.experts.servers: [2, 4]}, and compare them."),
    ] = None
    json: Annotated[str | None, Parameter(allow_leading_hyphen=True, help="Write the figures into this file; - for standard output.")] = (
        None
    )
    plot: Annotated[str | None, Parameter(help="Draw the latencies, or the sweep, into this file (.svg, .png, .pdf).")] = None


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """Options of `flowrt plan`."""

    hardware: Annotated[str, Parameter(help="A cluster or device card, by name or path; or nodes, as 4xh20,2xl40s.")]
    traffic: Annotated[str, Parameter(help="in=2048,out=256,rate=8 (tokens, requests per second), or the file of a trace.")]
    slo: Annotated[str, Parameter(help="Limits of the mean times to the first token and between tokens, with units.")] = "ttft=2s,itl=50ms"
    objective: Annotated[
        Literal["throughput", "cost", "latency", "energy"],
        Parameter(help="What is best: most tokens per second, lowest price, lowest latency, or least energy per token."),
    ] = "throughput"
    weights: Annotated[Literal["dtype", "int8", "fp8"], Parameter(help="What the large matrices are held in.")] = "dtype"
    strategy: Annotated[
        str | None, Parameter(help="Look at this strategy only, as 'TP=4 + DP=8, EP=32'. [default: all, and split attention and experts]")
    ] = None
    skew: Annotated[_Float, Parameter(help="Exponent of the power law of experts' loads; 0: all equal.")] = 0.0
    top: Annotated[_Int, Parameter(help="Show so many plans.")] = SHOWN_PLANS
    out: Annotated[str | None, Parameter(help="Write the best plan that a graph file can express to this file.")] = None
    json: _AllFigures = None
    plot: Annotated[str | None, Parameter(help="Draw tokens per second against latency into this .png, .svg or .pdf file.")] = None


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class FleetOptions:
    """Options of `flowrt fleet`."""

    traffic: Annotated[str, Parameter(help="in=2048,out=256,rate=8 (tokens, requests per second), or the file of a trace.")]
    daily: Annotated[Path | None, Parameter(help="A CSV file with hour,requests_per_second: how many devices each hour needs.")] = None
    batch: Annotated[_Float | None, Parameter(help="Decoding sequences of each group. [default: limits.max_num_seqs]")] = None
    failures: Annotated[_Float, Parameter(help="Failures per week of 4096 devices; 8.8 is what Expert-as-a-Service counted.")] = 8.8
    lost: Annotated[_Int, Parameter(help="Devices that fail one by one and do not return.")] = 10
    restart: Annotated[str, Parameter(help="Time until a process on a spare device has loaded its weights.")] = "3min"
    operator: Annotated[str, Parameter(help="Time until a person starts a run that has ended, with recovery: off.")] = "30min"
    seed: Annotated[_Int, Parameter(help="Seed of failures and of routing.")] = 0
    overrides: _Overrides = ()
    json: _AllFigures = None


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class ProfileCommandOptions:
    """What is measured, and where the card goes."""

    out: Annotated[str, Parameter(allow_leading_hyphen=True, help="Write the card into this file; - for standard output.")] = "machine.yaml"
    threads: Annotated[
        int | None, Parameter(validator=Number(gte=1), help="Compute threads of a process, which is a device. [default: a thread per core]")
    ] = None
    dtype: Annotated[
        tuple[Literal["bfloat16", "float32"], ...],
        Parameter(
            negative=(), consume_multiple=True, help="Dtypes of weights and products. [default: bfloat16 float32]", show_default=False
        ),
    ] = ("bfloat16", "float32")
    hosts: Annotated[
        Path | None, Parameter(help="Measure the link between nodes on the hosts of this graph file, not between two processes.")
    ] = None
