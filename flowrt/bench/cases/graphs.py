"""The graphs of the benchmarks: hops, streams, and rounds of many processes with many others. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

from flowrt.graph.model import GATEWAY, INPUT, OUTPUT, Edge, Graph, Node, PortSpec
from flowrt.graph.notation import LayerSet, TagStep
from flowrt.graph.settings import GraphLimits

OPERATORS = "flowrt.bench.cases.nodes"
CREDITS = 8  # of every edge: a fourth of them may gather before they go back
NUM_FUSED = 64
_BYTES = ("uint8[bytes]",)
_MAX_MESSAGE_BYTES = 1 << 26

Ports = Mapping[str, tuple[str, ...]]  # specs by port
End = tuple[str, str, str, str, dict[str, Any]]  # source and its port, target and its port, other fields of the edge


@dataclass(frozen=True)
class HopGraph:
    """A graph that passes a tensor on, and how many hops, or payloads, one call of it makes."""

    graph: Graph
    num_hops: int


@dataclass(frozen=True)
class RoundGraph:
    """A graph that makes one round per call, and its input `go` for an even round."""

    graph: Graph
    go: tuple[int, ...]


def ring(processes: Literal["one", "many"], transport: str = "auto", num_layers: int = 50, operator: str = "echo") -> HopGraph:
    """A tensor goes from the caller to `left`, to and fro between `left` and `right`, and back: every hop over one transport."""
    nodes = [_node(name, operator, name, {"x": _BYTES}, {"y": _BYTES}) for name in ("left", "right")]
    return HopGraph(_loop(nodes, num_layers, transport, processes), 2 * num_layers + 1)


def chain(num_nodes: int = NUM_FUSED, num_layers: int = 50) -> HopGraph:
    """Builds the same graph within one worker: `num_nodes` operators in a row, fused into one firing, `num_layers` times."""
    nodes = [_node(f"echo{number}", "echo", "worker", {"x": _BYTES}, {"y": _BYTES}) for number in range(num_nodes)]
    return HopGraph(_loop(nodes, num_layers, "auto", "one"), num_nodes * num_layers + 1)


def stream(transport: str, num_in_flight: int, num_layers: int = 20) -> HopGraph:
    """`left` sends bfloat16, `right` reads and requests more, `num_layers` times for each call."""
    go, x = {"go": ("int64[1]",)}, {"x": ("bfloat16[n]",)}
    nodes = [_node("left", "give", "left", go, x), _node("right", "take", "right", x, go)]
    return HopGraph(_loop(nodes, num_layers, transport, "many", GraphLimits(in_flight=num_in_flight)), num_layers)


def many_to_many(num_senders: int, num_receivers: int, num_bytes: int, transport: str = "auto", max_factor: int = 1) -> RoundGraph:
    """Every sender sends each receiver `num_bytes`. `max_factor`: one receiver may get so many times as much."""
    senders, receivers = _names("sender", num_senders), _names("receiver", num_receivers)
    to_ports = {name: (f"uint8[bytes{index}]",) for index, name in enumerate(_names("to", num_receivers))}
    from_ports = dict.fromkeys(_names("from", num_senders), _BYTES)
    nodes = [_node(name, "send", name, {"go": ("int64[4]",)}, to_ports) for name in senders]
    nodes += [_node(name, "receive", name, from_ports, {"times": ("float64[2]",)}) for name in receivers]
    ends: list[End] = [(INPUT, "go", name, "go", {}) for name in senders]
    ends += [(one, f"to{j}", other, f"from{i}", {}) for i, one in enumerate(senders) for j, other in enumerate(receivers)]
    ends += [(name, "times", OUTPUT, f"times{j}", {}) for j, name in enumerate(receivers)]
    limits = GraphLimits(in_flight=1, max_message_bytes=max(_MAX_MESSAGE_BYTES, num_bytes * max_factor))
    return RoundGraph(_graph(nodes, ends, transport, "many", limits), (num_receivers, num_bytes, -1, 1))


def rows_and_back(num_clients: int, num_servers: int, rows: int, columns: int, transport: str = "auto") -> RoundGraph:
    """Every client sends each server the same rows in bfloat16 and receives them back."""
    clients, servers = _names("client", num_clients), _names("server", num_servers)
    spec = (f"bfloat16[{rows},{columns}]",)
    to_ports, from_ports = (dict.fromkeys(_names(prefix, num_servers), spec) for prefix in ("to", "from"))
    nodes: list[Node] = []
    ends: list[End] = []
    for i, client in enumerate(clients):
        sender, receiver = f"{client}send", f"{client}receive"
        nodes.append(_node(sender, "send_rows", client, {"go": ("int64[3]",)}, to_ports))
        nodes.append(_node(receiver, "receive", client, from_ports, {"times": ("float64[2]",)}))
        ends += [(INPUT, "go", sender, "go", {}), (receiver, "times", OUTPUT, f"times{i}", {})]
        for j, server in enumerate(servers):
            name = f"{server}for{i}"
            nodes.append(_node(name, "echo_rows", server, {"x": spec}, {"y": spec}))
            ends += [(sender, f"to{j}", name, "x", {}), (name, "y", receiver, f"from{j}", {})]
    limits = GraphLimits(in_flight=1, max_message_bytes=_MAX_MESSAGE_BYTES)
    return RoundGraph(_graph(nodes, ends, transport, "many", limits), (num_servers, rows, columns))


def _names(kind: str, number: int) -> list[str]:
    return [f"{kind}{index}" for index in range(number)]


def _node(name: str, operator: str, process: str, inputs: Ports, outputs: Ports) -> Node:
    ins, outs = ({port: PortSpec(port, specs) for port, specs in side.items()} for side in (inputs, outputs))
    return Node(name, f"{OPERATORS}:{operator}", process, ins, outs)


def _loop(
    nodes: Sequence[Node], num_layers: int, transport: str, processes: Literal["one", "many"], limits: GraphLimits | None = None
) -> Graph:
    """A tensor goes through the nodes, each with one input and one output, `num_layers` times."""

    def end(source: Node, target: Node, **fields: Any) -> End:
        return (source.name, *source.outputs, target.name, *target.inputs, fields)  # type: ignore[return-value]  # one port each

    first, last = nodes[0], nodes[-1]
    (go,), (out,) = first.inputs, last.outputs
    repeats, last_layer = LayerSet(frozenset(range(num_layers - 1))), LayerSet(frozenset({num_layers - 1}))
    ends: list[End] = [(INPUT, go, first.name, go, {}), *(end(*pair) for pair in pairwise(nodes))]
    ends += [end(last, first, layers=repeats, tag=TagStep("next_layer")), (last.name, out, OUTPUT, out, {"layers": last_layer})]
    return _graph(nodes, ends, transport, processes, limits or GraphLimits())


def _graph(nodes: Sequence[Node], ends: Sequence[End], transport: str, processes: Literal["one", "many"], limits: GraphLimits) -> Graph:
    incoming = {port: PortSpec(port) for source, port, *_ in ends if source == INPUT}
    outgoing = {port: PortSpec(port) for _, _, target, port, _ in ends if target == OUTPUT}
    every = [Node(INPUT, INPUT, GATEWAY, outputs=incoming), Node(OUTPUT, OUTPUT, GATEWAY, inputs=outgoing), *nodes]
    edges = [Edge(*end[:4], transport=transport, credits=CREDITS, **end[4]) for end in ends]
    return Graph.of(every, edges, limits=limits, processes=processes)
