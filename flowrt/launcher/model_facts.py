"""Reads the facts of a model directory that a graph depends on: the `facts_of` of `load_graph`."""

from __future__ import annotations

from pathlib import Path

from flowrt.graph.facts import ModelFacts
from flowrt.operators.checkpoint_files import stored_expert_weights
from flowrt.operators.families.registry import Implementation, read_model_config
from flowrt.operators.model_config import KeptWeights, ModelError


def facts_of(directory: Path, implementation: Implementation = "auto") -> ModelFacts:
    """Raises ModelError, which is a ValueError, for a directory without a model that can be served."""
    config = read_model_config(directory, None, implementation)

    def stored() -> KeptWeights:
        try:
            return stored_expert_weights(directory, config)
        except ModelError:  # files are checked at a start
            return "dtype"

    return ModelFacts.of(config, stored)
