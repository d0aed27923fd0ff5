"""A folder with a model directory of plain facts, and a function that loads graph files from it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from graph.model_facts import FACTS

from flowrt.graph.file import load_graph
from flowrt.graph.model import Graph

Load = Callable[..., Graph]


@pytest.fixture
def load(tmp_path: Path) -> Load:
    """`load(text, *overrides, facts..., name=...)`: the graph of a file with this text, beside a model directory called m."""
    (tmp_path / "m").mkdir()

    def load_text(text: str, *overrides: str, name: str = "g.yaml", **facts: object) -> Graph:
        (tmp_path / name).write_text(text, encoding="utf-8")
        return load_graph(tmp_path / name, overrides, facts_of=lambda *_: replace(FACTS, **facts), schemes=("inproc", "shm", "zmq"))

    return load_text
