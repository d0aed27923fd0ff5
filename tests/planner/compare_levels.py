"""Compares level L2 with L1 over drawn graphs: the time of a decode step that planner/step.py predicts, with that of the runtime in
virtual time. `make levels DRAWS=200` runs it and fails when a target is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from flowrt.api import RunningGraph, read_graph
from flowrt.bench.cases.small_model import write_small_model
from flowrt.bench.measure.modelled import PROMPT_TOKENS, in_virtual_time, modelled_run
from flowrt.errors import GraphError, UserError
from flowrt.operators.families.registry import read_model_config
from flowrt.planner.deployment import deployment_of
from flowrt.planner.step import step_times
from flowrt.simulation.world import World

MAX_MEDIAN, MAX_WORST, MIN_ORDERED, ORDER_SHARE = 0.03, 0.10, 0.98, 0.05
NUM_LAYERS = 3
NEW_TOKENS, PREFILL_NEW_TOKENS = 10, 24  # at least; where prompts arrive one by one, the first steps of a group are not full
SMALL_TOKENS, SMALL_PROCESSES = 48, 480  # at most, and over processes: the mean of few groups needs more steps, and they take less time
MAX_PROCESSES = 64


@dataclass(frozen=True)
class Drawn:
    """A graph file without its model, the sizes of the model, and the sequences of each group."""

    seed: int
    keys: dict[str, Any]
    num_experts: int
    top_k: int
    batch: int

    @property
    def text(self) -> str:
        deploy = self.keys["deploy"]
        attention, experts = deploy["attention"], deploy["experts"]
        names = f"{attention['groups']} groups, {experts['servers']} servers"
        rest = {"domains": attention["domains"], "mb": attention["micro_batches"], "replicas": experts["replicas"], "batch": self.batch}
        numbers = " ".join(f"{key}={value}" for key, value in rest.items())
        return f"{names}, {numbers}, {experts['trampoline']}, top {self.top_k} of {self.num_experts}"


@dataclass(frozen=True)
class Compared:
    """Seconds of a step by both levels, and how long each took to find it."""

    drawn: Drawn
    ours: float
    theirs: float
    our_wall: float
    their_wall: float

    @property
    def error(self) -> float:
        return self.ours / self.theirs - 1


def draw(seed: int) -> Drawn:
    """The first possible deployment of the seed, of 2 to MAX_PROCESSES processes, most of them small."""
    chance = random.Random(f"levels {seed}")
    while True:
        processes = round(2 ** (1 + 5 * chance.random() ** 2))  # most are small: large ones take minutes in level L1
        groups = max(1, min(processes - 1, round(processes * chance.uniform(0.2, 0.8))))
        servers: int | str = processes - groups
        prefill = chance.choice((0, 0, 0, 1, 2)) if groups > 2 else 0
        groups -= prefill
        if chance.random() < 0.2:
            servers = "colocated"
        if servers == "colocated" and groups == 1:
            continue
        num_servers = groups if servers == "colocated" else int(servers)
        num_experts = num_servers * chance.choice((1, 2, 4)) if chance.random() < 0.7 else chance.randint(num_servers, 64 + num_servers)
        num_experts = max(4, min(128, num_experts))
        top_k = chance.choice([k for k in (2, 2, 3, 4) if k <= num_experts])
        replicas = chance.choice((1, 1, 2, 3)) if num_servers > 2 else 1
        micro_batches = chance.choice((1, 2, 2, 3))
        batch = micro_batches * chance.choice((1, 1, 2, 4, 8))
        domains = chance.choice((1, 1, 2, 3)) if groups > 2 else 1
        us = 1e-6
        # Times of a layer, in proportions that bind one side or the other.
        attention = {"fixed_seconds": chance.uniform(20, 200) * us, "row_seconds": chance.uniform(0, 5) * us}
        attention["kv_token_seconds"] = chance.choice((0, 0.1)) * us
        experts = {
            "fixed_seconds": chance.uniform(5, 60) * us,
            "row_seconds": chance.uniform(0, 3) * us,
            "expert_seconds": chance.uniform(0, 15) * us,
        }
        link: Any = chance.choice(("ub", "roce-400g", None))
        if link is None:
            link = {
                "latency_seconds": chance.uniform(2, 30) * us,
                "message_seconds": chance.uniform(0.2, 5) * us,
                "bandwidth_bytes_per_second": 10 ** chance.uniform(7.5, 10),
            }
        keys: dict[str, Any] = {
            "deploy": {
                "attention": {"groups": groups, "domains": domains, "micro_batches": micro_batches},
                "experts": {"servers": servers, "replicas": replicas, "trampoline": "never"},
                "links": {"attention-experts": {"link": link}},
            },
            "emulate": {"dilation": 1, "compute": {"attention": attention, "experts": experts}},
            "limits": {"max_num_seqs": batch, "kv_pages": 4 * batch, "max_num_batched_tokens": max(64, PROMPT_TOKENS * batch)},
        }
        if prefill:
            keys["deploy"]["prefill"] = {"workers": prefill}
        if servers != "colocated" and num_servers > -(-groups // domains) and chance.random() < 0.35:
            keys["deploy"]["experts"]["trampoline"] = "always"
        if chance.random() < 0.2:
            keys["deploy"]["experts"]["batches"] = {"min_tags": chance.randint(2, 3), "max_wait_seconds": chance.choice((20, 60)) * us}
        return Drawn(seed, keys, num_experts, top_k, batch)


def compare(drawn: Drawn, model: Path) -> Compared | None:
    """Both levels of one draw; None for a combination that the checks of graphs refuse, or that has no steady state."""
    try:
        graph = read_graph({"flowrt": 1, "model": {"path": str(model)}, **drawn.keys}, ["reliability.hedge=false"])
    except GraphError:
        return None
    groups = drawn.keys["deploy"]["attention"]["groups"]
    new_tokens = max(
        PREFILL_NEW_TOKENS if "prefill" in drawn.keys["deploy"] else NEW_TOKENS,
        min(SMALL_TOKENS, SMALL_PROCESSES // len(graph.process_names())),
    )
    counts: dict[int, list[float]] = {}

    async def call(_: World, running: RunningGraph) -> float:
        run = await modelled_run(running, groups * drawn.batch, new_tokens, temperature=1.0)
        for each in (await running.statistics()).values():
            for layer in each.experts:
                found = counts.setdefault(layer.layer, [0.0] * drawn.num_experts)
                for expert, num in zip(layer.expert_ids, layer.num_pairs, strict=True):
                    found[expert] += num
        return run.mean_step_seconds

    start = time.perf_counter()
    try:
        theirs = in_virtual_time(graph, call)
    except UserError:  # not all sequences ran at once: there is no steady state
        return None
    middle = time.perf_counter()
    deployment = deployment_of(graph, read_model_config(model), counts=counts)
    ours = step_times(deployment, drawn.batch, PROMPT_TOKENS + new_tokens / 2).seconds
    return Compared(drawn, ours, theirs, time.perf_counter() - middle, middle - start)


def report(found: Sequence[Compared]) -> tuple[list[str], bool]:
    """Lines for people, and whether all targets are met."""
    errors = sorted(abs(each.error) for each in found)
    pairs = [(one, other) for one, other in combinations(found, 2) if abs(one.theirs / other.theirs - 1) > ORDER_SHARE]
    ordered = sum((one.ours < other.ours) == (one.theirs < other.theirs) for one, other in pairs) / max(1, len(pairs))
    median, worst = statistics.median(errors), errors[-1]
    bias = statistics.mean(each.error for each in found)
    is_near = median <= MAX_MEDIAN and worst <= MAX_WORST
    walls = [statistics.mean(column) for column in zip(*((each.their_wall, each.our_wall) for each in found), strict=True)]
    order = f"{100 * ordered:.2f} % right, target {100 * MIN_ORDERED:g} %"
    return [
        f"{len(found)} graphs: step of L2 beside L1: median {100 * median:.2f} %, worst {100 * worst:.2f} %, mean {100 * bias:+.2f} %",
        f"targets: median {100 * MAX_MEDIAN:g} %, worst {100 * MAX_WORST:g} %: {'met' if is_near else 'MISSED'}",
        f"order of {len(pairs)} pairs that differ by more than {100 * ORDER_SHARE:g} %: {order}",
        f"on average L1 ran for {walls[0]:.2f} s, L2 for {walls[1]:.2f} s",
    ], is_near and ordered >= MIN_ORDERED


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draws", type=int, default=200)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--json", help="write every draw into this file")
    given = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    found: list[Compared] = []
    with TemporaryDirectory(prefix="flowrt-levels-") as folder:
        seed = given.first
        while len(found) < given.draws:
            drawn = draw(seed)
            seed += 1
            model = Path(folder) / f"{drawn.num_experts}-{drawn.top_k}"
            if not model.exists():
                write_small_model(model, NUM_LAYERS, drawn.num_experts, drawn.top_k)
            each = compare(drawn, model)
            if each is None:
                continue
            found.append(each)
            print(
                f"{drawn.seed:4} L1 {1e6 * each.theirs:9.1f} us, L2 {1e6 * each.ours:9.1f} us, {100 * each.error:+6.2f} %: {drawn.text}",
                flush=True,
            )
    lines, met = report(found)
    print(*lines, sep="\n")
    if given.json:
        rows = [{"seed": each.drawn.seed, "l1_seconds": each.theirs, "l2_seconds": each.ours, "graph": each.drawn.keys} for each in found]
        Path(given.json).write_text(json.dumps(rows, indent=1), encoding="utf-8")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
