"""Reading config.json: both spellings, every refusal in one line, families of other packages, and no torch."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from flowrt.operators.families import registry
from flowrt.operators.families.config_file import ConfigFile
from flowrt.operators.families.family import Family
from flowrt.operators.families.qwen3_moe import FAMILY
from flowrt.operators.families.registry import read_model_config
from flowrt.operators.model_config import GateConfig, ModelConfig, ModelError, RotaryConfig

OLD: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "torch_dtype": "bfloat16",
    "vocab_size": 512,
    "hidden_size": 64,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 128,
    "moe_intermediate_size": 48,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "decoder_sparse_step": 2,
    "mlp_only_layers": [3],
    "rms_norm_eps": 1e-5,
    "rope_theta": 1000000.0,
    "rope_scaling": None,
    "max_position_embeddings": 40960,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "eos_token_id": 7,
}


def write(directory: Path, changes: dict[str, Any] | None = None, generation: dict[str, Any] | None = None) -> Path:
    values = {key: value for key, value in (OLD | (changes or {})).items() if value != "absent"}
    (directory / "config.json").write_text(json.dumps(values))
    if generation is not None:
        (directory / "generation_config.json").write_text(json.dumps(generation))
    return directory


def test_an_older_config(tmp_path: Path) -> None:
    assert read_model_config(write(tmp_path)) == ModelConfig(
        family="qwen3_moe",
        dtype="bfloat16",
        vocab_size=512,
        hidden_size=64,
        num_layers=6,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        num_experts=8,
        num_experts_per_token=2,
        expert_width=48,
        dense_width=128,
        moe_layers=(1, 5),
        norm_epsilon=1e-5,
        gate=GateConfig(normalize=1.0),
        rotary=RotaryConfig(theta=1e6),
        max_position_embeddings=40960,
        qk_norm=True,
        eos_token_ids=(7,),
    )


def test_a_newer_config_means_the_same(tmp_path: Path) -> None:
    old = read_model_config(write(tmp_path))
    newer = {
        "torch_dtype": "absent",
        "dtype": "bfloat16",
        "num_experts": "absent",
        "num_local_experts": 8,
        "rope_theta": "absent",
        "rope_scaling": "absent",
        "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"},
        "sliding_window": None,
    }
    assert read_model_config(write(tmp_path, newer)) == old


def test_what_save_pretrained_writes(models: Any) -> None:
    config = read_model_config(models["mixed"])
    assert (config.moe_layers, config.dense_layers) == ((1,), (0, 2, 3))
    assert config.tie_word_embeddings
    assert config.attention_bias
    assert (config.bos_token_id, config.eos_token_ids, config.dtype, config.rotary.theta) == (1, (2,), "float32", 10000.0)


@pytest.mark.parametrize(
    ("generation", "ids"),
    [(None, (7,)), ({}, (7,)), ({"eos_token_id": [5, 6]}, (5, 6, 7)), ({"eos_token_id": 9}, (9, 7))],
)
def test_end_of_sequence_ids(tmp_path: Path, generation: dict[str, Any] | None, ids: tuple[int, ...]) -> None:
    assert read_model_config(write(tmp_path, generation=generation)).eos_token_ids == ids
    (tmp_path / "generation_config.json").unlink(missing_ok=True)
    assert read_model_config(write(tmp_path, {"eos_token_id": None})).eos_token_ids == ()


def test_changed_files_are_read_again(tmp_path: Path) -> None:
    before = read_model_config(write(tmp_path, generation={"eos_token_id": 7}))
    after = read_model_config(write(tmp_path, {"hidden_size": 32}, generation={"eos_token_id": 8}))
    assert [(each.hidden_size, each.eos_token_ids) for each in (before, after)] == [(64, (7,)), (32, (8, 7))]


def test_dtype_can_be_chosen(tmp_path: Path) -> None:
    assert read_model_config(write(tmp_path), "float64").dtype == "float64"
    with pytest.raises(ModelError, match="dtype 'int8' is not supported; use one of float32"):
        read_model_config(tmp_path, "int8")


OURS = "dbrx, deepseek_v2, deepseek_v3, kimi_k2, mixtral, qwen3_moe, qwen3_next"

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"model_type": "gpt2"}, "'gpt2' does not run through transformers here: no layer calls experts"),
    ({"model_type": "new"}, f"model family 'new' is not known; known are: {OURS}, and the architectures of transformers"),
    ({"model_type": "absent"}, f"model_type: is None; one of these is needed: {OURS}"),
    ({"hidden_size": "absent"}, "hidden_size: is missing; a whole number is needed"),
    ({"num_experts": "absent"}, "num_experts or num_local_experts: is missing"),
    ({"num_hidden_layers": True}, "num_hidden_layers: is True; a whole number"),
    ({"num_hidden_layers": 0}, "num_hidden_layers: is 0; at least 1"),
    ({"rms_norm_eps": "small"}, "rms_norm_eps: is 'small'; a positive number"),
    ({"rope_theta": -1}, "rope_theta: is -1; a positive number"),
    ({"norm_topk_prob": 1}, "norm_topk_prob: is 1; true or false"),
    ({"mlp_only_layers": 3}, "mlp_only_layers: is 3; a list of whole numbers"),
    ({"num_key_value_heads": 3}, "num_key_value_heads: is 3; it must divide num_attention_heads, 4"),
    ({"head_dim": 15}, "head_dim: is 15; rotary positions need an even number"),
    ({"num_experts_per_tok": 9}, "num_experts_per_tok: is 9; there are only 8 experts"),
    ({"mlp_only_layers": [0, 1, 2, 3, 4, 5]}, "leave no layer with experts"),
    ({"hidden_act": "gelu"}, "hidden_act: is 'gelu'; only 'silu' is supported"),
    ({"use_sliding_window": None}, "use_sliding_window: is null; true or false is needed, or no such key"),
    ({"quantization_config": {"bits": 8}}, "the weights are quantized (quant_method 'None'), which flowrt does not load"),
    ({"rope_scaling": {"rope_type": "dynamic", "factor": 4}}, "rope_scaling: rope_type 'dynamic' turns keys by the length of the context"),
    ({"rope_scaling": {"type": "yarn", "factor": 4, "mscale": "a", "mscale_all_dim": 1}}, "mscale: is 'a'; a positive number is needed"),
    (
        {"rope_scaling": {"type": "yarn", "factor": 4, "mscale": 1, "mscale_all_dim": [1]}},
        "mscale_all_dim: is [1]; a positive number is needed",
    ),
    ({"rope_scaling": {"type": "longrope"}}, "keys in pages are turned once; use one of default, linear, yarn, llama3"),
    ({"rope_parameters": {"rope_type": "spiral"}}, "rope_parameters: rope_type 'spiral' is not supported; use one of default"),
    ({"rope_scaling": {"type": "linear"}}, "factor: is missing; a positive number"),
    ({"rope_scaling": {"type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 1}}, "low_freq_factor: is 4.0; it must be"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor: is 0.5"),
    ({"torch_dtype": "int8"}, "torch_dtype: is 'int8'; use one of float32"),
    ({"eos_token_id": "</s>"}, "eos_token_id: is '</s>'; a whole number"),
    ({"num_hidden_layers": 10_000_000}, "num_hidden_layers: is 10000000; at most 1000 is supported"),
    ({"num_experts": 100_000_000}, "num_experts: is 100000000; at most 65536 is supported"),
    ({"hidden_size": 10**30}, f"hidden_size: is {10**30}; at most {1 << 20} is supported"),
    ({"vocab_size": 1 << 40}, f"vocab_size: is {1 << 40}; at most {1 << 24} is supported"),
    ({"num_attention_heads": 1 << 20}, f"num_attention_heads: is {1 << 20}; at most 4096 is supported"),
    ({"max_position_embeddings": 10**1000}, f"max_position_embeddings: is {10**56}...; at most {(1 << 31) - 1} is supported"),
    ({"rope_theta": 10**1000}, f"rope_theta: is {10**56}...; a positive number is needed"),
]


@pytest.mark.parametrize(("changes", "sentence"), REFUSED, ids=[next(iter(changes)) + str(i) for i, (changes, _) in enumerate(REFUSED)])
def test_refusals_are_one_short_line_with_path_and_key(tmp_path: Path, changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ModelError) as error:
        read_model_config(write(tmp_path, changes))
    message = str(error.value)
    assert sentence in message
    assert message.startswith(str(tmp_path / "config.json"))
    assert "\n" not in message
    assert len(message) < len(str(tmp_path)) + (150 if "at most" in sentence else 190)


def test_directories_that_hold_no_model(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"model directory .*absent does not exist"):
        read_model_config(tmp_path / "absent")
    with pytest.raises(ModelError, match=r"config\.json does not exist; a Hugging Face model directory has one"):
        read_model_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config\.json is not valid JSON"):
        read_model_config(tmp_path)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(ModelError, match=r"config\.json holds a list"):
        read_model_config(tmp_path)


def read_other(file: ConfigFile) -> ModelConfig:
    config = FAMILY.read_config(file)
    return config.with_dtype("float64")


OTHER = Family(name="other_moe", read_config=read_other, parts=FAMILY.parts)


def test_a_family_of_another_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    points = {
        "other_moe": EntryPoint("other_moe", f"{__name__}:OTHER", registry.ENTRY_POINT_GROUP),
        "broken_moe": EntryPoint("broken_moe", "no_such_module:FAMILY", registry.ENTRY_POINT_GROUP),
        "wrong_moe": EntryPoint("wrong_moe", "json:dumps", registry.ENTRY_POINT_GROUP),
    }
    monkeypatch.setitem(sys.modules, __name__, sys.modules[test_a_family_of_another_package.__module__])
    monkeypatch.setattr(registry, "_offered", lambda: points)
    assert registry.known_families() == tuple(sorted((*OURS.split(", "), "broken_moe", "other_moe", "wrong_moe")))
    assert read_model_config(write(tmp_path, {"model_type": "other_moe"})).dtype == "float64"
    with pytest.raises(ModelError, match="'no_such_module:FAMILY' cannot be loaded"):
        registry.family_named("broken_moe")
    with pytest.raises(ModelError, match="must be a Family with that name"):
        registry.family_named("wrong_moe")


def test_the_parent_process_needs_no_torch(tmp_path: Path) -> None:
    program = (
        "import sys, pathlib, flowrt.operators.families.registry; from flowrt.operators.families.registry import read_model_config\n"
        f"read_model_config(pathlib.Path({str(write(tmp_path))!r}))\n"
        "assert not {'torch', 'numpy', 'safetensors'} & sys.modules.keys(), sorted(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=Path(__file__).parents[2])
