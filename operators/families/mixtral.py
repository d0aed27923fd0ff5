"""Mixtral (8x7B, 8x22B): config keys and weight names.

Grouped-query attention, perhaps with a sliding window, softmax gate over experts in every layer. Free of torch.
"""

from __future__ import annotations

from flowrt.operators.families.config_file import ConfigFile
from flowrt.operators.families.family import Family, Piece, stored_as
from flowrt.operators.families.rotary_keys import read_rotary
from flowrt.operators.model_config import GateConfig, ModelConfig


def read_config(file: ConfigFile) -> ModelConfig:
    """config.json of a Mixtral model as a ModelConfig; absent keys have the defaults that transformers gives them."""
    file.must_be("hidden_act", "silu", default="silu")
    file.refuse_quantized()
    hidden_size = file.integer("hidden_size")
    num_layers = file.integer("num_hidden_layers")
    num_heads = file.integer("num_attention_heads")
    num_kv_heads = file.integer("num_key_value_heads", default=8)
    head_dim = file.integer("head_dim", default=max(1, hidden_size // num_heads))
    num_experts = file.integer("num_local_experts", "num_experts", default=8)
    num_experts_per_token = file.integer("num_experts_per_tok", default=2)
    max_positions = file.integer("max_position_embeddings", default=131072)
    if num_heads % num_kv_heads:
        raise file.error("num_key_value_heads", f"is {num_kv_heads}; it must divide num_attention_heads, {num_heads}")
    if head_dim % 2:
        raise file.error("head_dim", f"is {head_dim}; rotary positions need an even number")
    if num_experts_per_token > num_experts:
        raise file.error("num_experts_per_tok", f"is {num_experts_per_token}; there are only {num_experts} experts")
    return ModelConfig(
        family="mixtral",
        dtype=file.dtype(),
        vocab_size=file.integer("vocab_size"),
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        num_experts=num_experts,
        num_experts_per_token=num_experts_per_token,
        expert_width=file.integer("intermediate_size"),
        dense_width=0,
        moe_layers=tuple(range(num_layers)),
        norm_epsilon=file.number("rms_norm_eps", default=1e-5),
        max_position_embeddings=max_positions,
        rotary=read_rotary(file, max_positions, default_theta=1e6),
        gate=GateConfig(normalize=1.0),
        sliding_window=file.integer("sliding_window") if file.has("sliding_window") else None,
        tie_word_embeddings=file.flag("tie_word_embeddings", default=False),
        bos_token_id=file.token_id("bos_token_id"),
        eos_token_ids=file.token_ids("eos_token_id"),
    )


_ATTENTION = "model.layers.{layer}.self_attn."
_MOE = "model.layers.{layer}.block_sparse_moe."
_EXPERT = _MOE + "experts.{expert}."
_MLP = "model.layers.{layer}.mlp."  # where transformers 5 holds the same, all experts in one tensor

FAMILY = Family(
    name="mixtral",
    architectures=("MixtralForCausalLM",),
    read_config=read_config,
    parts={
        "embedding": stored_as("model.embed_tokens.weight"),
        "final_norm": stored_as("model.norm.weight"),
        "head": stored_as("lm_head.weight"),
        "attention_norm": stored_as("model.layers.{layer}.input_layernorm.weight"),
        "mlp_norm": stored_as("model.layers.{layer}.post_attention_layernorm.weight"),
        "qkv": stored_as(_ATTENTION + "q_proj.weight", _ATTENTION + "k_proj.weight", _ATTENTION + "v_proj.weight"),
        "attention_output": stored_as(_ATTENTION + "o_proj.weight"),
        "gate": (*stored_as(_MOE + "gate.weight"), *stored_as(_MLP + "gate.weight")),
        "expert_gate_up": (
            (Piece(_EXPERT + "w1.weight"), Piece(_EXPERT + "w3.weight")),
            (Piece(_MLP + "experts.gate_up_proj", expert="index"),),
        ),
        "expert_down": (
            (Piece(_EXPERT + "w2.weight"),),
            (Piece(_MLP + "experts.down_proj", expert="index"),),
        ),
    },
)
