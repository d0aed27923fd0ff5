"""`flowrt bench hop|start`: the figures that flowrt publishes, measured where you are.

Here: the subcommands as a cyclopts App, which the main command line mounts. Not here: what they measure (flowrt/bench).
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

bench_app = App(name="bench", help="Measure flowrt against its peers, in alternating pairs. Close what else runs first.")

JsonFile = Annotated[str | None, Parameter(help='Write figures and machine to this file as JSON; "-" for standard output.')]


@bench_app.command
def hop(
    *,
    pairs: Annotated[int, Parameter(help="Alternating pairs per figure; a claim takes 20 or more.")] = 40,
    json: JsonFile = None,
    within: Annotated[bool, Parameter(negative=(), help="Only within one process.", show_default=False)] = False,
) -> None:
    """What a message costs: within one process against asyncio queues, between two against pyzmq."""
    from flowrt.bench.commands import hop as measure

    measure(pairs, json, within)


@bench_app.command
def start(
    graph: Annotated[Path, Parameter(help="A graph file with prompts of its own.")],
    /,
    *,
    runs: Annotated[int, Parameter(help="Runs that are counted; one more goes before.")] = 10,
    model: Annotated[Path | None, Parameter(help="A Hugging Face model directory, instead of the graph's.")] = None,
    json: JsonFile = None,
) -> None:
    """From `flowrt run` to its first token, with the files it reads in memory already, and where the time goes."""
    from flowrt.bench.commands import start as measure

    measure(graph, runs, json, model)
