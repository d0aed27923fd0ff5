"""Models in transformers over processes: the library's own greedy tokens, in every shape, and while processes are killed."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from library_checkpoints import greedy, load_truth, write
from quantized_checkpoints import MXFP4, quantize
from served_models import answers

import flowrt

NEW_TOKENS = 16
AS_MXFP4 = " in MXFP4"  # ends the name of a checkpoint whose experts are quantized so
PROMPTS = [[5, 9, 33, 71, 12, 8, 90, 44, 3, 17, 60, 61, 62], [7, 7, 100, 23, 55, 2], [9] * 40, [11, 12, 13], [*range(20, 100)]]
ONE: dict[str, Any] = {"experts": {"servers": 0}, "processes": "one"}
TWO_THREE: dict[str, Any] = {"attention": {"groups": 2, "micro_batches": 2}, "experts": {"servers": 3}}
SHAPES: dict[str, dict[str, Any]] = {
    "in one process": ONE,
    "2 groups, 3 servers": TWO_THREE | {"processes": "one"},
    "1 group, 5 servers": {"experts": {"servers": 5, "replicas": 2}, "processes": "one"},
    "prefill apart": {"prefill": {"workers": 1}, "attention": {"groups": 2}, "experts": {"servers": 2}, "processes": "one"},
}
LIMITS = {"kv_pages": 40, "page_size": 16, "max_num_batched_tokens": 24, "max_num_seqs": 4}  # a step has parts of several prompts


class Library:
    def __init__(self, directory: Path, name: str) -> None:
        self.directory = write(name.removesuffix(AS_MXFP4), directory)
        plain = directory
        if name.endswith(AS_MXFP4):
            plain = quantize(directory, directory, *MXFP4, ends=("gate_up_proj", "down_proj"))
            self.directory = directory / "quantized"
        truth = load_truth(plain)
        self.expected = [greedy(truth, prompt, NEW_TOKENS) for prompt in PROMPTS]

    def graph(
        self, folder: Path, deploy: dict[str, Any], dtype: str = "float32", implementation: str = "transformers", **more: Any
    ) -> Path:
        model = {"path": str(self.directory), "implementation": implementation, "dtype": dtype}
        document = {"flowrt": 1, "model": model, "deploy": deploy, **more}
        (path := folder / "graph.yaml").write_text(json.dumps(document))
        return path


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Library]:
    return functools.cache(lambda name: Library(tmp_path_factory.mktemp(name), name))


@pytest.mark.parametrize(
    ("name", "shape"),
    [*product(("gpt_oss", "deepseek_v32"), SHAPES), *product(("gpt_oss" + AS_MXFP4, "llama4", "glm_moe_dsa"), ["2 groups, 3 servers"])],
)
async def test_tokens_are_those_of_the_library(library: Callable[[str], Library], name: str, shape: str, tmp_path: Path) -> None:
    """Sinks, windows, biases and interleaved weights of experts; chunks and scaled rows; tokens that an indexer chooses, or that of the
    layer before. A step has parts of several prompts."""
    model = library(name)
    graph = model.graph(tmp_path, SHAPES[shape], limits=LIMITS)
    async with flowrt.open(graph) as running:
        assert await answers(running, PROMPTS, NEW_TOKENS) == model.expected


@pytest.mark.parametrize("name", ["deepseek_v3", "deepseek_v32", "glm_moe_dsa", "glm4_moe", "qwen3_5_moe", "kimi_linear"])
async def test_latents_dense_layers_and_recurrent_states(library: Callable[[str], Library], name: str, tmp_path: Path) -> None:
    """What a layer caches travels from the prefill worker, also of layers without experts; the second time prefixes are in the cache."""
    model = library(name)
    async with flowrt.open(model.graph(tmp_path, SHAPES["prefill apart"])) as running:
        assert await answers(running, PROMPTS, NEW_TOKENS) == model.expected
        assert await answers(running, PROMPTS, NEW_TOKENS) == model.expected


@pytest.mark.parametrize(("name", "kept"), [("gpt_oss", "dtype"), ("gpt_oss", "int8"), ("deepseek_v32", "dtype")])
async def test_bfloat16(library: Callable[[str], Library], name: str, kept: str, tmp_path: Path) -> None:
    """The likeliest token is one of the likeliest ones in float32."""
    model = library(name)
    truth = load_truth(model.directory)
    with torch.inference_mode():
        best = [truth(input_ids=torch.tensor([prompt])).logits[0, -1].topk(8).indices.tolist() for prompt in PROMPTS]
    graph = model.graph(tmp_path, TWO_THREE | {"processes": "one"}, dtype="bfloat16")
    settings = [f"model.expert_weights={kept}", f"model.activations={'dtype' if kept == 'dtype' else 'int8'}"]
    async with flowrt.open(graph, overrides=settings) as running:
        found = await answers(running, PROMPTS, NEW_TOKENS)
    assert [len(tokens) for tokens in found] == [NEW_TOKENS] * len(PROMPTS)
    assert all(tokens[0] in likely for tokens, likely in zip(found, best, strict=True))


@pytest.mark.parametrize("name", ["gpt_oss", "qwen3_5_moe", "deepseek_v32"])
async def test_killed_processes_change_no_token(library: Callable[[str], Library], name: str, tmp_path: Path) -> None:
    """A pass that had stopped at the experts of a layer is dropped with its step."""
    model = library(name)
    graph = model.graph(tmp_path, TWO_THREE | {"processes": "many", "experts": {"servers": 3, "replicas": 2}})
    async with flowrt.open(graph) as running:
        for victim in ("experts.1", "attention.0"):
            assert await answers(running, PROMPTS, NEW_TOKENS, victim) == model.expected
