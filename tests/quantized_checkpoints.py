"""Checkpoints whose weights are quantized as published ones are, and what they stand for."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.mxfp4 import FP4_VALUES, convert_moe_packed_tensors

from flowrt.operators.checkpoint_files import WHOLE_NAME

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


def mxfp4(weight: Tensor) -> Quantized:
    """Experts as gpt-oss has them, [E, columns, rows], stored row by row: 4-bit floats, and the power of two of each 32 of them. The values
    are those that transformers restores."""
    blocks = weight.transpose(1, 2).unflatten(2, (-1, 32))
    exponents = blocks.abs().amax(-1, keepdim=True).log2().floor() - 2  # the largest of the 16 values is 6
    sizes = torch.tensor(FP4_VALUES[:8])  # the others are these with a sign
    scaled = (blocks / exponents.exp2()).contiguous()
    codes = torch.bucketize(scaled.abs(), (sizes[1:] + sizes[:-1]) / 2) | scaled.lt(0).long() << 3
    stored = (codes[..., ::2] | codes[..., 1::2] << 4).to(torch.uint8)
    scales = (exponents.squeeze(-1) + 127).to(torch.uint8)
    return {"_blocks": stored, "_scales": scales}, convert_moe_packed_tensors(stored, scales, dtype=torch.float32)


COMPRESSED: dict[str, Any] = {"quant_method": "compressed-tensors"}
SCHEMES: dict[str, tuple[dict[str, Any], Callable[[Tensor], Quantized]]] = {
    "FP8 by blocks": ({"quant_method": "fp8", "weight_block_size": [16, 32]}, by_blocks),
    "FP8 by large blocks": ({"quant_method": "fp8", "weight_block_size": [128, 128]}, lambda weight: by_blocks(weight, (128, 128))),
    "FP8 by rows": ({"quant_method": "fbgemm_fp8"}, lambda weight: by_blocks(weight, (1, weight.shape[-1]), end="_scale")),
    "FP8 E5M2": ({"quant_method": "fp8", "fmt": "e5m2", "weight_block_size": [16, 32]}, lambda weight: by_blocks(weight, dtype=E5M2)),
    "FP8 in one": (COMPRESSED | {"format": "float-quantized"}, in_one),
    "INT8 by rows": (COMPRESSED | {"format": "int-quantized"}, by_rows),
    "INT4 by groups": (COMPRESSED | {"format": "pack-quantized"}, packed),
    "INT8 packed": (COMPRESSED | {"format": "pack-quantized"}, lambda weight: packed(weight, 8)),
}
# Of experts that the module holds in one tensor: models in transformers alone have them in files.
KEPT = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
MXFP4: tuple[dict[str, Any], Callable[[Tensor], Quantized]] = {"quant_method": "mxfp4", "modules_to_not_convert": KEPT}, mxfp4


def quantize(
    source: Path, out: Path, config: dict[str, Any], scheme: Callable[[Tensor], Quantized], *, ends: tuple[str, ...] = ("_proj.weight",)
) -> Path:
    """Write a checkpoint whose projections, with names of these `ends`, are quantized. Returns the folder of what they stand for."""
    stored, plain = {}, {}
    for file in sorted(source.glob("*.safetensors")):
        for name, tensor in load_file(file).items():
            stored[name] = plain[name] = tensor
            if tensor.dim() >= 2 and name.endswith(ends):
                del stored[name]
                found, plain[name] = scheme(tensor.float())
                stored |= {name + end: each.contiguous() for end, each in found.items()}
    values = json.loads((source / "config.json").read_text())
    for folder, tensors, more in ((out / "quantized", stored, {"quantization_config": config}), (out / "plain", plain, {})):
        folder.mkdir()
        save_file(tensors, folder / WHOLE_NAME, {"format": "pt"})
        (folder / "config.json").write_text(json.dumps(values | more))
    return out / "plain"
