"""A checkpoint for measuring exchange patterns: few weights, so that computing takes less time than its model, and many layers."""

from __future__ import annotations

import json
import math
import random
import struct
from array import array
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from msgspec import Meta

from flowrt.graph.settings import Section

HIDDEN, WIDTH, VOCABULARY, TOP_K = 32, 16, 64, 2
_Positive = Annotated[int, Meta(ge=1)]
_SMALL, _POOL = 1 << 16, (1 << 20) + 7  # weights with more numbers repeat those of a pool: drawing hundreds of millions takes minutes


class SmallModel(Section, frozen=True):
    """Sizes of a Mixtral model with random weights."""

    num_layers: _Positive
    num_experts: _Positive = 8
    top_k: _Positive = TOP_K
    hidden: _Positive = HIDDEN
    width: _Positive = WIDTH
    heads: _Positive = 2
    kv_heads: _Positive = 1
    head_dim: _Positive = 16
    vocabulary: _Positive = VOCABULARY


def write_small_model(directory: Path, num_layers: int, num_experts: int, top_k: int = TOP_K, **sizes: int) -> Path:
    """Write a SmallModel, config.json and model.safetensors, into `directory`. Equal arguments, equal weights."""
    model = SmallModel(num_layers, num_experts, top_k, **sizes)
    hidden, heads, kv_heads, head_dim, vocabulary = model.hidden, model.heads, model.kv_heads, model.head_dim, model.vocabulary
    config = {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "dtype": "float32",
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": model.width,
        "num_hidden_layers": num_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "num_local_experts": num_experts,
        "num_experts_per_tok": top_k,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": False,
    }
    chance = random.Random(0)
    pools: dict[float, array[float]] = {}  # by scale
    weights: dict[str, tuple[tuple[int, ...], array[float]]] = {}

    def draw(name: str, *shape: int) -> None:
        scale = shape[-1] ** -0.5
        num = math.prod(shape)
        if num <= _SMALL:
            weights[name] = shape, array("f", [chance.uniform(-1.7, 1.7) * scale for _ in range(num)])
            return
        if scale not in pools:
            pools[scale] = array("f", [chance.uniform(-1.7, 1.7) * scale for _ in range(_POOL)])
        start = chance.randrange(_POOL)
        weights[name] = shape, (pools[scale] * (num // _POOL + 2))[start : start + num]

    def ones(name: str) -> None:
        weights[name] = (hidden,), array("f", [1.0]) * hidden

    draw("model.embed_tokens.weight", vocabulary, hidden)
    ones("model.norm.weight")
    draw("lm_head.weight", vocabulary, hidden)
    for layer in range(num_layers):
        prefix = f"model.layers.{layer}."
        ones(f"{prefix}input_layernorm.weight")
        ones(f"{prefix}post_attention_layernorm.weight")
        for name, rows in (("q", heads * head_dim), ("k", kv_heads * head_dim), ("v", kv_heads * head_dim)):
            draw(f"{prefix}self_attn.{name}_proj.weight", rows, hidden)
        draw(f"{prefix}self_attn.o_proj.weight", hidden, heads * head_dim)
        draw(f"{prefix}block_sparse_moe.gate.weight", num_experts, hidden)
        for expert in range(num_experts):
            for name, shape in (("w1", (model.width, hidden)), ("w3", (model.width, hidden)), ("w2", (hidden, model.width))):
                draw(f"{prefix}block_sparse_moe.experts.{expert}.{name}.weight", *shape)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    _save(weights, directory / "model.safetensors")
    return directory


def _save(weights: Mapping[str, tuple[tuple[int, ...], array[float]]], path: Path) -> None:
    """Write a safetensors file: the length of the header, the header in JSON, the tensors."""
    header, end = {}, 0
    for name, (shape, values) in weights.items():
        begin, end = end, end + len(values) * values.itemsize
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": (begin, end)}
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for _, values in weights.values():
            values.tofile(file)
