"""What a person sees at 60, 80 and 120 columns: each picture equals its reference under pictures/.

`FLOWRT_DRAW=1 pytest tests/cli/test_pictures.py` draws the references again; look at what changed before it is committed.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from chaos.test_report import MACHINE, found_of, make_answers
from rich.cells import cell_len
from rich.console import Console

from flowrt.api import read_graph
from flowrt.chaos.report import print_report, report_of
from flowrt.cli.doctor import Check, report
from flowrt.cli.record import Durations, Figures
from flowrt.cli.report import RunReport
from flowrt.cli.report import report_of as run_report_of
from flowrt.cli.tables import print_tables
from flowrt.graph.show import print_graph

ROOT = Path(__file__).resolve().parents[2]
PICTURES = Path(__file__).parent / "pictures"
LONG = "needs an NVIDIA GPU and its driver (libcuda.so.1: cannot open shared object file); without one, use shm"


def run_report() -> tuple[RunReport, Figures]:
    """Of the quickstart, with figures that take all the room they may need."""
    graph = read_graph(ROOT / "examples" / "quickstart.yaml")
    names = graph.process_names()
    found = run_report_of(
        graph, {name: 4194300 + place for place, name in enumerate(names)}, {}, dict.fromkeys(names, 987 << 20), 1.25, None
    )
    processes = tuple(replace(process, busy_share=1.0) for process in found.processes)
    edges = tuple(replace(edge, num_messages=1234567, payload_bytes=987 << 20) for edge in found.edges)
    figures = Figures(
        num_requests=8,
        num_finished={"stop": 5, "length": 2, "abort": 0, "error": 1},
        num_prompt_tokens=80,
        num_tokens=1820,
        seconds=20.0,
        tokens_per_second=91.0,
        ttft_seconds=Durations(0.1234, 0.1, 0.9),
        itl_seconds=None,
    )
    return replace(found, processes=processes, edges=edges), figures


def draw_run(console: Console) -> None:
    print_tables(*run_report(), console)


def draw_graph(console: Console) -> None:
    graph = read_graph(ROOT / "examples" / "quickstart.yaml")
    print_graph(graph.replace(model=replace(graph.model, path="examples/tiny-moe") if graph.model else None), "quickstart.yaml", console)


def draw_doctor(console: Console) -> None:
    report(
        [Check("transport cuda", False, LONG, "install torch with CUDA"), Check("torch", True, "2.13.0 (CPU build)", needed=True)], console
    )


def draw_chaos(console: Console) -> None:
    print_report(report_of(found_of(make_answers(0.5, 80)), MACHINE), console)


@pytest.mark.parametrize("width", [60, 80, 120])
@pytest.mark.parametrize("draw", [draw_run, draw_graph, draw_doctor, draw_chaos])
def test_a_terminal_shows_the_reference(draw: Callable[[Console], None], width: int) -> None:
    out = io.StringIO()
    draw(Console(file=out, force_terminal=True, width=width, color_system=None, highlight=False))
    shown = "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"
    assert max(map(cell_len, shown.splitlines())) <= width
    reference = PICTURES / f"{draw.__name__.removeprefix('draw_')}-{width}.txt"
    if os.environ.get("FLOWRT_DRAW"):
        reference.write_text(shown, encoding="utf-8")
    assert shown == reference.read_text(encoding="utf-8")
