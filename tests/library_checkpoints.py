"""Tiny random checkpoints of the architectures of the installed transformers that call experts through its interface.

`python -c "from library_checkpoints import write; write('gpt_oss', Path('m'))"`, or the test that lists all architectures.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, GenerationConfig, PreTrainedConfig

from flowrt.operators.library_config import model_class
from flowrt.operators.library_interfaces import library_alone

BOS, EOS, VOCABULARY = 1, 2, 128
# Keys that configs have, with small values. A config takes those that it has; several names mean one thing.
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 8),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k"), 2),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts", "moe_num_shared_experts", "n_group", "topk_group"), 1),
    **dict.fromkeys(("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index"), 1),
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "shared_intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "max_position_embeddings": 512,
    "sliding_window": 5,
    "index_topk": 5,  # fewer than the tokens of prompts
    "index_head_dim": 16,
    "index_n_heads": 16,  # a token that no head likes has a score of 0, and the choice among such ones is arbitrary
    "pad_token_id": 0,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
}

DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16}
LINEAR, FULL = "linear_attention", "full_attention"
SPECIAL: dict[str, dict[str, Any]] = {  # what only some architectures have
    "bailing_hybrid": {"layer_types": [LINEAR, FULL, LINEAR, FULL], "linear_num_heads": 4, "linear_head_dim": 16},
    "glm_moe_dsa": {"indexer_types": ["full", "shared", "full", "shared"]},
    "granitemoehybrid": {
        "layer_types": [LINEAR, FULL, LINEAR, FULL],
        "mamba_n_heads": 8,
        "mamba_d_head": 16,
        "mamba_d_state": 16,
        "mamba_chunk_size": 8,
    },
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_dt_rank": 4, "use_mamba_kernels": False},
    "kimi_linear": {"layer_types": [LINEAR, FULL, LINEAR, FULL], "linear_num_heads": 4, "linear_head_dim": 16},
    "lfm2_moe": {"layer_types": ["conv", FULL, "conv", FULL]},
    "llama4": {  # prompts are longer than a chunk, and than the positions that have one attention temperature
        "attention_chunk_size": 6,
        "floor_scale": 3,
        "attn_scale": 0.5,
        "intermediate_size_mlp": 48,
        "interleave_moe_layer_step": 2,
    },
    "nemotron_h": {
        "layers_block_type": [LINEAR, "moe", FULL, "moe"],
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "ssm_state_size": 16,
        "n_groups": 2,
        "moe_shared_expert_intermediate_size": 32,
        "use_mamba_kernels": False,
    },
    "qwen3_5_moe": DELTA,
    "qwen3_next": DELTA,
}


def default_config(architecture: str) -> PreTrainedConfig:
    """Of its language model, where it has others, too."""
    names = [name for name in (f"{architecture}_text", architecture) if name in transformers.CONFIG_MAPPING]
    return AutoConfig.for_model(names[0])


def small_config(architecture: str, **sizes: int) -> PreTrainedConfig:
    """Raises what the library raises for sizes that do not go together."""
    base = default_config(architecture)
    keys: dict[str, Any] = {key: value for key, value in (SIZES | sizes).items() if hasattr(base, key)}
    if "kv_lora_rank" in keys:  # of latent attention, where each head has a key
        keys["num_key_value_heads"] = keys["num_attention_heads"]
        del keys["head_dim"]
    if special := SPECIAL.get(architecture):
        keys = {key: value for key, value in keys.items() if key != "num_hidden_layers" or "layers_block_type" not in special}
        return type(base)(**keys | special)
    try:
        return type(base)(**keys, **({"layer_types": None} if hasattr(base, "layer_types") else {}))
    except (AttributeError, TypeError, ValueError):
        return type(base)(**keys)


def write(architecture: str, directory: Path, seed: int = 0, **sizes: int) -> Path:
    """Weights are scaled so that greedy decoding wanders over the vocabulary."""
    with library_alone():
        config = small_config(architecture, **sizes)
        assert {name: getattr(config, name) for name in sizes} == sizes, "of two names of one size, the other one won"
        torch.manual_seed(seed)
        model = model_class(config)._from_config(config, attn_implementation="eager", dtype=torch.float32)
        with torch.no_grad():
            for name, tensor in model.named_parameters():
                if tensor.dim() >= 2:
                    tensor.normal_(0.0, tensor.shape[-1] ** -0.5)
                if "embed" in name:
                    tensor.mul_(4.0)
        model.generation_config = GenerationConfig(bos_token_id=BOS, eos_token_id=EOS)
        model.save_pretrained(directory)
    return directory


def load_truth(directory: Path) -> Any:
    """The library's own module, with its own attention and experts."""
    with library_alone():
        config = AutoConfig.from_pretrained(directory)
        truth = model_class(config).from_pretrained(
            directory, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
        )
    return truth.eval()


def greedy(truth: Any, prompt: list[int], num_tokens: int) -> list[int]:
    tokens = list(prompt)
    with torch.inference_mode():
        for _ in range(num_tokens):
            tokens.append(int(truth(input_ids=torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]
