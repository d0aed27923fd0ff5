"""Options of `flowrt sim`, with their help, defaults and bounds."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter
from cyclopts.validators import Number

DEFAULT_TRAFFIC = "in=512,out=128"


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
    overrides: Annotated[
        tuple[str, ...], Parameter(name="--set", negative=(), help="Override a key, as deploy.experts.servers=2; repeatable.")
    ] = ()
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
    json: Annotated[str | None, Parameter(help="Write the figures into this file; - for standard output.")] = None
    plot: Annotated[str | None, Parameter(help="Draw the latencies, or the sweep, into this file (.svg, .png, .pdf).")] = None
