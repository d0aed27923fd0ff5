"""What a message costs: hops within a process beside asyncio queues, round trips between processes beside pyzmq."""

from __future__ import annotations

from typing import Any

from flowrt.api import RunningGraph, open_graph
from flowrt.bench.cases.graphs import HopGraph, chain, ring
from flowrt.bench.measure.benchmark import BLOCK_SECONDS, Measure, Results, Trial, seconds_per_call
from flowrt.bench.peers.channels import channel_echo
from flowrt.bench.peers.echo import PYZMQ, measure_echo, queue_echo_seconds, zeromq_echo
from flowrt.bench.report.figures import Target
from flowrt.transports.registry import unavailable_reason

# A hop to an asyncio.Queue echo: there and back, 5 to 8 us.
ECHO_TARGET, FUSED_TARGET = Target(2.0), Target(1.5)
TRANSPORTS = ("shm", "zmq")
SIZES = {64: "64 B", 64 << 10: "64 KiB", 1 << 20: "1 MiB"}
# Round trips to pyzmq's asyncio sockets over ipc.
ACTOR_TARGETS = {
    ("shm", 64): Target(0.5),
    ("shm", 64 << 10): Target(0.5),
    ("shm", 1 << 20): Target(0.6),
    ("zmq", 64): Target(1.2),
    ("zmq", 1 << 20): Target(1.3),
}
CHANNEL_TARGETS = {("shm", 64): Target(0.25), ("shm", 64 << 10): Target(1.0)}


async def measure(within_only: bool = False) -> Results:
    """Figures in microseconds; a note names each transport that cannot be measured here, with the reason."""
    for name, hops, target in (
        ("hop, two workers of one process", ring("one"), ECHO_TARGET),
        ("hop, two operators fused in one worker", chain(), FUSED_TARGET),
    ):
        async with open_graph(hops.graph) as graph:
            yield Trial.paired(name, "us", measure_hop(graph, hops, payload_of(64)), "asyncio.Queue echo", _queue_echo, target)
    if within_only:
        return
    async with zeromq_echo() as peer:
        for transport in TRANSPORTS:
            if (reason := unavailable_reason(transport)) is not None:
                yield f"{transport}: {reason}"
                continue
            hops = ring("many", transport)
            async with channel_echo(transport) as echo, open_graph(hops.graph) as graph:
                for size, text in SIZES.items():
                    payload = payload_of(size)
                    theirs = measure_echo(peer, payload.numpy())
                    # Over the transport alone, as bare as the peer; then from actor to actor.
                    about, key = f"round trip, {transport}, {text}", (transport, size)
                    bare, whole = measure_echo(echo, payload.numpy()), measure_hop(graph, hops, payload, 2)
                    yield Trial.paired(f"channel {about}", "us", bare, PYZMQ, theirs, CHANNEL_TARGETS.get(key))
                    yield Trial.paired(f"actor {about}", "us", whole, PYZMQ, theirs, ACTOR_TARGETS.get(key))


async def _queue_echo() -> float:
    return 1e6 * await queue_echo_seconds(max(1, int(BLOCK_SECONDS / 7e-6)), object())


def measure_hop(graph: RunningGraph, hops: HopGraph, payload: Any, num_hops: int = 1) -> Measure[float]:
    """Microseconds of `num_hops` hops; a round trip is two."""

    async def measure() -> float:
        return 1e6 * num_hops * await seconds_per_call(lambda: graph(x=payload)) / hops.num_hops

    return measure


def payload_of(size: int) -> Any:
    import torch

    return torch.ones(size, dtype=torch.uint8)
