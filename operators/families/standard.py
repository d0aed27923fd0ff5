"""Reads the config keys that most families share, and names the weights that most families store alike. Free of torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from flowrt.operators.families.config_file import ConfigFile
from flowrt.operators.families.family import Layout, Piece, stored_as
from flowrt.operators.families.quantization import refuse_quantized_config
from flowrt.operators.families.rotary_keys import read_rotary, scaled_positions
from flowrt.operators.model_config import ModelConfig

STANDARD_FACTS: dict[str, Callable[[ConfigFile], Any]] = {
    "dtype": ConfigFile.dtype,
    "vocab_size": lambda file: file.integer("vocab_size"),
    "hidden_size": lambda file: file.integer("hidden_size"),
    "num_layers": lambda file: file.integer("num_hidden_layers"),
    "num_heads": lambda file: file.integer("num_attention_heads"),
    "norm_epsilon": lambda file: file.number("rms_norm_eps", default=1e-6),
    "tie_word_embeddings": lambda file: file.flag("tie_word_embeddings", default=False),
    "bos_token_id": lambda file: file.token_id("bos_token_id"),
    "eos_token_ids": lambda file: file.token_ids("eos_token_id"),
}


def read_model(file: ConfigFile, family: str, **facts: Any) -> ModelConfig:
    """A ModelConfig of these facts, with each of STANDARD_FACTS that is not among them read from its key.

    With YaRN the longest context is at least that of the training times the factor, as in vLLM: files often keep the old length.
    """
    file.must_be("hidden_act", "silu", default="silu")
    refuse_quantized_config(file.path, file.values)
    config = ModelConfig(family=family, **{name: read(file) for name, read in STANDARD_FACTS.items() if name not in facts} | facts)
    if config.rotary.kind != "yarn":
        return config
    return replace(config, max_position_embeddings=max(config.max_position_embeddings, scaled_positions(config.rotary)))


def read_grouped_model(
    file: ConfigFile,
    family: str,
    *,
    num_experts: int,
    num_experts_per_token: int,
    default_kv_heads: int,
    default_positions: int,
    default_theta: float = 10000.0,
    default_head_dim: int | None = None,
    partial_rotary: float | None = None,
    **facts: Any,
) -> ModelConfig:
    """Works as read_model for grouped-query attention with standard keys."""
    num_heads = file.integer("num_attention_heads")
    num_kv_heads = file.integer("num_key_value_heads", default=default_kv_heads)
    each = max(1, file.integer("hidden_size") // num_heads)
    head_dim = file.integer("head_dim", default=default_head_dim or each, null=each)
    max_positions = file.integer("max_position_embeddings", default=default_positions)
    check_divides(file, "num_key_value_heads", num_kv_heads, "num_attention_heads", num_heads)
    if head_dim % 2:
        raise file.error("head_dim", f"is {head_dim}; rotary positions need an even number")
    check_top_k(file, "num_experts_per_tok", num_experts_per_token, num_experts)
    return read_model(
        file,
        family,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        num_experts=num_experts,
        num_experts_per_token=num_experts_per_token,
        max_position_embeddings=max_positions,
        rotary=read_rotary(
            file, max_positions, default_theta=default_theta, partial=None if partial_rotary is None else (head_dim, partial_rotary)
        ),
        **facts,
    )


def check_divides(file: ConfigFile, key: str, value: int, of_key: str, of: int) -> None:
    if of % value:
        raise file.error(key, f"is {value}; it must divide {of_key}, {of}")


def check_top_k(file: ConfigFile, key: str, num_chosen: int, num_experts: int) -> None:
    if num_chosen > num_experts:
        raise file.error(key, f"is {num_chosen}; there are only {num_experts} experts")


LAYER = "model.layers.{layer}."
ATTENTION = LAYER + "self_attn."
MLP = LAYER + "mlp."


def expert_parts(expert: str, gate: str, up: str, down: str) -> dict[str, tuple[Layout, ...]]:
    """The parts of an expert: three tensors under the prefix `expert`, or all experts in one tensor, as transformers 5 holds them."""
    return {
        "expert_gate_up": (
            (Piece(f"{expert}{gate}.weight"), Piece(f"{expert}{up}.weight")),
            (Piece(MLP + "experts.gate_up_proj", expert="index"),),
        ),
        "expert_down": ((Piece(f"{expert}{down}.weight"),), (Piece(MLP + "experts.down_proj", expert="index"),)),
    }


STANDARD_PARTS: dict[str, tuple[Layout, ...]] = {
    "embedding": stored_as("model.embed_tokens.weight"),
    "final_norm": stored_as("model.norm.weight"),
    "head": stored_as("lm_head.weight"),
    "attention_norm": stored_as(LAYER + "input_layernorm.weight"),
    "mlp_norm": stored_as(LAYER + "post_attention_layernorm.weight"),
    "qkv": stored_as(ATTENTION + "q_proj.weight", ATTENTION + "k_proj.weight", ATTENTION + "v_proj.weight"),
    "qkv_bias": stored_as(ATTENTION + "q_proj.bias", ATTENTION + "k_proj.bias", ATTENTION + "v_proj.bias"),
    "query_norm": stored_as(ATTENTION + "q_norm.weight"),
    "key_norm": stored_as(ATTENTION + "k_norm.weight"),
    "attention_output": stored_as(ATTENTION + "o_proj.weight"),
    "attention_output_bias": stored_as(ATTENTION + "o_proj.bias"),
    "gate": stored_as(MLP + "gate.weight"),
    "dense_gate_up": stored_as(MLP + "gate_proj.weight", MLP + "up_proj.weight"),
    "dense_down": stored_as(MLP + "down_proj.weight"),
    **expert_parts(MLP + "experts.{expert}.", "gate_proj", "up_proj", "down_proj"),
}
