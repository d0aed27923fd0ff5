"""Checks the files of a graph's model before any process starts. Free of torch."""

from __future__ import annotations

from pathlib import Path

from flowrt.graph.model import Graph
from flowrt.operators.checkpoint_files import check_files
from flowrt.operators.model_config import ModelError


def check_model(graph: Graph) -> tuple[str, ...]:
    """Checks the files of the graph's model, without a read of any weight. Returns notes for the user, one line each.

    Raises GraphError for weight files that are missing, cut off, or do not fit config.json.
    """
    if graph.model is None:
        return ()
    try:
        return check_files(Path(graph.model.path))
    except (ModelError, OSError) as error:
        raise graph.error("model.path", str(error)) from error


def check_prompts(graph: Graph) -> None:
    """Raises GraphError for prompts in the graph file, which are texts, of a model without a tokenizer."""
    if graph.model is not None and graph.prompts and not (Path(graph.model.path) / "tokenizer.json").is_file():
        hint = "add the file, or remove prompts and give token ids to flowrt run --prompts"
        raise graph.error("prompts", f"{graph.model.path} has no tokenizer.json, which texts need; {hint}")
