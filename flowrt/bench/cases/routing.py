"""What the routing policy `cache_aware` gains over `round_robin`, in virtual time on emulated hardware; and what steps of a target time,
and workers for long prompts alone, gain over it.

The load is the same for both: requests that come at random moments, with prompts of 1 to 4000 tokens. In a second load each prompt begins
with one of a few long texts. Groups compute alone, or pull the KV of prompts from prefill workers.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from flowrt.actors.outputs import EndEvent, TokenEvent
from flowrt.api import RunningGraph, read_graph
from flowrt.bench.cases.patterns import exact, given
from flowrt.bench.cases.small_model import VOCABULARY, write_small_model
from flowrt.bench.measure.benchmark import Result
from flowrt.bench.measure.modelled import in_virtual_time
from flowrt.bench.report.figures import Figure, Target, nearest_rank
from flowrt.bench.report.report import print_progress
from flowrt.errors import UserError
from flowrt.graph.model import Graph
from flowrt.graph.settings import ROUTING_POLICIES
from flowrt.sampling_params import SamplingParams
from flowrt.simulation.world import World

TARGET = Target(1 / 1.3)
MAX_PROMPT_TOKENS, MAX_NEW_TOKENS = 4000, 64
TEXTS, TEXT_TOKENS, QUESTION_TOKENS = 12, 1024, 128  # of the second load
NUM_LAYERS, NUM_EXPERTS = 2, 4
ROW_SECONDS, KV_TOKEN_SECONDS, FIXED_SECONDS = 20e-6, 50e-9, 200e-6  # of each layer
STEP_SECONDS = 4e-3  # a step of 512 rows takes five times as long
LONG_TOKENS = 1000
GROUPS, PREFILL = "4 groups", "3 prefill workers, 4 groups"
SHAPES: dict[str, dict[str, Any]] = {
    GROUPS: {"attention": {"groups": 4}},
    PREFILL: {"prefill": {"workers": 3}, "attention": {"groups": 4}},
}
# Beside the policies, for mixed lengths: the shape, and what is set. Three quarters of the tokens are in long prompts.
SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    f"steps of {STEP_SECONDS * 1e3:g} ms": (GROUPS, {"limits": {"target_step_seconds": STEP_SECONDS}}),
    "long apart": (PREFILL, {"long_prompts": {"min_tokens": LONG_TOKENS, "workers": 2}}),
}


@dataclass(frozen=True)
class _LoadedRequest:
    at_seconds: float
    prompt: tuple[int, ...]
    num_new_tokens: int


@dataclass(frozen=True)
class _Latencies:
    """Holds latencies in seconds."""

    first_tokens: list[float]
    between_tokens: list[float]
    short_first_tokens: list[float]  # of prompts below LONG_TOKENS


def draw_load(seed: int, num_requests: int, tokens_per_second: float, begins_alike: bool) -> list[_LoadedRequest]:
    """Requests at random moments, whose prompts have so many tokens per second together."""
    chance = random.Random(f"load {seed}")
    texts = [chance.choices(range(3, VOCABULARY), k=TEXT_TOKENS) for _ in range(TEXTS)]
    found: list[_LoadedRequest] = []
    now = 0.0
    for _ in range(num_requests):
        if begins_alike:
            prompt = chance.choice(texts) + chance.choices(range(3, VOCABULARY), k=chance.randint(1, 2 * QUESTION_TOKENS))
            mean_tokens = TEXT_TOKENS / 4 + QUESTION_TOKENS  # as if three of four texts were found in a cache
        else:
            prompt = chance.choices(range(3, VOCABULARY), k=round(math.exp(chance.uniform(0, math.log(MAX_PROMPT_TOKENS)))))
            mean_tokens = MAX_PROMPT_TOKENS / math.log(MAX_PROMPT_TOKENS)
        now += chance.expovariate(tokens_per_second / mean_tokens)
        found.append(_LoadedRequest(now, tuple(prompt), chance.randint(2, MAX_NEW_TOKENS)))
    return found


def measure(num_requests: int, load: float) -> AsyncIterator[Result]:
    """Both policies in virtual time, now: a simulation has an event loop of its own."""
    return given(_figures(num_requests, load))


def _figures(num_requests: int, load: float) -> list[Figure]:
    figures = []
    with TemporaryDirectory(prefix="flowrt-bench-") as folder:
        model = write_small_model(Path(folder), NUM_LAYERS, NUM_EXPERTS)
        for shape, deploy in SHAPES.items():
            num_workers = deploy.get("prefill", {"workers": deploy["attention"]["groups"]})["workers"]
            rate = load * num_workers / (NUM_LAYERS * ROW_SECONDS)
            for kind, begins_alike in (("mixed lengths", False), (f"{TEXTS} beginnings", True)):
                arrivals = draw_load(0, num_requests, rate, begins_alike)
                found = {}
                for policy in ROUTING_POLICIES:
                    print_progress(f"{shape}, {kind}: {policy}, in virtual time")
                    found[policy] = in_virtual_time(_graph(model, deploy, policy), partial(_serve, arrivals))
                best, plain = (found[policy] for policy in ROUTING_POLICIES)
                figures += _compare(f"{shape}, {kind}", best, plain)
                for name, (of_shape, settings) in SETTINGS.items() if not begins_alike else ():
                    if of_shape == shape:
                        print_progress(f"{shape}, {kind}: {name}, in virtual time")
                        graph = _graph(model, deploy, ROUTING_POLICIES[0], settings)
                        figures += _compare(f"{shape}, {kind}, {name}", in_virtual_time(graph, partial(_serve, arrivals)), plain)
    return figures


def _graph(model: Path, deploy: dict[str, Any], routing: str, settings: Mapping[str, Any] = {}) -> Graph:
    cost = {"attention": {"fixed_seconds": FIXED_SECONDS, "row_seconds": ROW_SECONDS, "kv_token_seconds": KV_TOKEN_SECONDS}}
    limits = {"max_num_seqs": 32, "kv_pages": 2048, "max_tokens": MAX_NEW_TOKENS, "max_num_batched_tokens": 512}
    keys = {
        **settings,
        "flowrt": 1,
        "model": {"path": str(model)},
        "deploy": deploy,
        "routing": routing,
        "emulate": {"dilation": 100, "compute": cost},
        "limits": limits | settings.get("limits", {}),
    }
    return read_graph(keys)


async def _serve(arrivals: Sequence[_LoadedRequest], world: World, graph: RunningGraph) -> _Latencies:
    clock, dilation = graph.launcher.seams.clock, graph.graph.emulation.dilation if graph.graph.emulation is not None else 1.0
    found = _Latencies([], [], [])

    async def serve(arrival: _LoadedRequest) -> None:
        await clock.sleep(arrival.at_seconds * dilation)
        arrived = clock.now()
        times: list[float] = []
        index = await graph.submit(arrival.prompt, SamplingParams(max_tokens=arrival.num_new_tokens, ignore_eos=True))
        async for event in graph.follow(index):
            if isinstance(event, TokenEvent):
                times.append((clock.now() - arrived) / dilation)
            elif isinstance(event, EndEvent) and event.finish_reason != "length":
                raise UserError(f"a request ended with {event.finish_reason}: {event.error}")
        found.first_tokens.append(times[0])
        if len(arrival.prompt) < LONG_TOKENS:
            found.short_first_tokens.append(times[0])
        found.between_tokens.extend(after - before for before, after in pairwise(times))

    async with asyncio.TaskGroup() as tasks:
        for arrival in arrivals:
            tasks.create_task(serve(arrival))
    return found


def _compare(name: str, ours: _Latencies, theirs: _Latencies) -> list[Figure]:
    figures = []
    for what, mine, other in (
        ("first token", ours.first_tokens, theirs.first_tokens),
        ("inter-token latency", ours.between_tokens, theirs.between_tokens),
        (f"first token below {LONG_TOKENS} tokens", ours.short_first_tokens, theirs.short_first_tokens),
    ):
        for share in (0.5, 0.99) if mine else ():
            values = [[nearest_rank(each, share) * 1e3] for each in (mine, other)]
            target = TARGET if share == 0.99 and "mixed" in name and "below" not in what else None
            figures.append(
                exact(Figure.paired(f"{what} p{share * 100:.0f}, {name}", "ms", values[0], ROUTING_POLICIES[1], values[1], target))
            )
    return figures
