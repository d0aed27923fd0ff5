"""The models that end-to-end tests serve, made once."""

from __future__ import annotations

import pytest
from served_models import Served, make_served


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Served:
    """Three MoE layers of eight experts, top-2."""
    return make_served(tmp_path_factory.mktemp("served"), seed=3)


@pytest.fixture(scope="session")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Served:
    """Dense layers among MoE layers, the last one dense; tied embeddings; top-4 of 12."""
    options = {"seed": 4, "layers": 4, "sparse_step": 2, "mlp_only_layers": [3], "tied": True, "experts": 12, "top_k": 4}
    return make_served(tmp_path_factory.mktemp("mixed"), **options)
