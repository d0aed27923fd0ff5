"""Reads a scenario file with the reader of graph files: the same plain YAML and the same one-line errors."""

from __future__ import annotations

from pathlib import Path

from flowrt.document import read_document
from flowrt.errors import UserError
from flowrt.graph.model import GATEWAY, Graph
from flowrt.reliability.scenario import Scenario, scenario_of


def load_scenario(path: Path, graph: Graph) -> Scenario:
    """The scenario in the file at `path`, for the processes of `graph`. Raises UserError."""
    if not path.is_file():
        raise UserError(f"{path}: no such file; give the path of a scenario file")
    document = read_document(path)
    return scenario_of(document.value, document.where, {GATEWAY, *graph.process_names()})
