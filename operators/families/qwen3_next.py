"""Qwen3-Next (Qwen3-Next-80B-A3B): config keys and weight names.

Most layers have a gated delta net, every fourth one has gated attention of which a part of each head turns with the position. Softmax gate,
top-k experts beside a gated shared one. Weights of norms are stored minus one. The layers for multi-token prediction are not read. Free of
torch.
"""

from __future__ import annotations

from dataclasses import replace

from flowrt.operators.families.config_file import ConfigFile
from flowrt.operators.families.family import About, Family, stored_as
from flowrt.operators.families.qwen3_moe import moe_layers_of
from flowrt.operators.families.standard import LAYER, MLP, STANDARD_PARTS, check_divides, read_grouped_model
from flowrt.operators.model_config import DeltaConfig, GateConfig, ModelConfig

LINEAR, FULL = "linear_attention", "full_attention"


def read_config(file: ConfigFile) -> ModelConfig:
    """config.json of a Qwen3-Next model as a ModelConfig; absent keys have the defaults that transformers gives them."""
    file.must_be("attention_bias", False, default=False)
    num_layers = file.integer("num_hidden_layers")
    moe_layers = moe_layers_of(file, num_layers)
    return read_grouped_model(
        file,
        "qwen3_next",
        num_experts=file.integer("num_experts", default=512),
        num_experts_per_token=file.integer("num_experts_per_tok", default=10),
        default_kv_heads=2,
        default_positions=32768,
        default_head_dim=256,
        partial_rotary=0.25,
        expert_width=file.integer("moe_intermediate_size", default=512),
        dense_width=file.integer("intermediate_size", default=5632) if len(moe_layers) < num_layers else 0,
        moe_layers=moe_layers,
        gate=GateConfig(normalize=1.0 if file.flag("norm_topk_prob", default=True) else None),
        delta=_read_delta(file, num_layers),
        wide_norms=True,
        qk_norm=True,
        attention_gate=True,
        shared_expert_width=file.integer("shared_expert_intermediate_size", default=512),
        shared_expert_gate=True,
    )


def _read_delta(file: ConfigFile, num_layers: int) -> DeltaConfig | None:
    every = file.integer("full_attention_interval", default=4)
    kinds = file.texts("layer_types", (LINEAR, FULL)) or tuple(FULL if (at + 1) % every == 0 else LINEAR for at in range(num_layers))
    if len(kinds) != num_layers:
        raise file.error("layer_types", f"has {len(kinds)} entries; {num_layers} layers need one each")
    num_key_heads = file.integer("linear_num_key_heads", default=16)
    num_value_heads = file.integer("linear_num_value_heads", default=32)
    check_divides(file, "linear_num_key_heads", num_key_heads, "linear_num_value_heads", num_value_heads)
    layers = tuple(layer for layer, kind in enumerate(kinds) if kind == LINEAR)
    delta = DeltaConfig(
        layers=layers,
        num_key_heads=num_key_heads,
        num_value_heads=num_value_heads,
        key_width=file.integer("linear_key_head_dim", default=128),
        value_width=file.integer("linear_value_head_dim", default=128),
        conv_tokens=file.integer("linear_conv_kernel_dim", default=4, at_least=2),
        by_key_head=True,
    )
    return delta if layers else None


DELTA, SHARED = LAYER + "linear_attn.", MLP + "shared_expert."
_NORMS = ("final_norm", "attention_norm", "mlp_norm", "query_norm", "key_norm")
_OFFSET_NORMS = {part: tuple(tuple(replace(piece, added=1.0) for piece in layout) for layout in STANDARD_PARTS[part]) for part in _NORMS}
FAMILY = Family(
    name="qwen3_next",
    architectures=("Qwen3NextForCausalLM",),
    read_config=read_config,
    parts=STANDARD_PARTS
    | _OFFSET_NORMS
    | {
        "delta_in": stored_as(DELTA + "in_proj_qkvz.weight", DELTA + "in_proj_ba.weight"),
        "delta_conv": stored_as(DELTA + "conv1d.weight"),
        "delta_rate": stored_as(DELTA + "A_log"),
        "delta_bias": stored_as(DELTA + "dt_bias"),
        "delta_norm": stored_as(DELTA + "norm.weight"),
        "delta_out": stored_as(DELTA + "out_proj.weight"),
        "shared_gate_up": stored_as(SHARED + "gate_proj.weight", SHARED + "up_proj.weight"),
        "shared_down": stored_as(SHARED + "down_proj.weight"),
        "shared_gate": stored_as(MLP + "shared_expert_gate.weight"),
    },
    about=About(
        models="Qwen3-Next-80B-A3B",
        attention="gated delta net with a recurrent state; every fourth layer grouped, gated, turned in part",
        gate="softmax",
        experts="a gated shared expert; layers for multi-token prediction are not read",
    ),
)
