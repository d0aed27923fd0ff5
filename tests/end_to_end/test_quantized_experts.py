"""Weights that are kept in 8 bits: the tokens of the restored model, in every shape, and while processes are killed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from quantized_checkpoints import SCHEMES, quantize
from served_models import Served, answers

import flowrt

NEW_TOKENS = 16
PROMPTS = [[5, 9, 33, 71, 12, 8, 90, 44, 3, 17, 60, 61, 62], [7, 7, 100, 23, 55, 2], [9] * 40, [11, 12, 13], [*range(20, 100)]]
INSIDE: dict[str, Any] = {"experts": {"servers": 0}, "processes": "one"}
APART: dict[str, Any] = {"attention": {"groups": 2, "micro_batches": 2}, "experts": {"servers": 3, "replicas": 2}}


def graph(folder: Path, model: Path, deploy: dict[str, Any], kept: str, **more: Any) -> Path:
    document = {"flowrt": 1, "model": {"path": str(model), "expert_weights": kept, **more}, "deploy": deploy, "numerics": "strict"}
    (path := folder / "graph.yaml").write_text(json.dumps(document))
    return path


@pytest.mark.parametrize("scheme", ["FP8 by blocks", "INT8 by rows"])
async def test_tokens_are_those_of_the_restored_model(served: Served, tmp_path: Path, scheme: str) -> None:
    plain = quantize(served.directory, tmp_path, *SCHEMES[scheme])
    async with flowrt.open(graph(tmp_path, plain, INSIDE, "dtype", dtype="float32")) as running:
        expected = await answers(running, PROMPTS, NEW_TOKENS)
    async with flowrt.open(graph(tmp_path, tmp_path / "quantized", APART | {"processes": "one"}, "as_stored", dtype="float32")) as running:
        assert await answers(running, PROMPTS, NEW_TOKENS) == expected


@pytest.mark.parametrize(("kept", "rows"), [("int8", "dtype"), ("fp8", "dtype"), ("int8", "int8")])
async def test_killed_processes_change_no_token(served: Served, tmp_path: Path, kept: str, rows: str) -> None:
    model = {"weights": kept, "activations": rows, "dtype": "bfloat16"}
    async with flowrt.open(graph(tmp_path, served.directory, INSIDE, kept, **model)) as running:
        expected = await answers(running, PROMPTS, NEW_TOKENS)
    async with flowrt.open(graph(tmp_path, served.directory, APART, kept, **model)) as running:
        for victim in ("experts.1", "attention.0"):
            assert await answers(running, PROMPTS, NEW_TOKENS, victim) == expected
