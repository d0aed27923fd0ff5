"""Fixtures shared by the operator tests: checkpoints and their expected outputs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import load_truth, make_checkpoint

YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "mscale": 1.0,
    "mscale_all_dim": 0.8,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

CHECKPOINTS: dict[str, dict[str, Any]] = {
    "plain": {"seed": 3},
    "mixed": {"seed": 4, "layers": 4, "sparse_step": 2, "mlp_only_layers": [3], "tied": True, "attention_bias": True},
    "wide": {
        "seed": 7,
        "experts": 12,
        "top_k": 4,
        "heads": 6,
        "kv_heads": 1,
        "head_dim": 32,
        "normalize_topk": False,
        "shard_bytes": 200_000,
    },
    "qwen3_next": {"architecture": "qwen3_next", "seed": 3, "layers": 5},
    "mixtral": {"architecture": "mixtral", "seed": 3, "shard_bytes": 200_000},
    "mixtral window": {"architecture": "mixtral", "seed": 4, "layers": 2, "config": {"sliding_window": 24}},
    "mixtral llama3": {"architecture": "mixtral", "seed": 5, "config": {"rope_parameters": LLAMA3}},
    "deepseek_v3": {"architecture": "deepseek_v3", "seed": 3, "shard_bytes": 200_000},
    "deepseek_v3 yarn": {"architecture": "deepseek_v3", "seed": 4, "attention_bias": True, "config": {"rope_parameters": YARN}},
    "deepseek_v3 other": {
        "architecture": "deepseek_v3",
        "seed": 5,
        "attention_bias": True,
        "top_k": 3,
        "config": {
            "q_lora_rank": None,
            "rope_interleave": False,
            "norm_topk_prob": False,
            "first_k_dense_replace": 0,
            "n_shared_experts": 2,
            "n_group": 1,
            "topk_group": 1,
            "rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 5000.0},
        },
    },
    "deepseek_v2": {"architecture": "deepseek_v2", "seed": 3},
    "deepseek_v2 limited": {
        "architecture": "deepseek_v2",
        "seed": 4,
        "config": {"topk_method": "group_limited_greedy", "rope_parameters": YARN, "q_lora_rank": None, "first_k_dense_replace": 2},
    },
    "dbrx": {"architecture": "dbrx", "seed": 3},
    "dbrx unequal": {
        "architecture": "dbrx",
        "seed": 6,
        "kv_heads": 1,
        "top_k": 4,
        "config": {
            "ffn_config": {"ffn_hidden_size": 40, "moe_num_experts": 8, "moe_top_k": 4, "moe_normalize_expert_weights": 2.0},
            "attn_config": {"kv_n_heads": 1, "rope_theta": 10000.0, "clip_qkv": 0.5},
        },
    },
}


@dataclass
class Models:
    """Makes each checkpoint of CHECKPOINTS, and loads its expected outputs, at first use."""

    root: Path
    _truths: dict[tuple[str, str], Any] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Path:
        directory = self.root / name
        if not directory.exists():
            make_checkpoint(directory, **CHECKPOINTS[name])
        return directory

    def truth(self, name: str, dtype: str = "float32") -> Any:
        """The checkpoint as a transformers model."""
        if (name, dtype) not in self._truths:
            self._truths[name, dtype] = load_truth(self[name], dtype)
        return self._truths[name, dtype]


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("models"))


@pytest.fixture(params=[1, 2, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)
