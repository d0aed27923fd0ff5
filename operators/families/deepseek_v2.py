"""DeepSeek-V2 and V2-Lite: config keys; weight names are those of deepseek_v3.py.

Latent attention, softmax gate over all experts or over the best groups, shared experts, dense layers first. The weights of chosen
experts are scaled and never normalized, as in transformers: `norm_topk_prob` is ignored. Free of torch.
"""

from __future__ import annotations

from flowrt.operators.families.config_file import ConfigFile
from flowrt.operators.families.deepseek_v3 import LATENT_PARTS, read_latent_model
from flowrt.operators.families.family import About, Family
from flowrt.operators.model_config import GateConfig, ModelConfig

METHODS = ("greedy", "group_limited_greedy")


def read_config(file: ConfigFile) -> ModelConfig:
    """config.json of a DeepSeek-V2 model as a ModelConfig; absent keys have the defaults that transformers gives them."""
    file.must_be("scoring_func", "softmax", default="softmax")
    file.must_be("mlp_bias", False, default=False)
    method = file.values.get("topk_method", "greedy")
    if method not in METHODS:
        raise file.error("topk_method", f"is {method!r}; use one of {', '.join(METHODS)}")
    if method == "greedy":  # such models name groups but do not use them
        file = ConfigFile(file.path, {key: value for key, value in file.values.items() if key not in ("n_group", "topk_group")})
    elif not (file.has("n_group") and file.has("topk_group")):
        raise file.error("n_group, topk_group", "are missing; group_limited_greedy needs both")
    gate = GateConfig(scale=file.number("routed_scaling_factor", default=1.0), wide=True)
    return read_latent_model(file, "deepseek_v2", gate, routed=64, per_token=6, shared=2, dense_layers=0, interleaved=True)


FAMILY = Family(
    name="deepseek_v2",
    architectures=("DeepseekV2ForCausalLM",),
    read_config=read_config,
    parts=LATENT_PARTS,
    about=About(
        models="DeepSeek-V2, V2-Lite",
        attention="latent",
        gate="softmax; all experts or the best groups",
        experts="shared ones; dense layers first",
    ),
)
