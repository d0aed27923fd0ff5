"""Options of `flowrt chaos`, with their help, defaults and bounds."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from cyclopts.validators import Number

from flowrt.bench.cases.case_options import FLAG, SET, ModelOption, Overrides, Positive, option
from flowrt.reliability.scenario import MAX_SECONDS

Seconds = Annotated[float, option("Seconds of load before each kill, and at least as many after it.", validator=Number(gte=1, lte=60))]
MAX_KILLS = 100_000
_SECONDS = Number(gte=0, lte=MAX_SECONDS)


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class ChaosOptions:
    """The faults and the load of a chaos run. Exactly one of `plan` and `kills` is given.

    The load alternates between a stretch without faults and one with them: the plan once, or one fault.
    """

    plan: Annotated[Path | None, option("Inject the faults of this scenario file, in the format of flowrt simulate.")] = None
    kills: Annotated[
        int, option("Without a plan: number of faults, each in its own stretch of load.", validator=Number(gte=0, lte=MAX_KILLS))
    ] = 0
    roles: Annotated[str, option("With --kills: roles to hit, as attention,experts; all: those whose death the run survives.")] = "all"
    fault: Annotated[str, option("With --kills: faults that take turns, as kill,hang. They are kill, pause, stall, hang; or all.")] = "kill"
    phase: Annotated[
        str,
        option(
            "With --kills: try each role and fault in these phases, as start,drain. They are start, prefill, decode, idle, replay, "
            "drain; or all. any: at random moments."
        ),
    ] = "any"
    pairs: Annotated[
        Positive, option("Number of times to run the plan, each after a stretch without faults. A claim takes 20 or more.")
    ] = 1
    seed: Annotated[int, option("Seed that chooses the processes.")] = 0
    spare: Annotated[bool, FLAG, option("Compare throughput with the target for servers with spare capacity.")] = False
    requests: Annotated[Positive, option("Number of different requests, sent in a loop, with different sampling parameters.")] = 16
    concurrency: Annotated[Positive, option("Requests at a time.")] = 8
    seconds: Annotated[
        float, option("Seconds of each stretch without faults; one with faults has at least as many.", validator=_SECONDS)
    ] = 5.0
    constrained: Annotated[bool, FLAG, option("Send only requests with structured outputs.")] = False
    prompt_tokens: Annotated[Positive, option("Tokens of the longest prompt.")] = 16
    new_tokens: Annotated[Positive, option("Tokens of each answer.")] = 32
    model: ModelOption = None
    overrides: Annotated[tuple[str, ...], SET, option("Override a key, as deploy.experts.servers=2; repeatable.")] = ()


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class RecoveryOptions:
    """The load of `flowrt bench recovery`: greedy requests of one length."""

    requests: Annotated[Positive, option("Number of different requests, sent in a loop.")] = 16
    concurrency: Annotated[Positive, option("Requests at a time.")] = 24
    seconds: Seconds = 4.0
    prompt_tokens: Annotated[Positive, option("Tokens of the longest prompt.")] = 16
    new_tokens: Annotated[Positive, option("Tokens of each answer.")] = 32
    overrides: Overrides = ()
