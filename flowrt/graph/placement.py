"""Assigns experts to expert servers: the even default, an uneven `placement:`, and the options of nodes.

In a node's options, held experts are "0-5" (alike in every MoE layer) or {"0-2": "0-5", "3": "1-7"} by layer (a layer left out: none).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from flowrt.graph.derived import derived
from flowrt.graph.model import Graph
from flowrt.graph.notation import format_ids, parse_ids
from flowrt.graph.numerics import is_strict, strict_exchanges
from flowrt.reliability.expert_map import ExpertMap, Replicas, servers_by_expert

Held = dict[int, tuple[int, ...]]  # MoE layer -> the experts held, ascending


@derived
def has_servers(graph: Graph) -> bool:
    """Whether requests for experts leave the process of their group."""
    return any(graph.nodes[edge.target].kind.serves and graph.crosses(edge) for edge in graph.edges.values())


def even_placement(num_experts: int, num_servers: int, replicas: int) -> list[tuple[int, ...]]:
    """The experts of each server: every expert on `replicas` servers, with counts that differ by at most one.

    The list of experts, repeated `replicas` times, is cut into one run per server. No run is longer than the list, so no server
    holds an expert twice. Needs replicas <= num_servers <= num_experts * replicas.
    """
    if not 1 <= replicas <= num_servers <= num_experts * replicas:
        raise ValueError(f"{num_servers} servers cannot hold {replicas} replicas of {num_experts} experts evenly")
    total = num_experts * replicas
    cuts = [server * total // num_servers for server in range(num_servers + 1)]
    return [tuple(sorted(slot % num_experts for slot in range(cuts[s], cuts[s + 1]))) for s in range(num_servers)]


def balanced_placement(loads: Sequence[float], num_servers: int, num_slots: int, groups: int = 1, nodes: int = 1) -> list[tuple[int, ...]]:
    """The experts of each server for these loads: `num_slots` replicas in all, equally many on each server, none holding an expert twice.

    Servers are spread over `nodes` in order. Equal `groups` of experts stay on one node each, so that routing limited to groups is limited
    to nodes (DeepSeek's EPLB). Extra replicas go to the experts with the most load per replica; the heaviest replicas are placed first,
    each on the lightest server with a free slot, and then swapped. Raises ValueError for numbers that do not divide, or too few slots.
    """
    num_experts, servers, slots = len(loads), num_servers // nodes, num_slots // nodes
    divides = num_servers % nodes == num_slots % num_servers == groups % nodes == num_experts % groups == 0
    if not divides or not num_experts // nodes <= slots <= num_experts // nodes * servers:
        numbers = f"{num_experts} experts in {groups} groups, {num_slots} slots, {num_servers} servers, {nodes} nodes"
        raise ValueError(f"{numbers}: all must divide evenly, with a slot for each expert and at most one per server")
    size = num_experts // groups
    members = [range(group * size, (group + 1) * size) for group in range(groups)]
    placed: list[tuple[int, ...]] = []
    for node in _pack([sum(loads[expert] for expert in group) for group in members], range(groups), nodes, groups // nodes):
        experts = [expert for group in node for expert in members[group]]
        replicas = dict.fromkeys(experts, 1)
        for _ in range(slots - len(experts)):
            replicas[max((e for e in experts if replicas[e] < servers), key=lambda e: loads[e] / replicas[e])] += 1
        held = [expert for expert in experts for _ in range(replicas[expert])]
        packed = _pack([loads[expert] / replicas[expert] for expert in held], held, servers, slots // servers)
        placed += [tuple(sorted(held[index] for index in server)) for server in packed]
    return placed


def _pack(loads: Sequence[float], names: Sequence[int], num_bins: int, size: int) -> list[list[int]]:
    """Indices of loads by bin, `size` in each and no name twice: the heaviest first, each into the lightest bin; then swaps with the worst
    bin, as long as one helps."""
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    sums, held = [0.0] * num_bins, [set[int]() for _ in range(num_bins)]

    def repeats(number: int, except_: int = -1, name: int = -1) -> int:
        """How many names come twice in a bin, after it has got `name` in place of an index."""
        found = [names[index] for index in bins[number] if index != except_]
        return len(found) + (name >= 0) - len({*found, name} if name >= 0 else set(found))

    for index in sorted(range(len(loads)), key=lambda index: -loads[index]):
        open_ = (number for number in range(num_bins) if len(bins[number]) < size)
        best = min(open_, key=lambda number: (names[index] in held[number], sums[number]))
        bins[best].append(index)
        held[best].add(names[index])
        sums[best] += loads[index]
    while True:
        worst = max(range(num_bins), key=lambda number: (repeats(number), sums[number]))
        limit, best_swap = (repeats(worst), sums[worst] - 1e-12), None
        for own in bins[worst]:
            for number in range(num_bins):
                for other in bins[number] if number != worst else ():
                    more = loads[other] - loads[own]
                    heavier = max(sums[worst] + more, sums[number] - more)
                    if heavier < limit[1] or limit[0]:
                        same = max(repeats(worst, own, names[other]), repeats(number, other, names[own]))
                        if (same, heavier) < limit:
                            limit, best_swap = (same, heavier), (own, number, other)
        if best_swap is None:
            return bins
        own, number, other = best_swap
        bins[worst][bins[worst].index(own)], bins[number][bins[number].index(other)] = other, own
        sums[worst] += loads[other] - loads[own]
        sums[number] += loads[own] - loads[other]


def held_experts(option: Any, moe_layers: Sequence[int], num_experts: int | None = None) -> Held:
    """An option as layer -> experts, for every MoE layer. Raises ValueError with a text for the user.

    With `num_experts`, this includes ids of experts that the model does not have.
    """
    if isinstance(option, str | int) and not isinstance(option, bool):
        held = dict.fromkeys(moe_layers, parse_ids(option))
    elif isinstance(option, Mapping):
        held = _held_by_layer(option, moe_layers)
    else:
        raise ValueError(f"{option!r} names no experts; write '0-5', or by layer {{'0-2': '0-5', '3': '1-7'}}")
    for ids in set(held.values()):
        if num_experts is not None and ids and ids[-1] >= num_experts:
            raise ValueError(f"there is no expert {ids[-1]}; the model has experts 0 to {num_experts - 1}")
    return held


def _held_by_layer(option: Mapping[Any, Any], moe_layers: Sequence[int]) -> Held:
    held: Held = dict.fromkeys(moe_layers, ())
    seen: set[int] = set()
    for layers, ids in option.items():
        if not isinstance(ids, str | int) or isinstance(ids, bool):
            raise ValueError(f"{ids!r} names no experts; write '0-5'")
        for layer in parse_ids(layers):
            if layer in seen:
                raise ValueError(f"layer {layer} is given twice; name each layer once")
            if layer not in held:
                raise ValueError(f"layer {layer} has no experts; the MoE layers are {format_ids(moe_layers)}")
            seen.add(layer)
            held[layer] = parse_ids(ids)
    return held


def weight_set(graph: Graph, process: str) -> str:
    """Names the weights of a process: processes of one host whose names are equal can share the memory of their experts, and what the
    first one has found out about the weights. Empty where the process shares nothing: it has no weights, computes on another device, or
    the graph file says so."""
    if graph.model is None or not graph.reliability.share_weights or graph.devices.get(process, "cpu") != "cpu":
        return ""
    nodes = graph.nodes_of(process)
    others = {node.operator for node in nodes if node.kind.parts and not node.kind.holds_experts}
    proven = [name for name, has in (("strict", is_strict(graph, process)), ("exchange", process in strict_exchanges(graph))) if has]
    return "; ".join([*proven, *sorted(others), *(str(node.options["experts"]) for node in nodes if node.kind.holds_experts)])


def held_option(held: Held) -> str | dict[str, str]:
    """The inverse of `held_experts`, as short as it can be."""
    if len(set(held.values())) <= 1:
        return format_ids(next(iter(held.values()), ()))
    layers: dict[tuple[int, ...], list[int]] = {}
    for layer, ids in held.items():
        layers.setdefault(ids, []).append(layer)
    return {format_ids(numbers): format_ids(ids) for ids, numbers in layers.items() if ids}


def experts_map(held: Mapping[int, Held], num_experts: int) -> ExpertMap:
    """The map of server -> held experts by layer. Raises ValueError for an expert id that is too large."""
    tables: dict[int, Replicas] = {}
    made: dict[tuple[tuple[int, ...], ...], Replicas] = {}  # most layers are equal
    for layer in sorted({layer for by_layer in held.values() for layer in by_layer}):
        servers = {server: by_layer[layer] for server, by_layer in held.items()}
        key = tuple(servers.values())
        if key not in made:
            made[key] = servers_by_expert(servers, num_experts)
        tables[layer] = made[key]
    if len(set(tables.values())) == 1:
        return ExpertMap(next(iter(tables.values())))
    return ExpertMap(((),) * num_experts, tables)


def server_nodes(graph: Graph, dispatch: str) -> dict[int, str]:
    """The nodes to which the ports "server<s>" of a dispatch node lead, by s."""
    edges = [edge for edge in graph.edges_from(dispatch) if edge.source_port.startswith("server")]
    return {int(edge.source_port.removeprefix("server")): edge.target for edge in edges}


def servers_of(graph: Graph, dispatch: str) -> dict[int, str]:
    """The processes of the servers of a dispatch node, by their numbers."""
    return {server: graph.nodes[name].process for server, name in server_nodes(graph, dispatch).items()}


def servers_behind(graph: Graph, dispatch: str) -> dict[int, frozenset[int]]:
    """Of a dispatch node: the number of each trampoline -> those of the servers behind it."""
    nodes = server_nodes(graph, dispatch)
    behind = {number: server_nodes(graph, name).values() for number, name in nodes.items() if graph.nodes[name].kind.forwards}
    return {number: frozenset(server for server, name in nodes.items() if name in names) for number, names in behind.items()}


def expert_map_of(graph: Graph, dispatch: str, moe_layers: Sequence[int], num_experts: int) -> ExpertMap:
    """The first map of the node named `dispatch`: its port "server<s>" leads to server s."""
    servers: Mapping[str, Any] = graph.nodes[dispatch].options["servers"]
    return experts_map({int(server): held_experts(option, moe_layers) for server, option in servers.items()}, num_experts)
