"""Real runs of small deployments on this machine, and what the planner's level L2 predicts of them with a device card."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from flowrt.api import RunningGraph, read_graph
from flowrt.bench.machine.constants import RUN_CONSTANTS
from flowrt.bench.measure.decoding import DecodeRun, GraphSide, prompts_of
from flowrt.costs.devices import FIELDS, Device
from flowrt.graph.model import Graph
from flowrt.launcher.model_facts import config_of
from flowrt.planner.deployment import Deployment, DeviceTimes, deployment_of
from flowrt.planner.requests import traffic_times
from flowrt.planner.step import step_times
from flowrt.planner.traffic import RequestArrival, Traffic

VOCABULARY = 8192
PAGES, PAGE_SIZE = 1024, 16
# Parameters of write_small_model: of runs that are profiled, of those that are compared with them (between the sizes whose operators are
# profiled), and of tests.
_SIZES = {"num_experts": 16, "top_k": 4, "width": 512, "kv_heads": 4, "head_dim": 64, "vocabulary": VOCABULARY}
PROFILE_MODEL = {**_SIZES, "num_layers": 4, "hidden": 512, "heads": 8}
COMPARED_MODEL = {**_SIZES, "num_layers": 6, "hidden": 768, "heads": 12}
TINY_MODEL = {**_SIZES, "num_layers": 2, "num_experts": 4, "top_k": 2, "hidden": 64, "width": 32, "heads": 2, "kv_heads": 2, "head_dim": 32}


@dataclass(frozen=True)
class RunLoad:
    """Prompts of a run, of equal length, and new tokens of each."""

    batch: int
    prompt_tokens: int = 64
    new_tokens: int = 24

    @property
    def context(self) -> float:
        """The mean number of tokens that a sequence has while it decodes."""
        return self.prompt_tokens + self.new_tokens / 2

    def of_groups(self, groups: int) -> list[int]:
        """Sequences of each group: the gateway spreads them evenly."""
        return [self.batch // groups + (number < self.batch % groups) for number in range(groups)]


@dataclass(frozen=True)
class RunSpeeds:
    """Output tokens per second while all sequences decode, and seconds until each has its first token."""

    decode: float
    prefill_seconds: float


def read_shape(model: Path, groups: int, servers: int, threads: int, dtype: str) -> Graph:
    """The graph of groups that share `servers`; 0: each computes its own experts."""
    experts: dict[str, Any] = {"servers": servers} | ({"threads": threads} if servers else {})
    keys = {
        "flowrt": 1,
        "model": {"path": str(model), "dtype": dtype},
        "deploy": {"attention": {"groups": groups, "threads": threads}, "experts": experts},
        "limits": {"kv_pages": PAGES, "page_size": PAGE_SIZE},
        "reliability": {"hedge": False},  # no part is computed twice
    }
    return read_graph(keys)


async def run_tries(running: RunningGraph, load: RunLoad, tries: int) -> list[DecodeRun]:
    """Runs the load once for nothing, then `tries` times, and returns these runs."""
    side, prompts = GraphSide(running), prompts_of(load.batch, load.prompt_tokens, VOCABULARY)
    return [await side.run(prompts, load.new_tokens) for _ in range(1 + tries)][1:]


def speeds_of(runs: Sequence[DecodeRun]) -> RunSpeeds:
    """Returns the medians of the runs."""
    return RunSpeeds(median(run.decode_tokens / run.decode_seconds for run in runs), median(run.prefill_seconds for run in runs))


def deployment_on(graph: Graph, device: Device) -> Deployment:
    """The graph as processes of one machine, each on a device of its card, or on its share of all when there are more of them."""
    assert graph.model is not None
    config = config_of(graph.model)
    times = dict.fromkeys(graph.process_names(), DeviceTimes(device, config))
    deployment = replace(deployment_of(graph, config, times), link=device.links[0])
    shared = device.devices_per_node if deployment.num_ranks > device.devices_per_node else None
    return replace(deployment, shared_devices=shared)


def predicted_run(graph: Graph, device: Device, load: RunLoad) -> RunSpeeds:
    """Predicts the run of `load` on the graph."""
    deployment = deployment_on(graph, device)
    arrival = RequestArrival(0.0, load.prompt_tokens, load.new_tokens)
    served = traffic_times(deployment, Traffic("all at once", (arrival,) * load.batch))
    return RunSpeeds(load.batch / step_seconds(graph, device, load), float(served.first_tokens.max()))


def terms_of(graph: Graph, device: Device, load: RunLoad, unit: float = 1e-4) -> tuple[float, ...]:
    """How many seconds of a decode step a second of each constant of RUN_CONSTANTS adds."""
    base = step_seconds(graph, device, load)
    changed = (device.with_constants({name: getattr(device, FIELDS[name]) + unit}) for name in RUN_CONSTANTS)
    return tuple((step_seconds(graph, each, load) - base) / unit for each in changed)


def step_seconds(graph: Graph, device: Device, load: RunLoad) -> float:
    """Predicted seconds of a decode step. Groups have no reason to be in the same layer at the same time."""
    deployment = deployment_on(graph, device)
    batches = [own for own in load.of_groups(len(deployment.groups)) if own]
    deployment = replace(deployment, groups=deployment.groups[: len(batches)])
    return float(step_times(deployment, batches, load.context, apart=True).by_group.max())
