"""Quantized checkpoints: each weight is restored to the value that its scheme gives it, in any order of files, or refused in one line."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import MEASURE_LOADING, make_large_checkpoint
from safetensors.torch import load_file, save_file
from torch import Tensor

from flowrt.operators import weights
from flowrt.operators.checkpoint_files import INDEX_NAME, WHOLE_NAME, check_files
from flowrt.operators.families.family import part_shapes, parts_to_read
from flowrt.operators.families.registry import read_model_config
from flowrt.operators.model_config import ModelError
from flowrt.operators.restored_weights import restored_rows
from flowrt.operators.weights import Checkpoint

FP8, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
Quantized = tuple[dict[str, Tensor], Tensor]  # what is stored, by the ends of names; and the values that this stands for


def spread(scales: Tensor, block: tuple[int, int], shape: torch.Size) -> Tensor:
    """A scale for each number of a matrix."""
    rows = scales.repeat_interleave(block[0], -2)[..., : shape[-2], :]
    return rows.repeat_interleave(block[1], -1)[..., : shape[-1]]


def by_blocks(weight: Tensor, block: tuple[int, int] = (16, 32), dtype: torch.dtype = FP8, end: str = "_scale_inv") -> Quantized:
    """8-bit floats with a scale per block; the last blocks may be smaller."""
    rows, columns = (-(-size // each) for size, each in zip(weight.shape[-2:], block, strict=True))
    scales = torch.rand(*weight.shape[:-2], rows, columns) * 0.01 + 0.001
    stored = (weight / spread(scales, block, weight.shape)).clamp(-400, 400).to(dtype)
    return {"": stored, end: scales}, stored.float() * spread(scales, block, weight.shape)


def by_rows(weight: Tensor, dtype: torch.dtype = torch.int8) -> Quantized:
    scales = (weight.abs().amax(-1, keepdim=True) / 127).to(torch.bfloat16)
    stored = (weight / scales.float()).round().clamp(-128, 127).to(dtype)
    return {"": stored, "_scale": scales}, stored.float() * scales.float()


def in_one(weight: Tensor) -> Quantized:
    stored = (weight / 0.02).to(FP8)
    return {"": stored, "_scale": torch.tensor([0.02])}, stored.float() * torch.tensor(0.02)


def packed(weight: Tensor, bits: int = 4, group: int = 16) -> Quantized:
    """compressed-tensors: integers from the lowest bits on, half of their range added, with a scale per group of columns."""
    half, (rows, columns) = 1 << (bits - 1), weight.shape
    scales = (weight.reshape(rows, -1, group).abs().amax(-1) / (half - 1)).to(torch.bfloat16)
    whole = (weight / scales.float().repeat_interleave(group, 1)).round().clamp(-half, half - 1).to(torch.int64)
    words = torch.zeros(rows, -(-columns * bits // 32), dtype=torch.int64)
    for column in range(columns):
        words[:, column * bits // 32] |= (whole[:, column] + half) << (column * bits % 32)
    words = torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)
    stored = {"_packed": words, "_scale": scales, "_shape": torch.tensor([rows, columns])}
    return stored, whole.float() * scales.float().repeat_interleave(group, 1)


COMPRESSED: dict[str, Any] = {"quant_method": "compressed-tensors"}
SCHEMES: dict[str, tuple[dict[str, Any], Callable[[Tensor], Quantized]]] = {
    "FP8 by blocks": ({"quant_method": "fp8", "weight_block_size": [16, 32]}, by_blocks),
    "FP8 by large blocks": ({"quant_method": "fp8", "weight_block_size": [128, 128]}, lambda weight: by_blocks(weight, (128, 128))),
    "FP8 by rows": ({"quant_method": "fbgemm_fp8"}, lambda weight: by_blocks(weight, (1, weight.shape[-1]), end="_scale")),
    "FP8 E5M2": ({"quant_method": "fp8", "weight_block_size": [16, 32]}, lambda weight: by_blocks(weight, dtype=E5M2)),
    "FP8 in one": (COMPRESSED | {"format": "float-quantized"}, in_one),
    "INT8 by rows": (COMPRESSED | {"format": "int-quantized"}, by_rows),
    "INT4 by groups": (COMPRESSED | {"format": "pack-quantized"}, packed),
    "INT8 packed": (COMPRESSED | {"format": "pack-quantized"}, lambda weight: packed(weight, 8)),
}


def quantize(source: Path, out: Path, config: dict[str, Any], scheme: Callable[[Tensor], Quantized]) -> Path:
    """Write a checkpoint whose projections are quantized. Returns the folder of what they stand for."""
    stored, plain = {}, {}
    for file in sorted(source.glob("*.safetensors")):
        for name, tensor in load_file(file).items():
            stored[name] = plain[name] = tensor
            if tensor.dim() == 2 and name.endswith("_proj.weight"):
                del stored[name]
                found, plain[name] = scheme(tensor.float())
                stored |= {name + end: each.contiguous() for end, each in found.items()}
    values = json.loads((source / "config.json").read_text())
    for folder, tensors, more in ((out / "quantized", stored, {"quantization_config": config}), (out / "plain", plain, {})):
        folder.mkdir()
        save_file(tensors, folder / WHOLE_NAME, {"format": "pt"})
        (folder / "config.json").write_text(json.dumps(values | more))
    return out / "plain"


def parts(directory: Path, dtype: str) -> dict[tuple[str, int, int], Tensor]:
    config, checkpoint = read_model_config(directory, dtype), Checkpoint(directory)
    shapes = part_shapes(config)
    return {
        (part, layer, expert): checkpoint.read_part(config, part, shapes[part], layer=layer, expert=expert)
        for part, layers in parts_to_read(config).items()
        for layer in layers
        for expert in range(config.num_experts if part.startswith("expert_") else 1)
    }


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["plain", "deepseek_v3"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_part_has_the_values_that_its_scheme_gives(
    models: Any, tmp_path: Path, scheme: str, name: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "SCRATCH_BYTES", 5 * 64 * 4)  # a few rows at a time, which are no whole blocks
    expected = parts(quantize(models[name], tmp_path, *SCHEMES[scheme]), dtype)
    assert check_files(tmp_path / "quantized") == check_files(tmp_path / "plain")
    found = parts(tmp_path / "quantized", dtype)
    assert found.keys() == expected.keys()
    for part, tensor in found.items():
        assert torch.equal(tensor, expected[part]), part


def test_experts_in_one_tensor_have_scales_of_their_own(models: Any, tmp_path: Path) -> None:
    expected = parts(quantize(models["plain"], tmp_path, *SCHEMES["FP8 by blocks"]), "float32")
    directory = tmp_path / "quantized"
    tensors = load_file(directory / WHOLE_NAME)
    for layer in range(3):
        prefix = f"model.layers.{layer}.mlp.experts."
        for end in (".weight", ".weight_scale_inv"):
            each = {kind: [tensors.pop(f"{prefix}{expert}.{kind}_proj{end}") for expert in range(8)] for kind in ("gate", "up", "down")}
            joined = [torch.cat(pair) for pair in zip(each["gate"], each["up"], strict=True)]
            tensors[f"{prefix}gate_up_proj{end.removeprefix('.weight')}"] = torch.stack(joined)
            tensors[f"{prefix}down_proj{end.removeprefix('.weight')}"] = torch.stack(each["down"])
    save_file(tensors, directory / WHOLE_NAME, {"format": "pt"})
    check_files(directory)
    found = parts(directory, "float32")
    assert all(torch.equal(tensor, expected[part]) for part, tensor in found.items())


@pytest.mark.parametrize("shape", [(32, 64), (48, 96), (16, 32)])
def test_transformers_restores_the_same(shape: tuple[int, int]) -> None:
    """Only blocks that divide the matrix: it refuses others. Its loader needs a further package, its operation does not."""
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    stored, _ = by_blocks(torch.randn(shape))
    expected = Fp8Dequantize(None)._dequantize_one(stored[""], stored["_scale_inv"], torch.float32)
    assert torch.equal(restored_rows(stored[""], stored["_scale_inv"], 0, (16, 32), shape[1]), expected)


def test_scales_may_be_in_another_file(models: Any, tmp_path: Path) -> None:
    expected = parts(quantize(models["plain"], tmp_path, *SCHEMES["INT4 by groups"]), "bfloat16")
    directory = tmp_path / "quantized"
    tensors = load_file(directory / WHOLE_NAME)
    (directory / WHOLE_NAME).unlink()
    halves = {f"{number}.safetensors": dict(list(tensors.items())[number::2]) for number in range(2)}
    for file, half in halves.items():
        save_file(half, directory / file)
    for has_index in (True, False):
        index = directory / INDEX_NAME
        index.write_text(json.dumps({"weight_map": {name: file for file, half in halves.items() for name in half}}))
        if not has_index:
            index.unlink()
        check_files(directory)
        found = parts(directory, "bfloat16")
        assert all(torch.equal(tensor, expected[part]) for part, tensor in found.items())


def _drop(end: str) -> Callable[[dict[str, Tensor]], object]:
    return lambda tensors: [tensors.pop(name) for name in list(tensors) if name.endswith(end)]


def _add(end: str) -> Callable[[dict[str, Tensor]], object]:
    return lambda tensors: tensors.update(
        {name.removesuffix("_packed") + end: torch.ones(1) for name in list(tensors) if "_packed" in name}
    )


def _reshape(shape: tuple[int, ...]) -> Callable[[dict[str, Tensor]], object]:
    return lambda tensors: tensors.update({name: torch.ones(shape) for name in list(tensors) if "_scale" in name})


DAMAGES: dict[str, tuple[str, Callable[[dict[str, Tensor]], object], str]] = {
    "no scales": ("FP8 by blocks", _drop("_scale_inv"), "stored as F8_E4M3, and has no scales (model.layers.0."),
    "few scales": ("FP8 by blocks", _reshape((3, 1)), "3 scales in "),
    "scales of a vector": ("FP8 by blocks", _reshape((7,)), "scales of shape [7] in "),
    "scales of no block": ("INT8 by rows", _reshape((5, 1)), "5 scales in "),
    "nothing": (
        "FP8 by blocks",
        lambda tensors: tensors.update(
            {
                name: each[:0].clone().flatten() if "_scale" in name else each[:0].clone()
                for name, each in tensors.items()
                if "_proj" in name
            }
        ),
        "scales of shape [0] in ",
    ),
    "empty scales": ("INT8 by rows", _reshape((0, 1)), "scales of shape [0, 1] in "),
    "zero points": ("INT4 by groups", _add("_zero_point"), "has zero points, which flowrt does not restore"),
    "another order": ("INT4 by groups", _add("_g_idx"), "has columns in another order, which flowrt does not restore"),
    "few words": (
        "INT4 by groups",
        lambda tensors: tensors.update({name: each[:, :-1].contiguous() for name, each in tensors.items() if "_packed" in name}),
        " rows or columns into blocks",
    ),
    "pairs of 4-bit floats": (
        "INT8 by rows",
        lambda tensors: tensors.update({f"{name}_inv": tensors.pop(name) for name in list(tensors) if name.endswith("_scale")}),
        "stored as I8, and has no scales (model.layers.0.",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_cannot_be_restored_is_one_line(models: Any, tmp_path: Path, damage: str) -> None:
    scheme, change, text = DAMAGES[damage]
    quantize(models["plain"], tmp_path, *SCHEMES[scheme])
    file = tmp_path / "quantized" / WHOLE_NAME
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)
    for refuse in (check_files, lambda directory: parts(directory, "bfloat16")):
        with pytest.raises(ModelError) as raised:
            refuse(tmp_path / "quantized")
        assert text in str(raised.value)
        assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"quant_method": "fp8", "weight_block_size": [96, 128]}, "weight_block_size: is [96, 128]; two powers of two are needed, or null"),
        ({"quant_method": "fp8", "weight_block_size": 128}, "weight_block_size: is 128; two powers of two"),
        (COMPRESSED | {"format": "nvfp4-pack-quantized"}, "format: is 'nvfp4-pack-quantized'; naive-quantized, float-quantized,"),
        (COMPRESSED | {"format": "dense", "sparsity_config": {"format": "sparse-24-bitmask"}}, "format: is 'dense'; "),
        (COMPRESSED | {"format": "int-quantized", "sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse weights are not restored"),
    ],
)
def test_a_variant_that_is_not_restored_is_refused(models: Any, tmp_path: Path, config: dict[str, Any], text: str) -> None:
    values = json.loads((models["plain"] / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(values | {"quantization_config": config}))
    with pytest.raises(ModelError) as raised:
        read_model_config(tmp_path)
    assert text in str(raised.value)
    assert "\n" not in str(raised.value)


def test_restoring_takes_no_more_memory_than_is_held(tmp_path: Path) -> None:
    """As without scales: 1.2 of what is held, at the end and at the peak."""
    quantize(make_large_checkpoint(tmp_path / "large"), tmp_path, *SCHEMES["FP8 by large blocks"])
    command = [sys.executable, "-c", MEASURE_LOADING, str(tmp_path / "quantized"), "bfloat16"]
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    held = 4 * 11 * 3 * 768 * 512 * 2
    for growth in map(int, done.stdout.split()):
        assert 0.95 * held < growth < 1.2 * held
