"""How the model families read config.json, and how another package adds a family."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import load_truth, make_checkpoint, random_prompts, truth_logits
from fast_model import FastModel

from flowrt.operators.families.family import PARTS
from flowrt.operators.families.registry import BUILT_IN, family_named, read_model_config
from flowrt.operators.model_config import GateConfig, LatentConfig, ModelConfig, ModelError, RotaryConfig
from flowrt.operators.rotary import inverse_frequencies

SIZES: dict[str, Any] = {"vocab_size": 512, "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}
MIXTRAL = SIZES | {"model_type": "mixtral", "intermediate_size": 48, "torch_dtype": "bfloat16"}
V3 = SIZES | {
    "model_type": "deepseek_v3",
    "intermediate_size": 128,
    "moe_intermediate_size": 48,
    "n_routed_experts": 16,
    "n_group": 4,
    "topk_group": 2,
    "rope_theta": 50000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
    },
}
V2 = SIZES | {"model_type": "deepseek_v2", "moe_intermediate_size": 48, "num_experts_per_tok": 6, "intermediate_size": 100}
DBRX: dict[str, Any] = {
    "model_type": "dbrx",
    "vocab_size": 512,
    "d_model": 64,
    "n_heads": 4,
    "n_layers": 4,
    "max_seq_len": 32768,
    "attn_config": {"clip_qkv": 8, "kv_n_heads": 2, "rope_theta": 500000},
    "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 16, "moe_top_k": 4},
}


def read(directory: Path, values: dict[str, Any], **changes: Any) -> ModelConfig:
    kept = {key: value for key, value in (values | changes).items() if value != "absent"}
    (directory / "config.json").write_text(json.dumps(kept))
    return read_model_config(directory)


def test_mixtral(tmp_path: Path) -> None:
    config = read(tmp_path, MIXTRAL, num_attention_heads=16)
    assert (config.num_experts, config.num_experts_per_token, config.num_kv_heads, config.head_dim) == (8, 2, 8, 4)
    assert config.gate == GateConfig(normalize=1.0)
    assert config.rotary == RotaryConfig(theta=1e6)
    assert config.sliding_window is None
    assert read(tmp_path, MIXTRAL, num_attention_heads=16, sliding_window=4096).sliding_window == 4096


def test_deepseek_v3_as_its_authors_write_it(tmp_path: Path) -> None:
    config = read(tmp_path, V3, num_attention_heads=128, max_position_embeddings=163840)
    assert config.gate == GateConfig(
        scores="sigmoid", bias=True, groups=4, topk_groups=2, group_best=2, normalize=1.0, scale=2.5, wide=True
    )
    assert (config.dense_layers, config.moe_layers, config.dense_width, config.shared_expert_width) == ((0, 1, 2), (3,), 128, 48)
    mscale = 1.3688879454113936  # 0.1 ln 40 + 1
    assert config.latent == LatentConfig(
        query_rank=1536, rank=512, nope_width=128, rope_width=64, value_width=128, scale=pytest.approx(192**-0.5 * mscale**2)
    )
    assert config.rotary == RotaryConfig(theta=50000.0, kind="yarn", factor=40.0, original_positions=4096, interleaved=True)
    assert config.kv_width == 576
    assert read(tmp_path, V3, q_lora_rank=None).latent != config.latent


def test_kimi_k2_and_families_found_by_architecture(tmp_path: Path) -> None:
    config = read(tmp_path, V3)
    assert read(tmp_path, V3, model_type="kimi_k2") == config
    assert read(tmp_path, V3, model_type="finetuned", architectures=["DeepseekV3ForCausalLM"]) == config
    assert read(tmp_path, V3, model_type="absent", architectures=["DeepseekV3ForCausalLM"]) == config
    with pytest.raises(ModelError, match="model family 'finetuned' is not known; known are: dbrx, deepseek_v2, deepseek_v3, kimi_k2, mix"):
        read(tmp_path, V3, model_type="finetuned", architectures=["FineForCausalLM", 3])


def test_deepseek_v2(tmp_path: Path) -> None:
    config = read(tmp_path, V2, n_group=8, topk_group=3)
    assert config.gate == GateConfig(wide=True)
    assert (config.moe_layers, config.dense_width, config.shared_expert_width) == ((0, 1, 2, 3), 0, 96)
    limited = read(tmp_path, V2, n_group=8, topk_group=3, topk_method="group_limited_greedy", routed_scaling_factor=16.0)
    assert limited.gate == GateConfig(groups=8, topk_groups=3, scale=16.0, wide=True)
    assert config.rotary.interleaved


def test_dbrx_takes_theta_from_where_it_stands(tmp_path: Path) -> None:
    config = read(tmp_path, DBRX)
    assert (config.rotary.theta, config.clip_qkv, config.norm, config.max_position_embeddings) == (500000.0, 8.0, "layer", 32768)
    assert config.gate.normalize == 1.0
    assert read(tmp_path, DBRX, rope_parameters={"rope_theta": 10000.0, "rope_type": "default"}).rotary.theta == 10000.0
    never = DBRX["ffn_config"] | {"moe_normalize_expert_weights": None}
    assert read(tmp_path, DBRX, ffn_config=never).gate.normalize is None


REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (MIXTRAL, {"num_key_value_heads": 3}, "num_key_value_heads: is 3; it must divide num_attention_heads, 4"),
    (MIXTRAL, {"num_experts_per_tok": 9}, "num_experts_per_tok: is 9; there are only 8 experts"),
    (MIXTRAL, {"sliding_window": 0}, "sliding_window: is 0; at least 1"),
    (MIXTRAL, {"hidden_act": "gelu"}, "hidden_act: is 'gelu'; only 'silu'"),
    (
        V3,
        {"quantization_config": {"quant_method": "awq"}},
        "the weights are AWQ, which flowrt does not load; give the folder of the model in bfloat16",
    ),
    (V3, {"scoring_func": "softmax"}, "scoring_func: is 'softmax'; only 'sigmoid'"),
    (V3, {"topk_method": "greedy"}, "topk_method: is 'greedy'; only 'noaux_tc'"),
    (V3, {"n_group": 3}, "n_group: is 3; it must cut 16 experts into equal groups of at least 2"),
    (V3, {"n_group": 16}, "n_group: is 16; it must cut 16 experts into equal groups of at least 2"),
    (V3, {"topk_group": 5}, "topk_group: is 5; there are only 4 groups"),
    (V3, {"num_experts_per_tok": 9}, "num_experts_per_tok: is 9; only 8 experts may be chosen from"),
    (V3, {"first_k_dense_replace": 4}, "first_k_dense_replace: is 4 of 4 layers; at least one needs experts"),
    (V3, {"moe_layer_freq": 2}, "moe_layer_freq: is 2; only 1"),
    (V3, {"qk_rope_head_dim": 7}, "qk_rope_head_dim: is 7; rotary positions need an even number"),
    (V3, {"moe_intermediate_size": "absent"}, "moe_intermediate_size: is missing"),
    (V2, {"topk_method": "noaux_tc"}, "topk_method: is 'noaux_tc'; use one of greedy, group_limited_greedy"),
    (V2, {"topk_method": "group_limited_greedy"}, "n_group, topk_group: are missing; group_limited_greedy needs both"),
    (V2, {"mlp_bias": True}, "mlp_bias: is True; only False"),
    (DBRX, {"tie_word_embeddings": True}, "tie_word_embeddings: is True; only False"),
    (DBRX, {"ffn_config": {"ffn_act_fn": {"name": "gelu"}}}, "ffn_config.ffn_act_fn: is 'gelu'; only 'silu'"),
    (DBRX, {"attn_config": {"kv_n_heads": 3}}, "attn_config.kv_n_heads: is 3; it must divide n_heads, 4"),
    (DBRX, {"n_heads": 5}, "n_heads: is 5; it must"),
]


@pytest.mark.parametrize(
    ("values", "changes", "sentence"), REFUSED, ids=[f"{v['model_type']} {next(iter(c))} {i}" for i, (v, c, _) in enumerate(REFUSED)]
)
def test_refusals(tmp_path: Path, values: dict[str, Any], changes: dict[str, Any], sentence: str) -> None:
    if "n_heads" in changes:
        values = values | {"attn_config": {"kv_n_heads": 1}}
    with pytest.raises(ModelError) as error:
        read(tmp_path, {"num_key_value_heads": 4, **values}, **changes)
    assert sentence in str(error.value)
    assert str(error.value).startswith(str(tmp_path / "config.json"))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", BUILT_IN)
def test_every_part_of_a_family_is_a_known_part(name: str) -> None:
    parts = family_named(name).parts
    assert set(parts) <= set(PARTS)
    assert all(layout for layouts in parts.values() for layout in layouts)


ROPES: list[dict[str, Any]] = [
    {"rope_type": "linear", "factor": 3.0},
    {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096, "mscale": 1.0, "mscale_all_dim": 0.707},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512, "beta_fast": 20, "beta_slow": 2, "truncate": False},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512, "attention_factor": 1.5},
    {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 8},
    {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "beta_fast": 1.0, "beta_slow": 1.0},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192},
]


@pytest.mark.parametrize("rope", ROPES, ids=[f"{rope['rope_type']} {index}" for index, rope in enumerate(ROPES)])
def test_scaled_frequencies_are_those_of_transformers(tmp_path: Path, rope: dict[str, Any]) -> None:
    from transformers import MixtralConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = rope | {"rope_theta": 10000.0}
    theirs = MixtralConfig(hidden_size=512, num_attention_heads=4, head_dim=128, max_position_embeddings=16384, rope_parameters=dict(rope))
    frequencies, factor = ROPE_INIT_FUNCTIONS[rope["rope_type"]](theirs, "cpu")
    ours = read(tmp_path, MIXTRAL, max_position_embeddings=16384, rope_parameters=rope, num_key_value_heads=4).rotary
    torch.testing.assert_close(inverse_frequencies(128, ours), frequencies, rtol=1e-6, atol=0)
    assert ours.attention_factor == pytest.approx(factor)


@pytest.mark.parametrize("architecture", ["mixtral", "deepseek_v3", "deepseek_v2", "dbrx"])
def test_a_sharded_bfloat16_checkpoint_read_in_float32(tmp_path: Path, architecture: str) -> None:
    make_checkpoint(tmp_path, architecture=architecture, seed=8, layers=2, dtype="bfloat16", shard_bytes=100_000)
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert read_model_config(tmp_path).dtype == "bfloat16"
    ids = random_prompts([30], seed=1)[0]
    fast = FastModel(tmp_path, "float32")
    logits = fast.step([ids], [30], [fast.new_sequence(30)])
    torch.testing.assert_close(logits, truth_logits(load_truth(tmp_path), ids), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("architecture", ["mixtral", "deepseek_v3", "deepseek_v2"])
def test_tied_embeddings(tmp_path: Path, architecture: str) -> None:
    make_checkpoint(tmp_path, architecture=architecture, seed=9, layers=2, tied=True)
    ids = random_prompts([30], seed=1)[0]
    fast = FastModel(tmp_path)
    logits = fast.step([ids], [30], [fast.new_sequence(30)])
    torch.testing.assert_close(logits, truth_logits(load_truth(tmp_path), ids), rtol=1e-4, atol=1e-4)


PACKAGE = """
from dataclasses import replace
from flowrt.operators.families.family import Family
from flowrt.operators.families.mixtral import FAMILY as MIXTRAL, read_config

