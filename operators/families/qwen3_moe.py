"""Qwen3-MoE (Qwen3-30B-A3B, Qwen3-235B-A22B, Qwen3-Coder): config keys and weight names.

Grouped-query attention with a norm on each query and key head, softmax gate, top-k experts without shared ones; some layers may
hold a dense MLP instead (`mlp_only_layers`, `decoder_sparse_step`). Free of torch.
"""

from __future__ import annotations

from flowrt.operators.families.config_file import ConfigFile
from flowrt.operators.families.family import Family, Piece, stored_as
from flowrt.operators.families.rotary_keys import read_rotary
from flowrt.operators.model_config import GateConfig, ModelConfig


def read_config(file: ConfigFile) -> ModelConfig:
    """config.json of a Qwen3-MoE model as a ModelConfig; absent keys have the defaults that transformers gives them."""
    file.must_be("hidden_act", "silu", default="silu")
    if file.flag("use_sliding_window", default=False) and file.has("sliding_window"):
        raise file.error("use_sliding_window", "sliding windows are not supported; only false is")
    file.refuse_quantized()
    hidden_size = file.integer("hidden_size")
    num_layers = file.integer("num_hidden_layers")
    num_heads = file.integer("num_attention_heads")
    num_kv_heads = file.integer("num_key_value_heads", default=num_heads)
    head_dim = file.integer("head_dim", default=max(1, hidden_size // num_heads))
    num_experts = file.integer("num_experts", "num_local_experts")
    num_experts_per_token = file.integer("num_experts_per_tok")
    if num_heads % num_kv_heads:
        raise file.error("num_key_value_heads", f"is {num_kv_heads}; it must divide num_attention_heads, {num_heads}")
    if head_dim % 2:
        raise file.error("head_dim", f"is {head_dim}; rotary positions need an even number")
    if num_experts_per_token > num_experts:
        raise file.error("num_experts_per_tok", f"is {num_experts_per_token}; there are only {num_experts} experts")
    mlp_only = frozenset(file.integers("mlp_only_layers"))
    sparse_step = file.integer("decoder_sparse_step", default=1)
    moe_layers = tuple(layer for layer in range(num_layers) if layer not in mlp_only and (layer + 1) % sparse_step == 0)
    if not moe_layers:
        raise file.error("mlp_only_layers, decoder_sparse_step", "leave no layer with experts; at least one is needed")
    dense_width = file.integer("intermediate_size") if len(moe_layers) < num_layers else 0
    max_positions = file.integer("max_position_embeddings", default=32768)
    return ModelConfig(
        family="qwen3_moe",
        dtype=file.dtype(),
        vocab_size=file.integer("vocab_size"),
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        num_experts=num_experts,
        num_experts_per_token=num_experts_per_token,
        expert_width=file.integer("moe_intermediate_size"),
        dense_width=dense_width,
        moe_layers=moe_layers,
        norm_epsilon=file.number("rms_norm_eps", default=1e-6),
        max_position_embeddings=max_positions,
        rotary=read_rotary(file, max_positions),
        gate=GateConfig(normalize=1.0 if file.flag("norm_topk_prob", default=False) else None),
        qk_norm=True,
        attention_bias=file.flag("attention_bias", default=False),
        tie_word_embeddings=file.flag("tie_word_embeddings", default=False),
        bos_token_id=file.token_id("bos_token_id"),
        eos_token_ids=file.token_ids("eos_token_id"),
    )


_ATTENTION = "model.layers.{layer}.self_attn."
_MLP = "model.layers.{layer}.mlp."
_EXPERT = _MLP + "experts.{expert}."

FAMILY = Family(
    name="qwen3_moe",
    architectures=("Qwen3MoeForCausalLM",),
    read_config=read_config,
    parts={
        "embedding": stored_as("model.embed_tokens.weight"),
        "final_norm": stored_as("model.norm.weight"),
        "head": stored_as("lm_head.weight"),
        "attention_norm": stored_as("model.layers.{layer}.input_layernorm.weight"),
        "mlp_norm": stored_as("model.layers.{layer}.post_attention_layernorm.weight"),
        "qkv": stored_as(_ATTENTION + "q_proj.weight", _ATTENTION + "k_proj.weight", _ATTENTION + "v_proj.weight"),
        "qkv_bias": stored_as(_ATTENTION + "q_proj.bias", _ATTENTION + "k_proj.bias", _ATTENTION + "v_proj.bias"),
        "query_norm": stored_as(_ATTENTION + "q_norm.weight"),
        "key_norm": stored_as(_ATTENTION + "k_norm.weight"),
        "attention_output": stored_as(_ATTENTION + "o_proj.weight"),
        "attention_output_bias": stored_as(_ATTENTION + "o_proj.bias"),
        "gate": stored_as(_MLP + "gate.weight"),
        "expert_gate_up": (
            (Piece(_EXPERT + "gate_proj.weight"), Piece(_EXPERT + "up_proj.weight")),
            (Piece(_MLP + "experts.gate_up_proj", expert="index"),),  # all experts in one tensor, as transformers 5 holds them
        ),
        "expert_down": (
            (Piece(_EXPERT + "down_proj.weight"),),
            (Piece(_MLP + "experts.down_proj", expert="index"),),
        ),
        "dense_gate_up": stored_as(_MLP + "gate_proj.weight", _MLP + "up_proj.weight"),
        "dense_down": stored_as(_MLP + "down_proj.weight"),
    },
)
