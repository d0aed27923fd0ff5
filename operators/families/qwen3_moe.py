"""Qwen3-MoE (Qwen3-30B-A3B, Qwen3-235B-A22B, Qwen3-Coder): config keys and weight names.

Grouped-query attention with a norm on each query and key head, softmax gate, top-k experts without shared ones; some layers may
hold a dense MLP instead (`mlp_only_layers`, `decoder_sparse_step`). Free of torch.
"""

from __future__ import annotations

from flowrt.operators.families.config_file import ConfigFile
from flowrt.operators.families.family import About, Family
from flowrt.operators.families.standard import STANDARD_PARTS, read_grouped_model
from flowrt.operators.model_config import GateConfig, ModelConfig

DEFAULT_WINDOW = 4096  # where `use_sliding_window` is true, and there is no width


def read_config(file: ConfigFile) -> ModelConfig:
    """config.json of a Qwen3-MoE model as a ModelConfig; absent keys have the defaults that transformers gives them."""
    has_window = file.flag("use_sliding_window", default=False) and file.values.get("sliding_window", DEFAULT_WINDOW) is not None
    num_layers = file.integer("num_hidden_layers")
    moe_layers = moe_layers_of(file, num_layers)
    return read_grouped_model(
        file,
        "qwen3_moe",
        num_experts=file.integer("num_experts", "num_local_experts"),
        num_experts_per_token=file.integer("num_experts_per_tok"),
        default_kv_heads=4,
        default_positions=32768,
        expert_width=file.integer("moe_intermediate_size"),
        dense_width=file.integer("intermediate_size") if len(moe_layers) < num_layers else 0,
        moe_layers=moe_layers,
        gate=GateConfig(normalize=1.0 if file.flag("norm_topk_prob", default=False) else None),
        qk_norm=True,
        attention_bias=file.flag("attention_bias", default=False),
        sliding_window=file.integer("sliding_window", default=DEFAULT_WINDOW) if has_window else None,
    )


def moe_layers_of(file: ConfigFile, num_layers: int) -> tuple[int, ...]:
    """The layers with experts. Raises ModelError when there are none."""
    mlp_only = frozenset(file.integers("mlp_only_layers"))
    sparse_step = file.integer("decoder_sparse_step", default=1)
    moe_layers = tuple(layer for layer in range(num_layers) if layer not in mlp_only and (layer + 1) % sparse_step == 0)
    if not moe_layers:
        raise file.error("mlp_only_layers, decoder_sparse_step", "leave no layer with experts; at least one is needed")
    return moe_layers


FAMILY = Family(
    name="qwen3_moe",
    architectures=("Qwen3MoeForCausalLM",),
    read_config=read_config,
    parts=STANDARD_PARTS,
    about=About(
        models="Qwen3-30B-A3B, Qwen3-235B-A22B, Qwen3-Coder",
        attention="grouped, normed heads",
        gate="softmax",
        experts="some layers may be dense",
    ),
)
