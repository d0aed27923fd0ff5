"""Rounds of M processes with N others: the graphs, and what a round of ours takes.

Here: Rounds, `many_to_many`, `rows_and_back`, `block_of`, `nearest_rank`. Not here: gloo's side (gloo.py), what is compared and the
targets (m2n.py, transports.py), what the nodes do (operators.py).

A round of ours goes from the first sender's start to the last receiver's end: its payloads are all here, read and checked. Both are
taken inside the operators, as a rank of gloo takes its own between the barrier and its last byte.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from flowrt.api import RunningGraph
from flowrt.graph.model import GATEWAY, INPUT, OUTPUT, Edge, Graph, GraphLimits, Node, PortSpec

OPERATORS = "flowrt.bench.operators"
_MAX_MESSAGE_BYTES = 1 << 26
CREDITS = 8  # of every edge: a fourth of them may gather before they go back


@dataclass(frozen=True)
class Rounds:
    """A graph that makes one round per call, and what its input `go` says of a plain one."""

    graph: Graph
    go: tuple[int, ...]


def many_to_many(num_senders: int, num_receivers: int, num_bytes: int, transport: str = "auto", largest_factor: int = 1) -> Rounds:
    """Every sender gives every receiver `num_bytes`. `largest_factor`: one of them may be given so many times as much."""
    senders, receivers = _names("sender", num_senders), _names("receiver", num_receivers)
    nodes = [Node(name, f"{OPERATORS}:send", name, {"go": PortSpec("go", ("int64[4]",))}, _uneven_ports(num_receivers)) for name in senders]
    nodes += [
        Node(name, f"{OPERATORS}:receive", name, _ports("from", num_senders, "uint8[bytes]"), {"times": PortSpec("times", ("float64[2]",))})
        for name in receivers
    ]
    ends = [(INPUT, "go", name, "go") for name in senders]
    ends += [(one, f"to{j}", other, f"from{i}") for i, one in enumerate(senders) for j, other in enumerate(receivers)]
    ends += [(name, "times", OUTPUT, f"times{j}") for j, name in enumerate(receivers)]
    largest = max(_MAX_MESSAGE_BYTES, num_bytes * largest_factor)
    return Rounds(_graph(nodes, ends, transport, num_receivers, largest), (num_receivers, num_bytes, -1, 1))


def rows_and_back(num_clients: int, num_servers: int, rows: int, columns: int, transport: str = "auto") -> Rounds:
    """Every client gives every server the same rows in bfloat16 and gets them back."""
    clients, servers = _names("client", num_clients), _names("server", num_servers)
    spec = "bfloat16[rows,columns]"
    nodes = []
    ends = []
    for i, client in enumerate(clients):
        nodes += [
            Node(f"{client}send", f"{OPERATORS}:send_rows", client, {"go": PortSpec("go", ("int64[3]",))}, _ports("to", num_servers, spec)),
            Node(
                f"{client}receive",
                f"{OPERATORS}:receive",
                client,
                _ports("from", num_servers, spec),
                {"times": PortSpec("times", ("float64[2]",))},
            ),
        ]
        ends += [(INPUT, "go", f"{client}send", "go"), (f"{client}receive", "times", OUTPUT, f"times{i}")]
        for j, server in enumerate(servers):
            name = f"{server}for{i}"
            nodes.append(Node(name, f"{OPERATORS}:echo_rows", server, {"x": PortSpec("x", (spec,))}, {"y": PortSpec("y", (spec,))}))
            ends += [(f"{client}send", f"to{j}", name, "x"), (name, "y", f"{client}receive", f"from{j}")]
    return Rounds(_graph(nodes, ends, transport, num_clients), (num_servers, rows, columns))


async def block_of(graph: RunningGraph, go: Sequence[int], num_rounds: int) -> list[list[float]]:
    """`num_rounds` rounds one after the other: for each, the seconds until every receiver had everything, from the round's start."""
    import torch

    rounds = []
    for _ in range(num_rounds):
        answer = await graph(go=torch.tensor(go))
        times = [each.tolist() for each in answer.values()] if isinstance(answer, dict) else [answer.tolist()]
        start = min(first for first, _ in times)
        rounds.append([end - start for _, end in times])
    return rounds


def slowest(graph: RunningGraph, go: Sequence[int], num_rounds: int) -> Callable[[], Awaitable[list[float]]]:
    """Measures the seconds of `num_rounds` rounds."""

    async def measure() -> list[float]:
        return [max(ends) for ends in await block_of(graph, go, num_rounds)]

    return measure


def nearest_rank(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of all do not exceed."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def _names(kind: str, number: int) -> list[str]:
    return [f"{kind}{index}" for index in range(number)]


def _ports(prefix: str, number: int, *specs: str) -> dict[str, PortSpec]:
    return {name: PortSpec(name, specs) for name in _names(prefix, number)}


def _uneven_ports(number: int) -> dict[str, PortSpec]:
    """Of any sizes: one of the receivers may be given more than the others."""
    return {f"to{index}": PortSpec(f"to{index}", (f"uint8[bytes{index}]",)) for index in range(number)}


def _graph(
    nodes: Sequence[Node], ends: Sequence[tuple[str, str, str, str]], transport: str, num_outputs: int, largest: int = _MAX_MESSAGE_BYTES
) -> Graph:
    every = [
        Node(INPUT, INPUT, GATEWAY, outputs={"go": PortSpec("go")}),
        Node(OUTPUT, OUTPUT, GATEWAY, inputs=_ports("times", num_outputs)),
        *nodes,
    ]
    edges = [Edge(*each, transport=transport, credits=CREDITS) for each in ends]
    limits = GraphLimits(in_flight=1, max_message_bytes=largest)
    return Graph.of(every, edges, limits=limits, processes="many")
