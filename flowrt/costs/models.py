"""Reads model cards: the facts of a model that no checkpoint is needed for. A card has the keys of config.json."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

from flowrt.costs.cards import find_card, read_card
from flowrt.errors import UserError
from flowrt.operators.families.config_file import ConfigFile, read_config_file
from flowrt.operators.families.registry import find_family
from flowrt.operators.model_config import KeptWeights, ModelConfig, ModelError


@cache
def read_model_card(name_or_path: str | Path, weights: KeptWeights = "dtype") -> ModelConfig:
    """A model by the name of a card, or by the path of a card, a config.json, or a folder that has one. `weights`: what experts and other
    large matrices are held in.

    Raises UserError for an unknown name, with the known ones and the closest, and for keys that no family of flowrt can read.
    """
    path = find_card("models", name_or_path)
    if path.is_dir():
        path = path / "config.json"
    try:
        values = dict(read_config_file(path).values if path.suffix == ".json" else read_card(path).value)
        values.pop("quantization_config", None)  # says how a checkpoint is stored; a card says what is computed
        file = ConfigFile(path, values)
        config = find_family(file).read_config(file)
    except ModelError as error:
        raise UserError(str(error)) from None
    if config.library is not None:
        raise UserError(
            f"{path}: runs by the module of transformers; what it costs is known only of the operators of flowrt's own families"
        )
    return replace(config, weights=weights, expert_weights=weights, activations="int8" if weights == "int8" else "dtype")
