"""The bytes that a process reports while it loads are those that the launcher expects of it."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from checkpoints import make_checkpoint
from quantized_checkpoints import SCHEMES, quantize

from flowrt.api.opening import read_graph
from flowrt.graph.model import Graph
from flowrt.launcher.start_checks import memory_needs
from flowrt.workers.model_nodes import build_model_nodes


def bytes_read(graph: Graph, process: str) -> int:
    found: list[int] = []
    build_model_nodes(graph, process, "cpu", time.monotonic, lambda name, done, total: None, None, found.append)
    return sum(found)


def check(graph: Graph) -> None:
    for process, need in memory_needs(graph).items():
        assert need.weight_bytes == bytes_read(graph, process), process


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "dbrx", "qwen3_next"])
def test_bytes_are_those_that_the_model_holds(tmp_path: Path, family: str, dtype: str) -> None:
    directory = make_checkpoint(tmp_path / "model", architecture=family, layers=2)
    check(read_graph(directory, ["deploy.experts.servers=2", f"model.dtype={dtype}", "numerics=strict"]))


@pytest.mark.parametrize("kept", ["dtype", "as_stored", "int8"])
def test_quantized_weights_count_as_they_are_held(tmp_path: Path, kept: str) -> None:
    quantize(make_checkpoint(tmp_path / "model", layers=2), tmp_path, *SCHEMES["FP8 by blocks"])
    directory = tmp_path / "quantized"
    settings = ["deploy.experts.servers=2", "numerics=strict", "model.dtype=float32", f"model.expert_weights={kept}"]
    check(read_graph(directory, settings))


def test_models_in_transformers(tmp_path: Path) -> None:
    directory = make_checkpoint(tmp_path / "model", layers=2)
    check(read_graph(directory, ["deploy.experts.servers=2", "model.implementation=transformers", "model.dtype=bfloat16"]))
