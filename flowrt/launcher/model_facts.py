"""Reads the facts of a graph's model, from a model directory or a card without weights: the `facts_of` of `load_graph`."""

from __future__ import annotations

from dataclasses import replace
from os.path import isfile
from pathlib import Path
from typing import TYPE_CHECKING

from flowrt.costs.models import read_model_card
from flowrt.errors import UserError
from flowrt.graph.facts import ModelFacts
from flowrt.operators.checkpoint_files import stored_expert_weights
from flowrt.operators.families.registry import Implementation, read_model_config
from flowrt.operators.model_config import KeptWeights, ModelConfig, ModelError

if TYPE_CHECKING:
    from flowrt.graph.model import ModelPart


def has_weights(model: ModelPart) -> bool:
    """Whether the model is a directory, not a card."""
    return not isfile(model.path)


def config_of(model: ModelPart) -> ModelConfig:
    """The config of a graph's model as the graph holds its weights. Raises ModelError, or UserError for a card."""
    path = Path(model.path)
    if not has_weights(model):
        return replace(read_model_card(path).with_dtype(model.dtype), **model.kept)
    return read_model_config(path, model.dtype, model.implementation, **model.kept)


def facts_of(directory: Path, implementation: Implementation = "auto") -> ModelFacts:
    """Raises ModelError, which is a ValueError, for a directory or card without a model that can be served."""
    if isfile(directory):  # unlike Path.is_file, false for a name that is too long, which is refused where it is read
        try:
            return ModelFacts.of(read_model_card(directory))
        except UserError as error:
            raise ModelError(str(error)) from None
    config = read_model_config(directory, None, implementation)

    def stored() -> KeptWeights:
        try:
            return stored_expert_weights(directory, config)
        except ModelError:  # files are checked at a start
            return "dtype"

    return ModelFacts.of(config, stored)
