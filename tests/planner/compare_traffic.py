"""Compares level L2 with L1 for traffic: what `flowrt sim` predicts of requests, with what the runtime does with them in virtual time.

`make levels` runs it, and prints the errors of each case. Both levels choose experts equally often.
"""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from flowrt.api import read_graph
from flowrt.bench.cases.small_model import write_small_model
from flowrt.bench.measure.modelled_traffic import simulated_traffic
from flowrt.graph.model import Graph
from flowrt.operators.families.registry import read_model_config
from flowrt.planner.deployment import deployment_of
from flowrt.planner.requests import TrafficTimes, traffic_times
from flowrt.planner.traffic import parse_traffic

# Groups, servers, micro-batches, and their devices: servers that read their weights for long, and that do so quickly.
SHAPES = ((1, 1, 1, "l40s"), (2, 3, 1, "l40s"), (2, 3, 2, "l40s"), (3, 2, 1, "h20"))
TRAFFIC = (
    "in=400,out=16,rate=0.05,requests=6",
    "in=64,out=16,concurrency=16,requests=24",
    "in=400,out=16,rate=1,requests=24",
    "in=400,out=16,rate=4,requests=24",
    "in=1500,out=32,rate=1,requests=16",
)
FIGURES = ("time to the first token", "time between tokens", "throughput")


def graph_of(model: Path, groups: int, servers: int, micro_batches: int, emulate: Mapping[str, Any]) -> Graph:
    deploy = {
        "attention": {"groups": groups, "micro_batches": micro_batches},
        "experts": {"servers": servers},
        "links": {"attention-experts": {"link": "roce-400g"}},
    }
    limits = {"max_num_seqs": 16, "kv_pages": 4096}
    keys = {"flowrt": 1, "model": {"path": str(model)}, "deploy": deploy, "limits": limits, "reliability": {"hedge": False}}
    return read_graph({**keys, "emulate": {"dilation": 1, **emulate}})


def errors(graph: Graph, model: Path, traffic: str) -> dict[str, float]:
    """By figure, how far L2 is off from L1, as a share."""
    requests = parse_traffic(traffic)
    runtime = simulated_traffic(graph, requests)
    predicted = traffic_times(deployment_of(graph, read_model_config(model), counts=runtime.expert_pairs), requests)

    def figures(found: TrafficTimes) -> tuple[float, float, float]:
        return float(found.first_tokens.mean()), float(found.gaps.mean()), found.output_per_second

    pairs = zip(FIGURES, figures(predicted), figures(runtime), strict=True)
    return {name: own / other - 1 for name, own, other in pairs}


def main() -> int:
    os.environ["OMP_NUM_THREADS"] = "1"
    found: dict[str, list[float]] = {name: [] for name in FIGURES}
    with TemporaryDirectory(prefix="flowrt-levels-") as folder:
        model = write_small_model(Path(folder), num_layers=4, num_experts=8, top_k=2, vocabulary=512)
        for groups, servers, micro_batches, device in SHAPES:
            devices = {"devices": {"attention": "h20", "experts": device}, "model": "mixtral-8x22b"}
            graph = graph_of(model, groups, servers, micro_batches, devices)
            for traffic in TRAFFIC:
                own = errors(graph, model, traffic)
                texts = ", ".join(f"{name} {100 * error:+.1f} %" for name, error in own.items())
                print(f"{groups} groups, {servers} servers on {device}, {micro_batches} micro-batches, {traffic}: {texts}", flush=True)
                for name, error in own.items():
                    found[name].append(abs(error))
    for name, each in found.items():
        print(f"{name}: L2 is off from L1 by {100 * statistics.median(each):.1f} % in the median, {100 * max(each):.1f} % at worst")
    return 0


if __name__ == "__main__":
    sys.exit(main())
