"""Level L1 for traffic: the runtime itself serves drawn or recorded requests in virtual time."""

from __future__ import annotations

import asyncio
import math
import random
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np

from flowrt.actors.outputs import EndEvent, TokenEvent
from flowrt.api import RunningGraph
from flowrt.bench.measure.modelled import in_virtual_time
from flowrt.errors import UserError
from flowrt.graph.model import Graph
from flowrt.operators.families.registry import read_model_config
from flowrt.planner.requests import TrafficTimes
from flowrt.planner.traffic import BLOCK_TOKENS, RequestArrival, Traffic
from flowrt.sampling_params import SamplingParams
from flowrt.simulation.world import World

FIRST_TOKEN_ID = 3  # of drawn prompts; smaller ids are often special tokens
LEVEL = "L1"


def simulated_traffic(graph: Graph, traffic: Traffic) -> TrafficTimes:
    """Serve the traffic in virtual time. Raises UserError for a graph without emulation, and for a request that it cannot serve."""
    if graph.emulation is None or graph.model is None:
        raise UserError("level L1 needs a graph with emulate: that serves a model; add emulate:, or use --level L2")
    return in_virtual_time(graph, partial(_serve, traffic))


async def _serve(traffic: Traffic, _: World, graph: RunningGraph) -> TrafficTimes:
    emulation, model = graph.graph.emulation, graph.graph.model
    assert emulation is not None
    assert model is not None
    clock, dilation = graph.launcher.seams.clock, emulation.dilation
    vocab_size = read_model_config(Path(model.path)).vocab_size
    begin = clock.now()
    first_tokens, latencies, gaps, ends = list[float](), list[float](), list[float](), list[float]()
    num_output = num_here = max_here = 0
    places = asyncio.Semaphore(traffic.concurrency or len(traffic.arrivals))

    async def serve(number: int, arrival: RequestArrival) -> None:
        nonlocal num_output, num_here, max_here
        if traffic.concurrency is None:
            await clock.sleep(arrival.at_seconds * dilation)
        async with places:
            arrived, times = clock.now(), list[float]()
            num_here += 1
            max_here = max(max_here, num_here)
            params = SamplingParams(max_tokens=arrival.num_output, ignore_eos=True)
            index = await graph.submit(prompt_of(number, arrival, vocab_size), params)
            async for event in graph.follow(index):
                if isinstance(event, TokenEvent):
                    if not times:
                        num_here -= 1
                    times += [clock.now()] * len(event.token_ids)
                elif isinstance(event, EndEvent) and event.finish_reason != "length":
                    raise UserError(f"request {number} ended with {event.finish_reason}: {event.error}")
        first_tokens.append((times[0] - arrived) / dilation)
        latencies.append((times[-1] - arrived) / dilation)
        gaps.extend((after - before) / dilation for before, after in pairwise(times))
        ends.append(times[-1])
        num_output += len(times)

    async with asyncio.TaskGroup() as tasks:
        for number, arrival in enumerate(traffic.arrivals):
            tasks.create_task(serve(number, arrival))
    seconds = (max(ends) - begin) / dilation
    counters = await graph.statistics()
    busy = {
        name: each.emulation.computed.modelled_seconds / dilation / seconds for name, each in counters.items() if each.emulation is not None
    }
    num_steps, num_rows = (sum(getattr(each, name) for each in counters.values()) for name in ("num_steps", "num_rows"))
    return TrafficTimes(
        seconds,
        np.array(first_tokens),
        np.array(latencies),
        np.full(len(latencies), math.nan),
        np.array(gaps),
        sum(each.num_input for each in traffic.arrivals),
        num_output,
        max_here,
        num_rows / max(1, num_steps),
        None,
        busy,
        LEVEL,
    )


def prompt_of(number: int, arrival: RequestArrival, vocab_size: int) -> tuple[int, ...]:
    """Token ids of a prompt; blocks with equal ids have equal tokens."""
    tokens: list[int] = []
    for block in arrival.blocks[: arrival.num_input // BLOCK_TOKENS]:
        tokens += random.Random(f"block {block}").choices(range(FIRST_TOKEN_ID, vocab_size), k=BLOCK_TOKENS)
    rest = arrival.num_input - len(tokens)
    return (*tokens, *random.Random(f"request {number}").choices(range(FIRST_TOKEN_ID, vocab_size), k=rest))
