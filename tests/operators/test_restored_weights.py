"""Quantized checkpoints: each weight is restored to the value that its scheme gives it, in any order of files, or refused in one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import loading_growth, make_large_checkpoint
from quantized_checkpoints import COMPRESSED, SCHEMES, by_blocks, quantize
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from flowrt.operators import weights
from flowrt.operators.checkpoint_files import INDEX_NAME, WHOLE_NAME, check_files
from flowrt.operators.families.family import part_shapes, parts_to_read
from flowrt.operators.families.registry import read_model_config
from flowrt.operators.model_config import ModelError
from flowrt.operators.restored_weights import restored_mxfp4, restored_rows
from flowrt.operators.weights import Checkpoint


def parts(directory: Path, dtype: str) -> dict[tuple[str, int, int], Tensor]:
    config, checkpoint = read_model_config(directory, dtype), Checkpoint(directory)
    shapes = part_shapes(config)
    return {
        (part, layer, expert): checkpoint.read_part(config, part, shapes[part], layer=layer, expert=expert)
        for part, layers in parts_to_read(config).items()
        for layer in layers
        for expert in range(config.num_experts if part.startswith("expert_") else 1)
    }


@pytest.mark.parametrize("name", ["plain", "deepseek_v3"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_part_has_the_values_that_its_scheme_gives(
    models: Any, tmp_path: Path, scheme: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "SCRATCH_BYTES", 13 * 64 * 4)  # some rows at a time, which are no whole blocks
    plain = quantize(models[name], tmp_path, *SCHEMES[scheme])
    assert check_files(tmp_path / "quantized") == check_files(plain)
    for dtype in ("float32", "bfloat16"):
        expected, found = parts(plain, dtype), parts(tmp_path / "quantized", dtype)
        assert found.keys() == expected.keys()
        for part, tensor in found.items():
            assert torch.equal(tensor, expected[part]), (part, dtype)


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_each_mxfp4_number_has_the_bits_that_transformers_gives_it(dtype: torch.dtype) -> None:
    """All pairs of 4-bit floats with all scales, where not both are no number."""
    blocks, scales = torch.arange(256, dtype=torch.uint8).reshape(1, 1, 16, 16).expand(1, 256, 16, 16), torch.arange(256).to(torch.uint8)
    exponents = scales[None, :, None].expand(1, 256, 16)
    expected = convert_moe_packed_tensors(blocks, exponents, dtype=dtype)[0].t()
    found = restored_mxfp4(blocks[0], exponents[0]).to(dtype)
    bits = torch.int32 if dtype == torch.float32 else torch.int16
    is_number = ~(found.isnan() & expected.isnan())
    assert torch.equal(found.view(bits)[is_number], expected.contiguous().view(bits)[is_number])


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
        (
            COMPRESSED | {"format": "int-quantized", "transform_config": {"config_groups": {"R3": {}}}},
            "transform_config: rotations of what",
        ),
        (
            COMPRESSED | {"format": "int-quantized", "config_groups": {"group_0": {"weights": {"num_bits": 8, "symmetric": False}}}},
            "group_0.weights.symmetric: weights with zero points",
        ),
    ],
)
def test_a_variant_that_is_not_restored_is_refused(models: Any, tmp_path: Path, config: dict[str, Any], text: str) -> None:
    values = json.loads((models["plain"] / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(values | {"quantization_config": config}))
    with pytest.raises(ModelError) as raised:
        read_model_config(tmp_path)
    assert text in str(raised.value)
    assert "\n" not in str(raised.value)


GROUPS: dict[str, Any] = {"config_groups": {"group_0": {"weights": {"type": "int", "num_bits": 8, "group_size": 64}}}}


@pytest.mark.parametrize(
    ("config", "group"),
    [
        ({"quant_method": "fp8", "weight_block_size": [16, 32]}, ("fp8", 32)),
        ({"quant_method": "fp8", "weight_block_size": [16, 32], "fmt": "e5m2"}, None),
        ({"quant_method": "fbgemm_fp8"}, None),
        (COMPRESSED | GROUPS | {"format": "int-quantized"}, ("int8", 64)),
        (COMPRESSED | GROUPS | {"format": "pack-quantized"}, None),
        (COMPRESSED | {"format": "int-quantized"}, None),
    ],
)
def test_columns_that_share_a_scale_are_known_by_the_config(models: Any, tmp_path: Path, config: dict[str, Any], group: Any) -> None:
    values = json.loads((models["plain"] / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(values | {"quantization_config": config}))
    found = read_model_config(tmp_path, expert_weights="fp8")
    assert found.stored_group == group
    assert found.scale_group("expert_down", 48) == (32 if group == ("fp8", 32) else 48)
    assert found.scale_group("qkv", 64) == 64, "only codes of experts are kept as they are stored"


def test_restoring_takes_no_more_memory_than_is_held(tmp_path: Path) -> None:
    """As without scales: 1.2 of what is held, at the end and at the peak."""
    quantize(make_large_checkpoint(tmp_path / "large"), tmp_path, *SCHEMES["FP8 by large blocks"])
    held = 4 * 11 * 3 * 768 * 512 * 2
    found = loading_growth(str(tmp_path / "quantized"), "bfloat16", most=1.2 * held)
    assert all(0.95 * held < growth < 1.2 * held for growth in found)
