"""Each transport from actor to actor, beside what else could carry a tensor: `flowrt bench transports`.

Here: round trips over size, a stream at 1 MiB, an echo of rows as between attention and experts, and the memory of a channel that is
sent more than is read. Not here: many senders to many receivers (m2n.py), peers (peers.py, gloo.py, installed.py), the table and the
plot (report.py, plot.py).

Tags, credits and the checks of specs are on; every receiver, ours and the peers', reads every byte and compares its checksum.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

from flowrt.api import RunningGraph, open_graph
from flowrt.bench.channels import LIMITS, ChannelEcho
from flowrt.bench.gloo import GlooGroup
from flowrt.bench.hop import BLOCK_SECONDS, Ring, calls_of, echoes_of, payload_of, ring, twice
from flowrt.bench.installed import NAMES, PeerEcho, installed_echoes
from flowrt.bench.operators import NUM_STREAMED
from flowrt.bench.pairs import Target, take_turns
from flowrt.bench.peers import ZeroMQEcho
from flowrt.bench.report import Figure
from flowrt.bench.rounds import rows_and_back, slowest
from flowrt.graph.model import GATEWAY, INPUT, OUTPUT, Edge, Graph, GraphLimits, LayerSet, Node, PortSpec, TagStep
from flowrt.transports.registry import known_schemes, transport_class, unavailable_reason

SIZES = {
    64: "64 B", 1 << 10: "1 KiB", 16 << 10: "16 KiB", 64 << 10: "64 KiB", 256 << 10: "256 KiB", 1 << 20: "1 MiB", 4 << 20: "4 MiB",
}  # fmt: skip
LISTED = (64, 64 << 10, 1 << 20)  # of these; the others are in the JSON and the plot
LARGE = (16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20)  # below, the call to copy is what takes time
NUM_LAYERS = 20  # round trips of one call: at 4 MiB a call is still short
PYZMQ, GLOO, UCXX, RAY = ZeroMQEcho.name, "gloo send/recv", NAMES["ucxx"], NAMES["ray"]
ROUND_TRIP_TARGETS = {
    ("shm", 64, PYZMQ): Target(0.33),
    ("shm", 64, RAY): Target(0.5),
    ("zmq", 1 << 20, PYZMQ): Target(1.2),
    ("ucx", 64, PYZMQ): Target(0.5),
    ("ucx", 1 << 20, UCXX): Target(1.2),
}
STREAM_TARGETS = {"shm": Target(0.5, at_most=False)}  # of one core's memcpy: one copy in, none out
STREAM_BYTES = 1 << 20
# EaaS, section 5.5 (Figure 12), over StepMesh: overhead less by 49.6 % at 2:2 and by 34.7 % at 1:3, 512 rows of 7168 in bfloat16.
ROWS, COLUMNS = 512, 7168
ECHO_TARGETS = {(2, 2): Target(0.50), (1, 3): Target(0.65)}
ECHO_ROUNDS = 5
FLOODS, FLOODED = 10, 10_000
_SPEC = "uint8[bytes]"

MEMCPY = "memcpy"
Measure = Callable[[], Awaitable[float]]
Peer = ZeroMQEcho | GlooGroup | PeerEcho


async def measure(num_pairs: int) -> AsyncIterator[Figure | str]:
    """The figures one by one; a text says what cannot be measured here, and why."""
    schemes = []
    for scheme in known_schemes():
        reason = unavailable_reason(scheme)
        if reason is None:
            schemes.append(scheme)
        else:
            yield f"{scheme}: {reason}"
    echoes, missing = installed_echoes()
    if missing:
        yield f"not installed, so not compared: {', '.join(missing)}"
    async for figure in round_trips(schemes, echoes, num_pairs):
        yield figure
    between = [scheme for scheme in schemes if _crosses(scheme)]
    for scheme in between:
        yield await stream(scheme, num_pairs)
    for (num_clients, num_servers), target in ECHO_TARGETS.items():
        yield await rows(num_clients, num_servers, num_pairs, target)
    for scheme in between:
        yield await memory(scheme)


async def round_trips(schemes: Sequence[str], installed: Sequence[PeerEcho], num_pairs: int) -> AsyncIterator[Figure]:
    """There and back between two workers, all transports and all peers in turns, at each size."""
    async with AsyncExitStack() as stack:
        rings: dict[str, tuple[Ring, RunningGraph]] = {}
        for scheme in schemes:
            made = ring("many" if _crosses(scheme) else "one", scheme, NUM_LAYERS, "read_and_echo")
            rings[scheme] = made, await stack.enter_async_context(open_graph(made.graph))
        peers: dict[str, Peer] = {
            PYZMQ: await stack.enter_async_context(ZeroMQEcho(reading=True)),
            GLOO: await stack.enter_async_context(GlooGroup(1, 1)),
        }
        for each in installed:
            peers[each.name] = await stack.enter_async_context(each)
        for size, text in SIZES.items():
            payload = payload_of(size)
            measures = [twice(calls_of(graph, made, payload)) for made, graph in rings.values()]
            measures += [echoes_of(peer, payload.numpy()) for peer in peers.values()]
            values = dict(zip([*rings, *peers], await take_turns(measures, num_pairs), strict=True))
            for figure in _compared(schemes, list(peers), size, text, values):
                yield figure
            if size in LARGE:
                copying = memcpy_rate(size)
                rates = [await copying() for _ in range(6)]
                yield replace(Figure.alone(f"memcpy, one core, {text}", "GB/s", rates, scheme=MEMCPY, bytes=size), listed=size in LISTED)


def _compared(schemes: Sequence[str], peers: Sequence[str], size: int, text: str, values: Mapping[str, list[float]]) -> Iterator[Figure]:
    for scheme in schemes:
        name = f"round trip, {scheme}, {text}"
        about: dict[str, Any] = {"scheme": scheme, "bytes": size}
        if not _crosses(scheme):  # no peer here passes a tensor from task to task
            yield replace(Figure.alone(name, "us", values[scheme], **about), listed=size in LISTED)
            continue
        for peer in peers:
            target = ROUND_TRIP_TARGETS.get((scheme, size, peer))
            figure = Figure.paired(name, "us", values[scheme], peer, values[peer], target, **about)
            yield replace(figure, listed=size in LISTED)


async def stream(scheme: str, num_pairs: int) -> Figure:
    """Payloads of 1 MiB one way, eight in flight, against one core's copying over as many buffers."""
    made = stream_ring(scheme)
    async with open_graph(made.graph) as graph:
        values = await take_turns((_streaming(graph, made), memcpy_rate(STREAM_BYTES)), num_pairs)
    return Figure.paired(f"stream, {scheme}, 1 MiB", "GB/s", values[0], "memcpy", values[1], STREAM_TARGETS.get(scheme))


