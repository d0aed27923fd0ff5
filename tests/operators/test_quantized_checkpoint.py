"""Checkpoints that are written with weights in 8 bits: read back as published ones are, and smoothed without a changed bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_checkpoint, random_prompts
from fast_model import FastModel
from quantized_checkpoints import SCHEMES
from quantized_checkpoints import quantize as store_quantized
from safetensors.torch import load_file, save_file

from flowrt.operators import quantized_checkpoint
from flowrt.operators.checkpoint_files import check_files, stored_expert_weights
from flowrt.operators.embedding import Embedding
from flowrt.operators.families.family import part_shapes
from flowrt.operators.families.registry import read_model_config
from flowrt.operators.head import Head
from flowrt.operators.int8_rows import dequantize_rows, quantize_rows
from flowrt.operators.model_config import KeptWeights, ModelError
from flowrt.operators.quantized_checkpoint import Plan, factors, write_quantized
from flowrt.operators.quantized_products import QuantizedPanels, quantize
from flowrt.operators.weights import Checkpoint

FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"mlp_only_layers": [0]},
    "qwen3_next": {"layers": 4},
    "mixtral": {},
    "deepseek_v3": {},
    "deepseek_v2": {},
}
PROMPT = random_prompts([40], seed=9)[0]


def logits(directory: Path, kept: KeptWeights = "dtype") -> torch.Tensor:
    model = FastModel(directory, "float32", kept=kept)
    return model.step([PROMPT], [len(PROMPT)], [model.new_sequence(len(PROMPT))])


def loudest(plan: Plan) -> dict[str, torch.Tensor]:
    """As if some channels of each norm's output were a hundred times larger than others."""
    values = torch.ones(plan.config.hidden_size)
    values[[3, 17]] = 100.0
    values[5] = 0.0  # never used
    return dict.fromkeys(plan.norms, values)


@pytest.mark.parametrize("kept", ["int8", "fp8"])
@pytest.mark.parametrize("family", FAMILIES)
def test_matrices_are_quantized_and_all_else_is_as_before(tmp_path: Path, family: str, kept: KeptWeights) -> None:
    source = make_checkpoint(tmp_path / "source", architecture=family, dtype="bfloat16", **FAMILIES[family])
    plan = Plan.of(source)
    seen: list[tuple[int, int]] = []
    written = write_quantized(source, tmp_path / "out", kept, plan, on_tensor=lambda *numbers: seen.append(numbers))
    check_files(tmp_path / "out")
    config = read_model_config(tmp_path / "out")
    assert stored_expert_weights(tmp_path / "out", config) == kept
    assert set(written.errors) == plan.quantized
    assert all(error < 0.05**2 for error in written.errors.values())
    before, after = Checkpoint(source), Checkpoint(tmp_path / "out")
    assert before.tensor_names() == after.tensor_names()
    assert (written.num_tensors, written.num_tensors) == seen[-1]
    for name in before.tensor_names():
        weight = before.read_tensor(name)
        if name in plan.quantized:
            flat = weight.flatten(0, -2)
            weight = quantize(flat, kept).restored().to(torch.bfloat16).view(weight.shape)
        assert torch.equal(after.read_tensor(name), weight), name
    assert written.bytes_after < written.bytes_before


@pytest.mark.parametrize("family", FAMILIES)
def test_smoothing_changes_no_bit_of_the_model(tmp_path: Path, family: str) -> None:
    """In float32, and before quantization: factors are powers of two."""
    source = make_checkpoint(tmp_path / "source", architecture=family, **FAMILIES[family])
    plan = Plan.of(source)
    channels = factors(plan, source, loudest(plan))
    assert set(channels) == set(plan.norms) == set(plan.behind)
    for factor in channels.values():
        assert torch.equal(factor.log2(), factor.log2().round())
        assert (factor[3], factor[17]) > (factor[0], factor[0])
        assert factor[5] == 1
    plan.quantized.clear()
    write_quantized(source, tmp_path / "out", "int8", plan, channels)
    assert torch.equal(logits(tmp_path / "out"), logits(source))
    assert bool(channels) == (family != "qwen3_next")  # its norms are stored minus one, which rounds


