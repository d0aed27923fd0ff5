"""What a message costs: `flowrt bench hop`.

Here: graphs that do nothing but pass a tensor on, and their hops against plain echoes in alternating pairs: within one process
against asyncio queues, between two processes against pyzmq. Everything is as in any run: links, credits, tags, matching, the checks of
specs. Not here: the peers (peers.py), the statistics (pairs.py).
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, Protocol

from flowrt.api import RunningGraph, open_graph
from flowrt.bench.channels import ChannelEcho
from flowrt.bench.pairs import Target, take_turns
from flowrt.bench.peers import ZeroMQEcho, queue_echo_seconds
from flowrt.bench.report import Figure
from flowrt.graph.model import GATEWAY, INPUT, OUTPUT, Edge, Graph, LayerSet, Node, PortSpec, TagStep
from flowrt.transports.registry import unavailable_reason

ECHO_TARGET = Target(1.5)  # a hop, to an asyncio.Queue echo: there and back, 6 to 8 us
TRANSPORTS = ("shm", "zmq")
SIZES = {64: "64 B", 64 << 10: "64 KiB", 1 << 20: "1 MiB"}
# A round trip, to pyzmq's asyncio sockets over ipc: three times as fast where the way is all that counts, ahead where it is not.
ROUND_TRIP_TARGETS = {("shm", 64): Target(0.33), ("shm", 64 << 10): Target(1.0)}  # actor to actor
CHANNEL_TARGETS = {("shm", 64 << 10): Target(1.0)}
NUM_LAYERS = 50  # rounds a tensor makes for each time that it comes in and goes out
NUM_FUSED = 64
BLOCK_SECONDS = 0.05  # of one measurement: long beside a wake-up, short beside the drift of a machine's load
_SPEC = "uint8[bytes]"


@dataclass(frozen=True)
class Ring:
    """A graph and how many hops one call of it makes."""

    graph: Graph
    num_hops: int


def ring(processes: Literal["one", "many"], transport: str = "auto", num_layers: int = NUM_LAYERS, operator: str = "echo") -> Ring:
    """A tensor goes from the caller to `left`, to and fro between `left` and `right`, and back: all hops over one transport."""
    nodes = [
        Node(INPUT, INPUT, GATEWAY, outputs={"x": PortSpec("x")}),
        Node(OUTPUT, OUTPUT, GATEWAY, inputs={"y": PortSpec("y")}),
        _echo_node("left", "left", operator),
        _echo_node("right", "right", operator),
    ]
    again, last = LayerSet(frozenset(range(num_layers - 1))), LayerSet(frozenset({num_layers - 1}))
    edges = [
        Edge(INPUT, "x", "left", "x", transport=transport, credits=8),
        Edge("left", "y", "right", "x", transport=transport, credits=8),
        Edge("right", "y", "left", "x", transport=transport, credits=8, layers=again, tag=TagStep("next_layer")),
        Edge("right", "y", OUTPUT, "y", transport=transport, credits=8, layers=last),
    ]
    return Ring(Graph.of(nodes, edges, processes=processes), 2 * num_layers + 1)


def chain(num_nodes: int = NUM_FUSED, num_layers: int = NUM_LAYERS) -> Ring:
    """The same within one worker: `num_nodes` operators in a row, fused into one firing, `num_layers` times over."""
    names = [f"echo{number}" for number in range(num_nodes)]
    nodes = [
        Node(INPUT, INPUT, GATEWAY, outputs={"x": PortSpec("x")}),
        Node(OUTPUT, OUTPUT, GATEWAY, inputs={"y": PortSpec("y")}),
        *(_echo_node(name, "worker") for name in names),
    ]
    again, last = LayerSet(frozenset(range(num_layers - 1))), LayerSet(frozenset({num_layers - 1}))
    ends = [(INPUT, "x", names[0], "x"), *((a, "y", b, "x") for a, b in pairwise(names))]
    edges = [Edge(*end, credits=8) for end in ends]
    edges += [
        Edge(names[-1], "y", names[0], "x", credits=8, layers=again, tag=TagStep("next_layer")),
        Edge(names[-1], "y", OUTPUT, "y", credits=8, layers=last),
    ]
    return Ring(Graph.of(nodes, edges, processes="one"), num_nodes * num_layers + 1)


async def measure(num_pairs: int, between: bool = True) -> AsyncIterator[Figure | str]:
    """The figures one by one, in microseconds; a text says what cannot be measured here, and why."""
    async for figure in within_a_process(num_pairs):
        yield figure
    if not between:
        return
    async with ZeroMQEcho() as peer:
        for transport in TRANSPORTS:
            reason = unavailable_reason(transport)
            if reason is not None:
                yield f"{transport}: {reason}"
                continue
            async for figure in between_channels(transport, peer, num_pairs):
                yield figure
            async for figure in between_processes(transport, peer, num_pairs):
                yield figure


async def within_a_process(num_pairs: int) -> AsyncIterator[Figure]:
    """Between workers that share a process, and between operators fused in one worker; the echo's tasks run in the same loop."""
    cases = (
        ("hop, two workers of one process", ring("one"), ECHO_TARGET),
        ("hop, two operators fused in one worker", chain(), ECHO_TARGET),
    )
    for name, made, target in cases:
        async with open_graph(made.graph) as graph:
            ours = calls_of(graph, made, payload_of(64))

            async def theirs() -> float:
                return 1e6 * await queue_echo_seconds(max(1, int(BLOCK_SECONDS / 7e-6)), object())

            values = await take_turns((ours, theirs), num_pairs)
        yield Figure.paired(name, "us", values[0], "asyncio.Queue echo", values[1], target)


