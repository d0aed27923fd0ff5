"""The graphs of the simulation's tests."""

from __future__ import annotations

from pathlib import Path

from flowrt.graph.file import load_graph
from flowrt.graph.model import Graph
from flowrt.launcher.model_facts import facts_of

GRAPHS = Path(__file__).resolve().parent / "graphs"


def load(name: str, *overrides: str) -> Graph:
    return load_graph(GRAPHS / name, overrides, facts_of=facts_of)
