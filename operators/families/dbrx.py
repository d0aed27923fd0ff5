"""DBRX: config keys and weight names.

Grouped-query attention with clipped queries, keys and values, layer norms without bias, softmax gate over experts in every layer,
experts of a layer in three tensors. Free of torch.
"""

from __future__ import annotations

from flowrt.operators.families.config_file import ConfigFile
from flowrt.operators.families.family import About, Family, Piece, stored_as
from flowrt.operators.families.rotary_keys import read_rotary
from flowrt.operators.families.standard import check_divides, check_top_k, read_model
from flowrt.operators.model_config import GateConfig, ModelConfig


def read_config(file: ConfigFile) -> ModelConfig:
    """config.json of a DBRX model as a ModelConfig; absent keys have the defaults that transformers gives them."""
    file.must_be("tie_word_embeddings", False, default=False)
    file.must_be("sliding_window", None, default=None)
    attention = ConfigFile(file.path, file.mapping("attn_config"))
    experts = ConfigFile(file.path, file.mapping("ffn_config"))
    activation = experts.mapping("ffn_act_fn").get("name", "silu")
    if activation != "silu":
        raise file.error("ffn_config.ffn_act_fn", f"is {activation!r}; only 'silu' is supported")
    hidden_size = file.integer("d_model", "hidden_size")
    num_layers = file.integer("n_layers", "num_hidden_layers")
    num_heads = file.integer("n_heads", "num_attention_heads")
    num_kv_heads = attention.integer("kv_n_heads", default=1)
    check_divides(file, "attn_config.kv_n_heads", num_kv_heads, "n_heads", num_heads)
    if hidden_size % (2 * num_heads):
        raise file.error("n_heads", f"is {num_heads}; it must cut d_model, {hidden_size}, into heads of even width")
    num_experts = experts.integer("moe_num_experts", default=4)
    num_experts_per_token = experts.integer("moe_top_k", default=1)
    check_top_k(file, "ffn_config.moe_top_k", num_experts_per_token, num_experts)
    never = "moe_normalize_expert_weights" in experts.values and experts.values["moe_normalize_expert_weights"] is None
    max_positions = file.integer("max_seq_len", "max_position_embeddings", default=2048)
    # Files of DBRX's authors have theta in attn_config; transformers 5 writes what it computes with into rope_parameters.
    theta = attention.number("rope_theta", default=10000.0)
    return read_model(
        file,
        "dbrx",
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=hidden_size // num_heads,
        num_experts=num_experts,
        num_experts_per_token=num_experts_per_token,
        expert_width=experts.integer("ffn_hidden_size", default=3584),
        dense_width=0,
        moe_layers=tuple(range(num_layers)),
        norm_epsilon=1e-5,
        max_position_embeddings=max_positions,
        rotary=read_rotary(file, max_positions, default_theta=theta),
        gate=GateConfig(normalize=None if never else experts.number("moe_normalize_expert_weights", default=1.0)),
        norm="layer",
        clip_qkv=attention.number("clip_qkv") if attention.has("clip_qkv") else None,
    )


_BLOCK = "transformer.blocks.{layer}."
_ATTENTION = _BLOCK + "norm_attn_norm.attn."
_EXPERTS = _BLOCK + "ffn.experts.mlp."

FAMILY = Family(
    name="dbrx",
    architectures=("DbrxForCausalLM",),
    read_config=read_config,
    parts={
        "embedding": stored_as("transformer.wte.weight"),
        "final_norm": stored_as("transformer.norm_f.weight"),
        "head": stored_as("lm_head.weight"),
        "attention_norm": stored_as(_BLOCK + "norm_attn_norm.norm_1.weight"),
        "mlp_norm": stored_as(_BLOCK + "norm_attn_norm.norm_2.weight"),
        "qkv": stored_as(_ATTENTION + "Wqkv.weight"),
        "attention_output": stored_as(_ATTENTION + "out_proj.weight"),
        "gate": stored_as(_BLOCK + "ffn.router.layer.weight"),
        "expert_gate_up": ((Piece(_EXPERTS + "w1", expert="rows"), Piece(_EXPERTS + "v1", expert="rows")),),
        "expert_down": ((Piece(_EXPERTS + "w2", expert="rows", transpose=True),),),
    },
    about=About(
        models="DBRX",
        attention="grouped, clipped; layer norm",
        gate="softmax, p-norm",
        experts="all layers, three tensors per layer",
    ),
)
