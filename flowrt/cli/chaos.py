"""`flowrt chaos GRAPH`: inject faults into a running graph under load and report their effect."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

chaos_app = App(name="chaos", help="Inject faults into a running graph and report their effect.")


@chaos_app.default
def chaos(
    graph: Annotated[Path, Parameter(help="A graph file that serves a model.")],
    /,
    *,
    plan: Annotated[Path | None, Parameter(help="Inject the faults of this scenario file (the format of the simulation).")] = None,
    kills: Annotated[int, Parameter(help="Instead of a plan: kill this many expert servers, each when the one before is back.")] = 0,
    seed: Annotated[int, Parameter(help="Seed that chooses the servers to kill.")] = 0,
    apart: Annotated[float, Parameter(help="Seconds from a server's return to the next kill.")] = 1.0,
    spare: Annotated[
        bool, Parameter(negative=(), help="Judge throughput against servers with spare capacity.", show_default=False)
    ] = False,
    requests: Annotated[int, Parameter(help="Number of different requests, sent in a loop; every other one samples.")] = 16,
    concurrency: Annotated[int, Parameter(help="Requests at a time.")] = 8,
    seconds: Annotated[float, Parameter(help="Seconds of load without faults, and at least as many with them.")] = 10.0,
    prompt_tokens: Annotated[int, Parameter(help="Tokens of the longest prompt.")] = 16,
    new_tokens: Annotated[int, Parameter(help="Tokens of each answer.")] = 32,
    model: Annotated[Path | None, Parameter(help="A Hugging Face model directory, instead of the graph's.")] = None,
    overrides: Annotated[list[str] | None, Parameter(name="--set", negative=(), help="path=value, for the graph.")] = None,
    json: Annotated[
        str | None, Parameter(allow_leading_hyphen=True, help='Write figures and faults to this file; "-" for standard output.')
    ] = None,
    plot: Annotated[str | None, Parameter(help="Draw throughput over time into this file (.svg, .png, .pdf).")] = None,
) -> None:
    """Send a graph the same requests without and with faults, and compare every token.

    Exit codes: 0 all answers are right, 1 a token was lost, doubled or changed or a request failed, 2 bad input, 130 interrupted (the
    report so far is printed and written).
    """
    from flowrt.chaos.command import run
    from flowrt.chaos.measure import ChaosOptions
    from flowrt.cli.record import check_writable

    if json is not None:
        check_writable(json)
    options = ChaosOptions(
        graph=graph,
        plan=plan,
        kills=kills,
        seed=seed,
        apart_seconds=apart,
        spare=spare,
        num_requests=requests,
        concurrency=concurrency,
        seconds=seconds,
        prompt_tokens=prompt_tokens,
        new_tokens=new_tokens,
        model=model,
        overrides=tuple(overrides or ()),
    )
    raise SystemExit(run(options, json, plot))
