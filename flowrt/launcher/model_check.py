"""Checks the files of a graph's model before any process starts. Free of torch."""

from __future__ import annotations

from pathlib import Path

from flowrt.graph.model import Graph
from flowrt.launcher.memory_needs import find_shortage, memory_needs
from flowrt.launcher.tokenizer_files import conversion, missing_tokenizer
from flowrt.operators.checkpoint_files import check_files
from flowrt.operators.model_config import ModelError
from flowrt.system.machine_limits import memory_limit_bytes


def check_model(graph: Graph) -> tuple[str, ...]:
    """Checks the files of the graph's model, without a read of any weight. Returns notes for the user, one line each.

    Raises GraphError for weight files that are missing, cut off, or do not fit config.json, and when the memory of this machine is
    too small.
    """
    if graph.model is None:
        return ()
    directory = Path(graph.model.path)
    try:
        notes = check_files(directory)
        shortage = find_shortage(graph, memory_needs(graph), memory_limit_bytes())
    except (ModelError, OSError) as error:
        raise graph.error("model.path", str(error)) from error
    if shortage is not None:
        raise graph.error("model.path", shortage)
    return (*notes, missing_tokenizer(directory)) if conversion(directory) else notes


def check_prompts(graph: Graph) -> None:
    """Raises GraphError for prompts in the graph file, which are texts, of a model without a tokenizer."""
    if graph.model is not None and graph.prompts and not (Path(graph.model.path) / "tokenizer.json").is_file():
        instead = "remove prompts and give token ids to flowrt run --prompts"
        raise graph.error("prompts", missing_tokenizer(Path(graph.model.path), instead))
