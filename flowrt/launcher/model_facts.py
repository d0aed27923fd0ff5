"""Reads the facts of a model directory that a graph depends on: the `facts_of` of `load_graph`."""

from __future__ import annotations

from pathlib import Path

from flowrt.graph.facts import ModelFacts
from flowrt.operators.families.registry import Implementation, read_model_config


def facts_of(directory: Path, implementation: Implementation = "auto") -> ModelFacts:
    """Raises ModelError, which is a ValueError, for a directory without a model that can be served."""
    return ModelFacts.of(read_model_config(directory, None, implementation))
