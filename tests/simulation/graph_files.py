"""The graphs of the simulation's tests."""

from __future__ import annotations

from pathlib import Path

from flowrt.graph.facts import ModelFacts
from flowrt.graph.file import load_graph
from flowrt.graph.model import Graph
from flowrt.operators.families.registry import read_model_config

GRAPHS = Path(__file__).resolve().parent / "graphs"


def load(name: str, *overrides: str) -> Graph:
    return load_graph(GRAPHS / name, overrides, facts_of=lambda path: ModelFacts.of(read_model_config(path)))