def read(file):
    return replace(read_config(file), family="my_moe")

FAMILY = Family(name="my_moe", read_config=read, parts=MIXTRAL.parts)
"""
PROGRAM = """
import sys
from pathlib import Path
from flowrt.operators.families.registry import known_families
from flowrt.operators.families.registry import read_model_config
config = read_model_config(Path(sys.argv[1]))
assert config.family == "my_moe" and "my_moe" in known_families(), config
assert "torch" not in sys.modules
import torch
from reference_model import ReferenceModel
torch.save(ReferenceModel(Path(sys.argv[1])).extend([5, 6, 7]), sys.argv[2])
"""


def test_a_family_of_an_installed_package(tmp_path: Path) -> None:
    """As docs/extend.md has it: a module and an entry point, found by whoever reads a model of that type."""
    model = make_checkpoint(tmp_path / "model", architecture="mixtral", seed=1, layers=1)
    expected = truth_logits(load_truth(model), [5, 6, 7])
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"model_type": "my_moe", "architectures": ["MyMoeForCausalLM"]}))
    site = tmp_path / "site"
    (site / "my_package-1.0.dist-info").mkdir(parents=True)
    (site / "my_package-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: my-package\nVersion: 1.0\n")
    (site / "my_package-1.0.dist-info" / "entry_points.txt").write_text("[flowrt.models]\nmy_moe = my_package:FAMILY\n")
    (site / "my_package.py").write_text(PACKAGE)
    root = Path(__file__).parents[2]
    subprocess.run(
        [sys.executable, "-c", PROGRAM, str(model), str(tmp_path / "logits.pt")],
        check=True,
        cwd=root,
        env={"PYTHONPATH": f"{root}:{root / 'tests'}:{site}", "OMP_NUM_THREADS": "1"},
    )
    torch.testing.assert_close(torch.load(tmp_path / "logits.pt"), expected, rtol=1e-4, atol=1e-4)
