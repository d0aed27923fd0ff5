"""Level L2 for traffic agrees with the runtime that serves the same requests in virtual time."""

from __future__ import annotations

from pathlib import Path

import pytest
from planner.compare_traffic import errors, graph_of

from flowrt.bench.cases.small_model import write_small_model

US = 1e-6
COMPUTE = {
    "attention": {"fixed_seconds": 100 * US, "row_seconds": 3 * US},
    "experts": {"fixed_seconds": 200 * US, "row_seconds": 2 * US, "expert_seconds": 20 * US},
}


@pytest.mark.parametrize(
    ("groups", "servers", "micro_batches", "traffic"),
    [
        (1, 1, 1, "in=200,out=12,concurrency=6,requests=18"),
        (2, 2, 1, "in=200,out=12,rate=20,requests=20"),
        (2, 3, 1, "in=200,out=12,rate=100,requests=20"),
        (2, 2, 2, "in=200,out=12,rate=50,requests=20"),
        (2, 2, 1, "in=48,out=12,concurrency=16,requests=32"),
        (3, 2, 1, "in=200,out=12,rate=60,requests=24"),
    ],
)
def test_both_levels_agree_on_traffic(groups: int, servers: int, micro_batches: int, traffic: str, tmp_path: Path) -> None:
    """Every row goes to every expert, so that draws cannot differ."""
    model = write_small_model(tmp_path, num_layers=3, num_experts=6, top_k=6)
    found = errors(graph_of(model, groups, servers, micro_batches, {"compute": COMPUTE}), model, traffic)
    assert max(map(abs, found.values())) < 0.15, found
