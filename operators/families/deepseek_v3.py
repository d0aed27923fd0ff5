"""DeepSeek-V3, DeepSeek-R1, Kimi K2: config keys and weight names; deepseek_v2.py uses most of them too.

Latent attention, sigmoid gate, routed experts beside shared ones, dense layers first. A stored bias corrects the choice of the gate, which
is limited to the best groups. The layers for multi-token prediction behind the last layer are not read. Free of torch.
"""

from __future__ import annotations

from typing import Any

from flowrt.operators.families.config_file import ConfigFile
from flowrt.operators.families.family import Family, Piece, stored_as
from flowrt.operators.families.rotary_keys import read_rotary, yarn_mscale
from flowrt.operators.model_config import GateConfig, LatentConfig, ModelConfig, RotaryConfig


def read_config(file: ConfigFile) -> ModelConfig:
    """config.json of a DeepSeek-V3 model as a ModelConfig; absent keys have the defaults that transformers gives them."""
    file.must_be("scoring_func", "sigmoid", default="sigmoid")
    file.must_be("topk_method", "noaux_tc", default="noaux_tc")
    interleaved = file.flag("rope_interleave", default=True)
    experts = ExpertKeys(file, dense_layers=3, shared=1, routed=256, per_token=8, groups=8, topk_groups=4, group_best=2)
    gate = GateConfig(
        scores="sigmoid",
        bias=True,
        groups=experts.groups,
        topk_groups=experts.topk_groups,
        group_best=2,
        normalize=1.0 if file.flag("norm_topk_prob", default=True) else None,
        scale=file.number("routed_scaling_factor", default=2.5),
        wide=True,
    )
    return read_latent_model(file, "deepseek_v3", experts, gate, interleaved=interleaved)


