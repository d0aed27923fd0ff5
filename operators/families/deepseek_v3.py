"""DeepSeek-V3, DeepSeek-R1, Kimi K2: config keys and weight names; deepseek_v2.py uses most of them too.

Latent attention, sigmoid gate, routed experts beside shared ones, dense layers first. A stored bias corrects the choice of the gate, which
is limited to the best groups. The layers for multi-token prediction behind the last layer are not read. Free of torch.
"""

from __future__ import annotations

from dataclasses import replace

from flowrt.operators.families.config_file import ConfigFile
from flowrt.operators.families.family import About, Family, stored_as
from flowrt.operators.families.rotary_keys import read_rotary, rope_keys, yarn_mscale
from flowrt.operators.families.standard import ATTENTION, MLP, STANDARD_PARTS, read_model
from flowrt.operators.model_config import GateConfig, LatentConfig, ModelConfig, RotaryConfig


def read_config(file: ConfigFile) -> ModelConfig:
    """config.json of a DeepSeek-V3 model as a ModelConfig; absent keys have the defaults that transformers gives them."""
    file.must_be("scoring_func", "sigmoid", default="sigmoid")
    file.must_be("topk_method", "noaux_tc", default="noaux_tc")
    gate = GateConfig(
        scores="sigmoid",
        bias=True,
        groups=8,
        topk_groups=4,
        group_best=2,
        normalize=1.0 if file.flag("norm_topk_prob", default=True, null=False) else None,
        scale=file.number("routed_scaling_factor", default=2.5),
        wide=True,
    )
    interleaved = file.flag("rope_interleave", default=True, null=False)
    return read_latent_model(file, "deepseek_v3", gate, routed=256, per_token=8, shared=1, dense_layers=3, interleaved=interleaved)


def read_latent_model(
    file: ConfigFile, family: str, gate: GateConfig, *, routed: int, per_token: int, shared: int, dense_layers: int, interleaved: bool
) -> ModelConfig:
    """Reads what both generations share. The groups of `gate`, and the numbers of experts and dense layers, are defaults."""
    file.must_be("moe_layer_freq", 1, default=1)
    file.must_be("sliding_window", None, default=None)
    num_layers = file.integer("num_hidden_layers")
    num_dense = file.integer("first_k_dense_replace", default=dense_layers, at_least=0)
    if num_dense >= num_layers:
        raise file.error("first_k_dense_replace", f"is {num_dense} of {num_layers} layers; at least one needs experts")
    num_experts = file.integer("n_routed_experts", default=routed)
    groups = file.integer("n_group", default=gate.groups)
    if num_experts % groups or num_experts // groups < gate.group_best:
        best = f" of at least {gate.group_best}" if gate.group_best > 1 else ""
        raise file.error("n_group", f"is {groups}; it must cut {num_experts} experts into equal groups{best}")
    topk_groups = file.integer("topk_group", default=min(gate.topk_groups, groups))
    if topk_groups > groups:
        raise file.error("topk_group", f"is {topk_groups}; there are only {groups} groups")
    num_chosen, allowed = file.integer("num_experts_per_tok", default=per_token), topk_groups * (num_experts // groups)
    if num_chosen > allowed:
        raise file.error("num_experts_per_tok", f"is {num_chosen}; only {allowed} experts may be chosen from")
    expert_width = file.integer("moe_intermediate_size")
    max_positions = file.integer("max_position_embeddings", default=4096)
    rotary = read_rotary(file, max_positions, interleaved=interleaved)
    latent = _read_latent(file, rotary)
    return read_model(
        file,
        family,
        num_kv_heads=1,
        head_dim=latent.key_width,
        num_experts=num_experts,
        num_experts_per_token=num_chosen,
        expert_width=expert_width,
        dense_width=file.integer("intermediate_size") if num_dense else 0,
        moe_layers=tuple(range(num_dense, num_layers)),
        max_position_embeddings=max_positions,
        rotary=rotary,
        gate=replace(gate, groups=groups, topk_groups=topk_groups),
        latent=latent,
        shared_expert_width=expert_width * file.integer("n_shared_experts", default=shared, at_least=0),
        attention_bias=file.flag("attention_bias", default=False),
    )


def _read_latent(file: ConfigFile, rotary: RotaryConfig) -> LatentConfig:
    nope_width = file.integer("qk_nope_head_dim", default=128)
    rope_width = file.integer("qk_rope_head_dim", default=64)
    if rope_width % 2:
        raise file.error("qk_rope_head_dim", f"is {rope_width}; rotary positions need an even number")
    # A null q_lora_rank means none; transformers' default, 1536, is for a key that is not there.
    no_query_rank = "q_lora_rank" in file.values and file.values["q_lora_rank"] is None
    scale = float((nope_width + rope_width) ** -0.5)
    _, rope = rope_keys(file)
    if rotary.kind != "default" and rope.values.get("mscale_all_dim"):
        scale *= yarn_mscale(rotary.factor, rope.number("mscale_all_dim")) ** 2
    return LatentConfig(
        query_rank=None if no_query_rank else file.integer("q_lora_rank", default=1536),
        rank=file.integer("kv_lora_rank", default=512),
        nope_width=nope_width,
        rope_width=rope_width,
        value_width=file.integer("v_head_dim", default=128),
        scale=scale,
    )


LATENT_PARTS = STANDARD_PARTS | {
    "latent_down": (
        *stored_as(ATTENTION + "q_a_proj.weight", ATTENTION + "kv_a_proj_with_mqa.weight"),
        *stored_as(ATTENTION + "q_proj.weight", ATTENTION + "kv_a_proj_with_mqa.weight"),
    ),
    "query_down_bias": stored_as(ATTENTION + "q_a_proj.bias"),
    "kv_down_bias": stored_as(ATTENTION + "kv_a_proj_with_mqa.bias"),
    "query_latent_norm": stored_as(ATTENTION + "q_a_layernorm.weight"),
    "kv_latent_norm": stored_as(ATTENTION + "kv_a_layernorm.weight"),
    "query_up": stored_as(ATTENTION + "q_b_proj.weight"),
    "kv_up": stored_as(ATTENTION + "kv_b_proj.weight"),
    "shared_gate_up": stored_as(MLP + "shared_experts.gate_proj.weight", MLP + "shared_experts.up_proj.weight"),
    "shared_down": stored_as(MLP + "shared_experts.down_proj.weight"),
}

FAMILY = Family(
    name="deepseek_v3",
    also=("kimi_k2",),
    architectures=("DeepseekV3ForCausalLM", "KimiK2ForCausalLM"),
    read_config=read_config,
    parts=LATENT_PARTS | {"gate_bias": stored_as(MLP + "gate.e_score_correction_bias")},
    about=About(
        models="DeepSeek-V3, R1; Kimi K2",
        attention="latent",
        gate="sigmoid, corrected by a bias, best groups",
        experts="shared ones; dense layers first",
    ),
)
