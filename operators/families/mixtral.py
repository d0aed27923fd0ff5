"""Mixtral (8x7B, 8x22B): config keys and weight names.

Grouped-query attention, perhaps with a sliding window, softmax gate over experts in every layer. Free of torch.
"""

from __future__ import annotations

from flowrt.operators.families.config_file import ConfigFile
from flowrt.operators.families.family import About, Family, stored_as
from flowrt.operators.families.standard import LAYER, STANDARD_PARTS, expert_parts, read_grouped_model
from flowrt.operators.model_config import GateConfig, ModelConfig


def read_config(file: ConfigFile) -> ModelConfig:
    """config.json of a Mixtral model as a ModelConfig; absent keys have the defaults that transformers gives them."""
    return read_grouped_model(
        file,
        "mixtral",
        num_experts=file.integer("num_local_experts", "num_experts", default=8),
        num_experts_per_token=file.integer("num_experts_per_tok", default=2),
        default_kv_heads=8,
        default_positions=131072,
        default_theta=1e6,
        expert_width=file.integer("intermediate_size"),
        dense_width=0,
        moe_layers=tuple(range(file.integer("num_hidden_layers"))),
        norm_epsilon=file.number("rms_norm_eps", default=1e-5),
        gate=GateConfig(normalize=1.0),
        sliding_window=file.integer("sliding_window") if file.has("sliding_window") else None,
    )


_MOE = LAYER + "block_sparse_moe."

FAMILY = Family(
    name="mixtral",
    architectures=("MixtralForCausalLM",),
    read_config=read_config,
    parts=STANDARD_PARTS
    | {"gate": (*stored_as(_MOE + "gate.weight"), *STANDARD_PARTS["gate"])}
    | expert_parts(_MOE + "experts.{expert}.", "w1", "w3", "w2"),
    about=About(
        models="Mixtral 8x7B, 8x22B",
        attention="grouped; sliding window",
        gate="softmax",
        experts="all layers",
    ),
)