class ExpertKeys:
    """The expert keys that both generations share: number and kind of experts, their layers and their groups."""

    def __init__(
        self,
        file: ConfigFile,
        *,
        dense_layers: int,
        shared: int,
        routed: int,
        per_token: int,
        groups: int,
        topk_groups: int,
        group_best: int,
    ) -> None:
        self.routed = file.integer("n_routed_experts", default=routed)
        self.per_token = file.integer("num_experts_per_tok", default=per_token)
        self.width = file.integer("moe_intermediate_size")
        self.shared_width = self.width * file.integer("n_shared_experts", default=shared, at_least=0)
        self.groups = file.integer("n_group", default=groups)
        self.topk_groups = file.integer("topk_group", default=min(topk_groups, self.groups))
        file.must_be("moe_layer_freq", 1, default=1)
        num_layers = file.integer("num_hidden_layers")
        self.dense_layers = file.integer("first_k_dense_replace", default=dense_layers, at_least=0)
        self.layers = tuple(range(self.dense_layers, num_layers))
        if not self.layers:
            raise file.error("first_k_dense_replace", f"is {self.dense_layers} of {num_layers} layers; at least one needs experts")
        if self.routed % self.groups or self.routed // self.groups < group_best:
            best = f" of at least {group_best}" if group_best > 1 else ""
            raise file.error("n_group", f"is {self.groups}; it must cut {self.routed} experts into equal groups{best}")
        if self.topk_groups > self.groups:
            raise file.error("topk_group", f"is {self.topk_groups}; there are only {self.groups} groups")
        allowed = self.topk_groups * (self.routed // self.groups)
        if self.per_token > allowed:
            raise file.error("num_experts_per_tok", f"is {self.per_token}; only {allowed} experts may be chosen from")


def read_latent_model(file: ConfigFile, family: str, experts: ExpertKeys, gate: GateConfig, *, interleaved: bool) -> ModelConfig:
    """Reads the parts of a config that both generations share."""
    file.must_be("hidden_act", "silu", default="silu")
    file.refuse_quantized()
    max_positions = file.integer("max_position_embeddings", default=4096)
    rotary = read_rotary(file, max_positions, interleaved=interleaved)
    latent = _read_latent(file, rotary)
    return ModelConfig(
        family=family,
        dtype=file.dtype(),
        vocab_size=file.integer("vocab_size"),
        hidden_size=file.integer("hidden_size"),
        num_layers=file.integer("num_hidden_layers"),
        num_heads=file.integer("num_attention_heads"),
        num_kv_heads=1,
        head_dim=latent.key_width,
        num_experts=experts.routed,
        num_experts_per_token=experts.per_token,
        expert_width=experts.width,
        dense_width=file.integer("intermediate_size") if experts.dense_layers else 0,
        moe_layers=experts.layers,
        norm_epsilon=file.number("rms_norm_eps", default=1e-6),
        max_position_embeddings=max_positions,
        rotary=rotary,
        gate=gate,
        latent=latent,
        shared_expert_width=experts.shared_width,
        attention_bias=file.flag("attention_bias", default=False),
        tie_word_embeddings=file.flag("tie_word_embeddings", default=False),
        bos_token_id=file.token_id("bos_token_id"),
        eos_token_ids=file.token_ids("eos_token_id"),
    )


def _read_latent(file: ConfigFile, rotary: RotaryConfig) -> LatentConfig:
    nope_width = file.integer("qk_nope_head_dim", default=128)
    rope_width = file.integer("qk_rope_head_dim", default=64)
    if rope_width % 2:
        raise file.error("qk_rope_head_dim", f"is {rope_width}; rotary positions need an even number")
    # A null q_lora_rank means none; transformers' default, 1536, is for a key that is not there.
    no_query_rank = "q_lora_rank" in file.values and file.values["q_lora_rank"] is None
    scale = float((nope_width + rope_width) ** -0.5)
    if rotary.kind != "default":
        key = "rope_scaling" if file.mapping("rope_scaling") else "rope_parameters"
        mscale_all: Any = file.mapping(key).get("mscale_all_dim")
        if mscale_all:
            scale *= yarn_mscale(rotary.factor, ConfigFile(file.path, file.mapping(key)).number("mscale_all_dim")) ** 2
    return LatentConfig(
        query_rank=None if no_query_rank else file.integer("q_lora_rank", default=1536),
        rank=file.integer("kv_lora_rank", default=512),
        nope_width=nope_width,
        rope_width=rope_width,
        value_width=file.integer("v_head_dim", default=128),
        scale=scale,
    )


_ATTENTION = "model.layers.{layer}.self_attn."
_MLP = "model.layers.{layer}.mlp."
_EXPERT = _MLP + "experts.{expert}."

LATENT_PARTS = {
    "embedding": stored_as("model.embed_tokens.weight"),
    "final_norm": stored_as("model.norm.weight"),
    "head": stored_as("lm_head.weight"),
    "attention_norm": stored_as("model.layers.{layer}.input_layernorm.weight"),
    "mlp_norm": stored_as("model.layers.{layer}.post_attention_layernorm.weight"),
    "latent_down": (
        *stored_as(_ATTENTION + "q_a_proj.weight", _ATTENTION + "kv_a_proj_with_mqa.weight"),
        *stored_as(_ATTENTION + "q_proj.weight", _ATTENTION + "kv_a_proj_with_mqa.weight"),
    ),
    "query_down_bias": stored_as(_ATTENTION + "q_a_proj.bias"),
    "kv_down_bias": stored_as(_ATTENTION + "kv_a_proj_with_mqa.bias"),
    "query_latent_norm": stored_as(_ATTENTION + "q_a_layernorm.weight"),
    "kv_latent_norm": stored_as(_ATTENTION + "kv_a_layernorm.weight"),
    "query_up": stored_as(_ATTENTION + "q_b_proj.weight"),
    "kv_up": stored_as(_ATTENTION + "kv_b_proj.weight"),
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
    "shared_gate_up": stored_as(_MLP + "shared_experts.gate_proj.weight", _MLP + "shared_experts.up_proj.weight"),
    "shared_down": stored_as(_MLP + "shared_experts.down_proj.weight"),
}

FAMILY = Family(
    name="deepseek_v3",
    also=("kimi_k2",),
    architectures=("DeepseekV3ForCausalLM", "KimiK2ForCausalLM"),
    read_config=read_config,
    parts=LATENT_PARTS | {"gate_bias": stored_as(_MLP + "gate.e_score_correction_bias")},
)
