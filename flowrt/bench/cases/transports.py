"""Each transport from actor to actor, beside other ways to carry a tensor. Every receiver reads every byte and compares its checksum."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import replace
from functools import partial
from typing import Any

from flowrt.api import RunningGraph, open_graph
from flowrt.bench.cases import graphs
from flowrt.bench.cases.hop import measure_hop, payload_of
from flowrt.bench.cases.m2n import round_seconds
from flowrt.bench.measure.benchmark import Measure, Results, Trial, seconds_per_call
from flowrt.bench.peers.channels import LIMITS, channel_echo
from flowrt.bench.peers.echo import PYZMQ, Echo, measure_echo, zeromq_echo
from flowrt.bench.peers.gloo import GlooGroup, gloo_group
from flowrt.bench.peers.packages import NAMES, installed_packages, package_echo
from flowrt.bench.report.figures import Figure, Target
from flowrt.transports.registry import known_schemes, transport_class, unavailable_reason

SIZES = {
    64: "64 B", 1 << 10: "1 KiB", 16 << 10: "16 KiB", 64 << 10: "64 KiB", 256 << 10: "256 KiB", 1 << 20: "1 MiB", 4 << 20: "4 MiB",
}  # fmt: skip
LISTED = (64, 64 << 10, 1 << 20)  # of these sizes; the others are in the JSON and the plot
MIN_MEMCPY_BYTES = 16 << 10  # below, the call itself takes the time
NUM_LAYERS = 20  # round trips of one call: at 4 MiB a call is still short
NUM_STREAMED = 8  # payloads in flight
GLOO = "gloo send/recv"
ROUND_TRIP_TARGETS = {
    ("shm", 64, PYZMQ): Target(0.33),
    ("shm", 64, NAMES["ray"]): Target(0.5),
    ("zmq", 1 << 20, PYZMQ): Target(1.2),
    ("ucx", 64, PYZMQ): Target(0.5),
    ("ucx", 1 << 20, NAMES["ucxx"]): Target(1.2),
}
STREAM_TARGETS = {"shm": Target(0.5, at_most=False)}  # of one core's memcpy: one copy in, none out
STREAM_BYTES = 1 << 20
# EaaS, section 5.5 (Figure 12), over StepMesh: overhead less by 49.6 % at 2:2 and by 34.7 % at 1:3, 512 rows of 7168 in bfloat16.
ROWS, COLUMNS = 512, 7168
ROWS_TARGETS = {(2, 2): Target(0.50), (1, 3): Target(0.65)}
ROWS_ROUNDS = 5
FLOODS, FLOODED = 10, 10_000
MEMCPY = "memcpy"


async def measure() -> Results:
    """A note names each transport that cannot be measured here, and the peers that are not installed."""
    schemes = []
    for scheme in known_schemes():
        if (reason := unavailable_reason(scheme)) is None:
            schemes.append(scheme)
        else:
            yield f"{scheme}: {reason}"
    packages, missing = installed_packages()
    if missing:
        yield f"not installed, so not compared: {', '.join(missing)}"
    async with aclosing(_round_trips(schemes, packages)) as results:
        async for result in results:
            yield result
    between = [scheme for scheme in schemes if _crosses(scheme)]
    for scheme in between:
        stream = graphs.stream(scheme, NUM_STREAMED, NUM_LAYERS)
        async with open_graph(stream.graph) as graph:
            ours, target = measure_stream(graph, stream.num_hops), STREAM_TARGETS.get(scheme)
            yield Trial.paired(f"stream, {scheme}, 1 MiB", "GB/s", ours, MEMCPY, measure_memcpy(STREAM_BYTES), target)
    for (num_clients, num_servers), target in ROWS_TARGETS.items():
        rows = graphs.rows_and_back(num_clients, num_servers, ROWS, COLUMNS)
        async with open_graph(rows.graph) as graph, gloo_group(num_clients, num_servers) as gloo:
            chosen = ", ".join(sorted({edge.transport for edge in graph.graph.edges.values()}))
            name = f"echo of rows, {num_clients}:{num_servers}, {chosen}"

            async def ours_us(graph: RunningGraph = graph, go: Sequence[int] = rows.go) -> float:
                return 1e6 * statistics.median(map(max, await round_seconds(graph, go, ROWS_ROUNDS)))

            async def theirs_us(gloo: GlooGroup = gloo) -> float:
                return 1e6 * statistics.median(await gloo.round_seconds("rows", ROWS_ROUNDS, 2 * ROWS * COLUMNS))

            yield Trial.paired(name, "us", ours_us, "gloo isend", theirs_us, target)
    for scheme in between:
        async with channel_echo(scheme) as echo:
            grown = [await echo.flood(FLOODED, seed) / (1 << 20) for seed in range(FLOODS)]
        target = Target(LIMITS.capacity_bytes / (1 << 20))
        yield Figure.alone(f"memory of a channel, {scheme}, {FLOODS * FLOODED} messages", "MiB", grown, target)


async def _round_trips(schemes: Sequence[str], packages: Sequence[str]) -> Results:
    """There and back between two workers: all transports and all peers in turns, at each size."""
    async with AsyncExitStack() as stack:
        rings = {}
        for scheme in schemes:
            hops = graphs.ring("many" if _crosses(scheme) else "one", scheme, NUM_LAYERS, "read_and_echo")
            rings[scheme] = await stack.enter_async_context(open_graph(hops.graph)), hops
        peers: dict[str, Echo] = {
            PYZMQ: await stack.enter_async_context(zeromq_echo(reads=True)),
            GLOO: await stack.enter_async_context(gloo_group(1, 1)),
        }
        for package in packages:
            peers[NAMES[package]] = await stack.enter_async_context(package_echo(package))
        for size, text in SIZES.items():
            payload = payload_of(size)
            sides = [measure_hop(graph, hops, payload, 2) for graph, hops in rings.values()]
            sides += [measure_echo(peer, payload.numpy()) for peer in peers.values()]
            yield Trial(sides, partial(_figures, [*rings, *peers], schemes, list(peers), size))
            if size >= MIN_MEMCPY_BYTES:
                copy = measure_memcpy(size)
                rates = [await copy() for _ in range(6)]
                figure = Figure.alone(f"memcpy, one core, {text}", "GB/s", rates, scheme=MEMCPY, bytes=size)
                yield replace(figure, listed=size in LISTED)


def _figures(
    sides: Sequence[str], schemes: Sequence[str], peers: Sequence[str], size: int, values: Sequence[Sequence[float]]
) -> list[Figure]:
    by_side = dict(zip(sides, values, strict=True))
    found = []
    for scheme in schemes:
        name, ours = f"round trip, {scheme}, {SIZES[size]}", by_side[scheme]
        about: dict[str, Any] = {"scheme": scheme, "bytes": size}
        if not _crosses(scheme):  # no peer passes a tensor from task to task
            found.append(Figure.alone(name, "us", ours, **about))
            continue
        for peer in peers:
            target = ROUND_TRIP_TARGETS.get((scheme, size, peer))
            found.append(Figure.paired(name, "us", ours, peer, by_side[peer], target, **about))
    return [replace(figure, listed=size in LISTED) for figure in found]


def measure_memcpy(num_bytes: int) -> Measure[float]:
    """GB/s of one core that copies `num_bytes` at a time, from eight buffers in turn into eight."""
    import numpy as np

    pairs = [(np.ones(num_bytes, np.uint8), np.empty(num_bytes, np.uint8)) for _ in range(NUM_STREAMED)]

    async def copy() -> None:
        for source, target in pairs:
            np.copyto(target, source)

    async def measure() -> float:
        return NUM_STREAMED * num_bytes / 1e9 / await seconds_per_call(copy)

    return measure


def measure_stream(graph: RunningGraph, num_payloads: int) -> Measure[float]:
    """GB/s of payloads of 1 MiB one way, eight in flight."""
    import torch

    go = torch.tensor([STREAM_BYTES])

    async def calls() -> None:
        await asyncio.gather(*(graph(go=go) for _ in range(NUM_STREAMED)))

    async def measure() -> float:
        return NUM_STREAMED * num_payloads * STREAM_BYTES / 1e9 / await seconds_per_call(calls)

    return measure


def _crosses(scheme: str) -> bool:
    return transport_class(scheme).capabilities.between_processes
