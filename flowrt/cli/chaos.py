"""`flowrt chaos GRAPH`: inject faults into a running graph under load and report their effect."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from flowrt.chaos.chaos_options import ChaosOptions

chaos_app = App(name="chaos")


@chaos_app.default
def chaos(
    graph: Annotated[Path, Parameter(help="A graph file that serves a model.")],
    /,
    *,
    options: ChaosOptions = ChaosOptions(),
    json: Annotated[
        str | None, Parameter(allow_leading_hyphen=True, help='Write figures and faults to this file; "-" for standard output.')
    ] = None,
    plot: Annotated[str | None, Parameter(help="Draw throughput over time into this file (.svg, .png, .pdf).")] = None,
) -> None:
    """Inject faults into a running graph and report their effect.

    Sends the same requests without and with faults, and compares every token.

    Exit codes: 0 all answers are right and nothing is left behind, 1 otherwise, 2 bad input, 130 interrupted (the report so far is
    printed and written).
    """
    from flowrt.chaos.command import run

    raise SystemExit(run(graph, options, json, plot))
