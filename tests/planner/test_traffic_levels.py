"""Level L2 for traffic agrees with the runtime that serves the same requests in virtual time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flowrt.api import read_graph
from flowrt.bench.cases.small_model import write_small_model
from flowrt.bench.measure.modelled_traffic import simulated_traffic
from flowrt.operators.families.registry import read_model_config
from flowrt.planner.deployment import deployment_of
from flowrt.planner.requests import traffic_times
from flowrt.planner.traffic import parse_traffic

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
    keys: dict[str, Any] = {
        "flowrt": 1,
        "model": {"path": str(model)},
        "deploy": {
            "attention": {"groups": groups, "micro_batches": micro_batches},
            "experts": {"servers": servers},
            "links": {"attention-experts": {"link": "roce-400g"}},
        },
        "emulate": {"dilation": 1, "compute": COMPUTE},
        "limits": {"max_num_seqs": 8, "kv_pages": 1024},
        "reliability": {"hedge": False},
    }
    graph, requests = read_graph(keys), parse_traffic(traffic)
    runtime = simulated_traffic(graph, requests)
    predicted = traffic_times(deployment_of(graph, read_model_config(model)), requests)
    errors = {
        "time to the first token": predicted.first_tokens.mean() / runtime.first_tokens.mean() - 1,
        "time between tokens": predicted.gaps.mean() / runtime.gaps.mean() - 1,
        "throughput": predicted.output_per_second / runtime.output_per_second - 1,
    }
    assert max(map(abs, errors.values())) < 0.15, errors