async def rows(num_clients: int, num_servers: int, num_pairs: int, target: Target) -> Figure:
    """Every client's rows to every server and back, by the transport that `auto` takes, against gloo's isend."""
    made = rows_and_back(num_clients, num_servers, ROWS, COLUMNS)
    num_bytes = 2 * ROWS * COLUMNS
    async with open_graph(made.graph) as graph, GlooGroup(num_clients, num_servers) as gloo:
        ours = slowest(graph, made.go, ECHO_ROUNDS)

        async def theirs() -> list[float]:
            return await gloo.round_seconds("rows", ECHO_ROUNDS, num_bytes)

        blocks = await take_turns((ours, theirs), num_pairs)
        schemes = ", ".join(sorted({edge.transport for edge in graph.graph.edges.values()}))
    values = [[1e6 * statistics.median(block) for block in side] for side in blocks]
    return Figure.paired(f"echo of rows, {num_clients}:{num_servers}, {schemes}", "us", values[0], "gloo isend", values[1], target)


async def memory(scheme: str) -> Figure:
    """What both ends of a channel take while 10^5 messages go over it faster than they are read; at most what it was declared to hold."""
    async with ChannelEcho(scheme) as echo:
        grown = [await echo.flood(FLOODED, seed) / (1 << 20) for seed in range(FLOODS)]
    name = f"memory of a channel, {scheme}, {FLOODS * FLOODED} messages"
    return Figure.alone(name, "MiB", grown, Target(LIMITS.capacity_bytes / (1 << 20)))


def memcpy_rate(num_bytes: int) -> Measure:
    """One core's copying of `num_bytes` at a time, round eight buffers and into eight, in GB/s."""
    import numpy as np

    pairs = [(np.ones(num_bytes, np.uint8), np.empty(num_bytes, np.uint8)) for _ in range(NUM_STREAMED)]

    async def measure_block() -> float:
        start, num_rounds = time.perf_counter(), 0
        while (seconds := time.perf_counter() - start) < BLOCK_SECONDS:
            for source, target in pairs:
                np.copyto(target, source)
            num_rounds += 1
        return num_rounds * NUM_STREAMED * num_bytes / seconds / 1e9

    return measure_block


def _crosses(scheme: str) -> bool:
    return transport_class(scheme).capabilities.between_processes


def stream_ring(scheme: str) -> Ring:
    """`left` gives, `right` takes and asks for more, NUM_LAYERS times for each call; `num_hops` counts the payloads."""
    again, last = LayerSet(frozenset(range(NUM_LAYERS - 1))), LayerSet(frozenset({NUM_LAYERS - 1}))
    operators, count = "flowrt.bench.operators", PortSpec("go", ("int64[1]",))
    nodes = [
        Node(INPUT, INPUT, GATEWAY, outputs={"go": PortSpec("go")}),
        Node(OUTPUT, OUTPUT, GATEWAY, inputs={"go": PortSpec("go")}),
        Node("left", f"{operators}:give", "left", {"go": count}, {"x": PortSpec("x", (_SPEC,))}),
        Node("right", f"{operators}:take", "right", {"x": PortSpec("x", (_SPEC,))}, {"go": count}),
    ]
    edges = [
        Edge(INPUT, "go", "left", "go", transport=scheme, credits=NUM_STREAMED),
        Edge("left", "x", "right", "x", transport=scheme, credits=NUM_STREAMED),
        Edge("right", "go", "left", "go", transport=scheme, credits=NUM_STREAMED, layers=again, tag=TagStep("next_layer")),
        Edge("right", "go", OUTPUT, "go", transport=scheme, credits=NUM_STREAMED, layers=last),
    ]
    limits = GraphLimits(in_flight=NUM_STREAMED)
    return Ring(Graph.of(nodes, edges, limits=limits, processes="many"), NUM_LAYERS)


def _streaming(graph: RunningGraph, made: Ring) -> Measure:
    import torch

    go = torch.tensor([STREAM_BYTES])

    async def lane() -> None:
        await graph(go=go)

    async def measure_block() -> float:
        start, num_calls = time.perf_counter(), 0
        while (seconds := time.perf_counter() - start) < BLOCK_SECONDS or not num_calls:
            async with asyncio.TaskGroup() as group:
                for _ in range(NUM_STREAMED):
                    group.create_task(lane())
            num_calls += NUM_STREAMED
        return num_calls * made.num_hops * STREAM_BYTES / seconds / 1e9

    return measure_block
