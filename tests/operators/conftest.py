"""Checkpoints, and the truth about them, that several tests of the operators share."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from checkpoints import load_truth, make_checkpoint

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
}


@dataclass
class Models:
    """Makes each checkpoint of CHECKPOINTS, and loads its truth, when first asked for."""

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