@pytest.mark.parametrize("kept", ["int8", "fp8"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_in_8_bits_computes_what_it_stands_for(
    tmp_path: Path, family: str, kept: KeptWeights, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside the same model, written in 8 bits and restored to float32."""
    source = make_checkpoint(tmp_path / "source", architecture=family, **FAMILIES[family])
    config = read_model_config(source, weights=kept, expert_weights=kept)
    parts = [part for part, shape in part_shapes(config).items() if config.kept(part, shape) != "dtype"]
    assert {"qkv", "head", "expert_down"} <= {*parts} or config.latent is not None
    monkeypatch.setattr(quantized_checkpoint, "_QUANTIZED", parts)
    write_quantized(source, tmp_path / "out", kept, Plan.of(source))
    found = logits(source, kept)
    torch.testing.assert_close(found, logits(tmp_path / "out"), rtol=1e-4, atol=1e-4)
    assert (found - logits(source)).abs().max() > 1e-3


def test_rows_of_a_smoothed_model_lose_less_as_int8(tmp_path: Path) -> None:
    """The norm has outliers, as trained models do; the error is that of the gate's products."""
    source = make_checkpoint(tmp_path / "source", layers=1)
    tensors = load_file(source / "model.safetensors")
    norm, gate = "model.layers.0.post_attention_layernorm.weight", "model.layers.0.mlp.gate.weight"
    tensors[norm][[3, 17]] *= 100
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    plan, x_TH = Plan.of(source), torch.randn(200, 64)
    largest = {name: (x_TH * tensors[name]).abs().amax(0) for name in plan.norms}
    channels = factors(plan, source, largest)
    write_quantized(source, tmp_path / "out", "int8", plan, channels)

    def error(directory: Path) -> float:
        checkpoint = Checkpoint(directory)
        rows, weight = x_TH * checkpoint.read_tensor(norm), checkpoint.read_tensor(gate)
        return float((dequantize_rows(*quantize_rows(rows), torch.float32) @ weight.t() - rows @ weight.t()).square().mean())

    assert error(tmp_path / "out") < error(source) / 4


def test_files_and_index_are_kept_apart(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "source", shard_bytes=1 << 18, tokenizer=True)
    (source / "pytorch_model.bin").write_bytes(b"other weights")
    write_quantized(source, tmp_path / "out", "int8", Plan.of(source))
    check_files(tmp_path / "out")
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())["weight_map"]
    for name, file in index.items():
        assert name in load_file(tmp_path / "out" / file)
    assert {path.name for path in source.iterdir()} - {"pytorch_model.bin"} == {path.name for path in (tmp_path / "out").iterdir()}
    group = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert "model.layers.0.mlp.gate" in group["ignore"]
    assert "lm_head" in group["ignore"]
    assert not any("proj" in name for name in group["ignore"])


def test_a_tied_head_stays_in_the_dtype_of_the_embedding(tmp_path: Path) -> None:
    """Also where another process has the embedding."""
    source = make_checkpoint(tmp_path / "source", tied=True)
    config = read_model_config(source, "bfloat16", weights="int8", expert_weights="int8")
    checkpoint, x_SH = Checkpoint(source), torch.randn(3, config.hidden_size).to(torch.bfloat16)
    apart, together = Head(config, checkpoint), Head(config, checkpoint, embedding=Embedding(config, checkpoint))
    torch.testing.assert_close(apart.product(x_SH), together.product(x_SH))
    assert not isinstance(apart.product, QuantizedPanels)
    write_quantized(source, tmp_path / "out", "int8", Plan.of(source))
    assert "lm_head" in json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["ignore"]


def test_what_is_not_quantized_is_one_line(models: Any, tmp_path: Path) -> None:
    store_quantized(models["plain"], tmp_path, *SCHEMES["INT8 by rows"])
    with pytest.raises(ModelError, match=r"config\.json: quantization_config: the checkpoint is quantized already; give one in bfloat16"):
        Plan.of(tmp_path / "quantized")
    with pytest.raises(ModelError, match="holds all experts; give a checkpoint with a tensor for each"):
        Plan.of(make_checkpoint(tmp_path / "dbrx", architecture="dbrx"))
    source = make_checkpoint(tmp_path / "odd")
    tensors = load_file(source / "model.safetensors")
    for odd in (torch.arange(4), torch.tensor(1.0)):
        save_file(tensors | {"position_ids": odd}, source / "model.safetensors", {"format": "pt"})
        with pytest.raises(ModelError, match=r"tensor position_ids is .*; vectors and matrices of F64, F32, BF16, F16 are written"):
            write_quantized(source, tmp_path / "out", "int8", Plan.of(source))
    assert not (tmp_path / "out").exists()
