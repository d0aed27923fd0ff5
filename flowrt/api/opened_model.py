"""Opens the files of a graph's model: checks them, reads its config, loads its tokenizer."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from flowrt.graph.model import Graph
from flowrt.launcher.model_check import check_model
from flowrt.operators.families.registry import read_model_config
from flowrt.operators.model_config import ModelConfig
from flowrt.serving.tokenizer import Tokenizer
from flowrt.serving.tokenizer_process import TokenizerProcess


@dataclass(frozen=True)
class OpenedModel:
    """`tokenizer` and its process (not started): None for a folder without one. `notes`: for the user, one line each."""

    config: ModelConfig
    tokenizer: Tokenizer | None
    tokenizer_process: TokenizerProcess | None
    notes: tuple[str, ...]


def open_model(graph: Graph) -> OpenedModel | None:
    """The model of the graph; None for a graph that serves none. Raises GraphError or TokenizerError for files that cannot be used."""
    if graph.model is None:
        return None
    notes, directory = check_model(graph), Path(graph.model.path)
    tokenizer = Tokenizer.open(directory)
    process = TokenizerProcess(directory) if tokenizer is not None else None
    return OpenedModel(read_model_config(directory), tokenizer, process, notes)