async def between_channels(transport: str, peer: ZeroMQEcho, num_pairs: int) -> AsyncIterator[Figure]:
    """Round trips over the transport alone, as bare as the peer."""
    async with ChannelEcho(transport) as echo:
        for size, text in SIZES.items():
            payload = payload_of(size).numpy()
            values = await take_turns((echoes_of(echo, payload), echoes_of(peer, payload)), num_pairs)
            target = CHANNEL_TARGETS.get((transport, size))
            yield Figure.paired(f"channel round trip, {transport}, {text}", "us", values[0], "pyzmq asyncio", values[1], target)


async def between_processes(transport: str, peer: ZeroMQEcho, num_pairs: int) -> AsyncIterator[Figure]:
    """Round trips between two workers, each a process, at each size."""
    made = ring("many", transport)
    async with open_graph(made.graph) as graph:
        for size, text in SIZES.items():
            payload = payload_of(size)
            hop = calls_of(graph, made, payload)
            values = await take_turns((twice(hop), echoes_of(peer, payload.numpy())), num_pairs)
            target = ROUND_TRIP_TARGETS.get((transport, size))
            yield Figure.paired(f"actor round trip, {transport}, {text}", "us", values[0], "pyzmq asyncio", values[1], target)


def calls_of(graph: RunningGraph, made: Ring, payload: Any) -> Callable[[], Awaitable[float]]:
    """Measures one hop, in microseconds: calls of the graph for BLOCK_SECONDS, at least one."""

    async def measure_block() -> float:
        start, num_calls = time.perf_counter(), 0
        while (seconds := time.perf_counter() - start) < BLOCK_SECONDS or not num_calls:
            await graph(x=payload)
            num_calls += 1
        return 1e6 * seconds / (num_calls * made.num_hops)

    return measure_block


def twice(hop: Callable[[], Awaitable[float]]) -> Callable[[], Awaitable[float]]:
    async def measure_block() -> float:
        return 2 * await hop()

    return measure_block


class Echo(Protocol):
    """What sends a payload and gets it back."""

    async def round_trip_seconds(self, num_rounds: int, payload: Any) -> float:
        """The mean, or the median, of `num_rounds` one after the other."""
        ...


def echoes_of(peer: Echo, payload: Any) -> Callable[[], Awaitable[float]]:
    num_rounds = 1

    async def measure_block() -> float:
        nonlocal num_rounds
        seconds = await peer.round_trip_seconds(num_rounds, payload)
        num_rounds = max(1, int(BLOCK_SECONDS / seconds))
        return 1e6 * seconds

    return measure_block


def _echo_node(name: str, process: str, operator: str = "echo") -> Node:
    return Node(name, f"flowrt.bench.operators:{operator}", process, {"x": PortSpec("x", (_SPEC,))}, {"y": PortSpec("y", (_SPEC,))})


def payload_of(size: int) -> Any:
    import torch

    return torch.ones(size, dtype=torch.uint8)
