"""`flowrt bench strict` from its options to its outputs: tables and JSON.

Not here: options and help (flowrt/cli/bench.py), measuring (strict.py).
"""

from __future__ import annotations

import asyncio
import statistics
import sys
from typing import Any

from rich.console import Console

from flowrt.bench.decode_report import print_speeds, report_of
from flowrt.bench.pairs import MIN_PAIRS
from flowrt.bench.peers import new_event_loop
from flowrt.bench.report import Machine, write_report
from flowrt.bench.strict import Options, StrictFound, measure


def run(options: Options, json: str | None = None) -> None:
    options.as_decode().check()
    machine = Machine.here()
    out = sys.stderr if json == "-" else sys.stdout
    console = Console(file=out, width=None if out.isatty() else 120, highlight=False)
    founds: list[StrictFound] = []

    async def collect() -> None:
        async for found in measure(options, _say):
            founds.append(found)
            print_strict(found, console)
            console.print()

    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(collect())
    if options.num_pairs < MIN_PAIRS:
        console.print(f"note: fewer than {MIN_PAIRS} pairs: for trying out, not for claims")
    machine = machine.afterwards()
    console.print(str(machine))
    if json is not None:
        details: dict[str, Any] = {
            "model": options.model.name,
            "graph": options.graph.name if options.graph is not None else None,
            "prompt_tokens": options.prompt_tokens,
            "new_tokens": options.new_tokens,
        }
        report = report_of([found.pairs for found in founds], machine, details, "strict")
        for found in founds:
            report.details[found.dtype] |= {"blocks": found.blocks, "threads": found.num_threads, "proof_seconds": found.proof_seconds}
        write_report(json, report)


def print_strict(found: StrictFound, console: Console) -> None:
    """One dtype: speeds, tokens, blocks, the check at the start."""
    print_speeds(found.pairs, console, "strict")
    for text in dict.fromkeys(found.blocks.values()):
        names = ", ".join(name for name, blocks in found.blocks.items() if blocks == text)
        console.print(f"{names}: {text}")
    seconds = statistics.median(found.proof_seconds)
    console.print(
        f"check of all functions at the start: {seconds:.2f} s with {found.num_threads} threads, median of {len(found.proof_seconds)}"
    )


def _say(text: str) -> None:
    print(f"flowrt: {text}", file=sys.stderr, flush=True)
