"""The model that runs on several hosts serve, made once."""

from __future__ import annotations

import pytest
from served_models import Served, make_served


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Served:
    return make_served(tmp_path_factory.mktemp("served"), seed=3)
