"""Places the processes of a graph on its hosts, and checks `hosts:` and `place:`. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from ipaddress import IPv4Network

from flowrt.document import Path_
from flowrt.errors import nearest
from flowrt.graph.model import Graph, role_of
from flowrt.graph.notation import format_ids, parse_ids
from flowrt.graph.placement import held_experts
from flowrt.graph.settings import HostSettings, PlaceRule

Experts = frozenset[tuple[int, int]]  # (layer, expert)


def rule_for(graph: Graph, process: str) -> PlaceRule:
    return graph.place.get(role_of(process), PlaceRule())


def place_processes(graph: Graph, hosts: HostSettings) -> dict[str, str]:
    """process -> its host. Expert servers first, each where the fewest replicas of its experts are; roles that are near or apart from
    another one after that one. Then the host with the fewest processes of the role, then of all, then the first one."""
    names, held, placed = hosts.names, _held(graph), dict[str, str]()

    def cost(process: str, host: str) -> tuple[int, ...]:
        rule, there = rule_for(graph, process), [other for other in placed if placed[other] == host]
        number = process.rpartition(".")[2]
        partners = [other for other in placed if role_of(other) == rule.near]
        partner = next((other for other in partners if other.rpartition(".")[2] == number), partners[0] if partners else "")
        return (
            sum(role_of(other) == rule.apart for other in there),
            bool(partner) and placed[partner] != host,
            sum(len(held[process] & held[other]) for other in there) if rule.spread else 0,
            sum(role_of(other) == role_of(process) for other in there),
            len(there),
        )

    def order(process: str) -> tuple[bool, bool]:
        rule = rule_for(graph, process)
        return bool(rule.near or rule.apart), not held[process]

    for process in sorted(graph.process_names(), key=order):
        allowed = [names[number] for number in rule_for(graph, process).hosts if number < len(names)] or names
        placed[process] = min(allowed, key=lambda host: cost(process, host))
    return {process: placed[process] for process in graph.process_names()}


def is_port_range(text: str) -> bool:
    first, _, last = text.partition("-")
    return first.isdecimal() and last.isdecimal() and 1024 <= int(first) < int(last) < 1 << 16


def is_network(text: str) -> bool:
    try:
        IPv4Network(text)
    except ValueError:
        return False
    return "/" in text


def host_resources(graph: Graph, host: str) -> dict[str, float]:
    """What the processes of a host need together."""
    total = dict[str, float]()
    for process in graph.process_names():
        if graph.host_of(process) == host:
            for resource, amount in rule_for(graph, process).resources.items():
                total[resource] = total.get(resource, 0.0) + amount
    return {resource: amount for resource, amount in total.items() if amount}


def check_hosts(graph: Graph) -> Iterator[tuple[Path_, str]]:
    """Yield (key, problem) of `hosts` and `place`."""
    roles = list(dict.fromkeys(map(role_of, graph.process_names())))
    if graph.hosts is None:
        for role in graph.place:
            yield ("place", role), "there is one host only; write hosts: too, or remove place:"
        return
    if graph.hosts.ports and not is_port_range(graph.hosts.ports):
        yield ("hosts", "ports"), f"{graph.hosts.ports!r} is not a range of ports; write FROM-TO, between 1024 and 65535"
    for number, network in enumerate(graph.hosts.trusted):
        if not is_network(network):
            yield ("hosts", "trusted", number), f"{network!r} is not an IPv4 network; write one such as 10.1.0.0/16"
    if graph.processes != "many":
        yield ("hosts",), f"processes: {graph.processes} puts workers together before hosts are chosen; write processes: many"
    for role, rule in graph.place.items():
        for key, other in (("", role), ("near", rule.near), ("apart", rule.apart)):
            if other and other not in roles:
                yield ("place", role, *filter(None, [key])), f"no process has the role {other!r}; {nearest(other, roles)}"
        for number in rule.hosts:
            if not 0 <= number < graph.hosts.count:
                yield ("place", role, "hosts"), f"there is no host {number}; the run has hosts 0 to {graph.hosts.count - 1}"
        for process in graph.process_names() if rule.apart else ():
            others = [name for name in graph.process_names() if role_of(name) == rule.apart]
            if role_of(process) == role and (
                shared := next((each for each in others if graph.host_of(each) == graph.host_of(process)), "")
            ):
                text = f"no host is left for {process}: {shared} is on {graph.host_of(process)} too"
                yield ("place", role, "apart"), f"{text}; raise hosts.count, or give {rule.apart} fewer hosts"
    yield from _check_spread(graph, graph.hosts)


def _check_spread(graph: Graph, hosts: HostSettings) -> Iterator[tuple[Path_, str]]:
    """Replicas of an expert are on as many hosts as they can be."""
    servers: dict[tuple[int, int], list[str]] = {}
    for process, held in _held(graph).items():
        for each in held if rule_for(graph, process).spread else ():
            servers.setdefault(each, []).append(process)
    together: dict[tuple[str, ...], list[int]] = {}
    for (_, expert), holders in servers.items():
        if len({graph.host_of(holder) for holder in holders}) < min(len(holders), len(rule_for(graph, holders[0]).hosts) or hosts.count):
            together.setdefault(tuple(holders), []).append(expert)
    for names, experts in together.items():
        where = " and ".join(f"{name} on {graph.host_of(name)}" for name in names)
        text = f"experts {format_ids(experts)} have two replicas on one host ({where})"
        yield ("place", role_of(names[0]), "spread"), f"{text}; use a multiple of {len(names)} servers, more hosts, or spread: false"
        return


def _held(graph: Graph) -> dict[str, Experts]:
    """The experts of each process, in every layer that some node distinguishes. A group that holds all of its own needs no replica."""
    options = [
        (node.process, node.options["experts"])
        for node in graph.nodes.values()
        if "experts" in node.options and _is_served(graph, node.name)
    ]
    layers = sorted({0}.union(*(parse_ids(text) for _, option in options if isinstance(option, dict) for text in option)))
    held: dict[str, set[tuple[int, int]]] = {process: set() for process in graph.process_names()}
    for process, option in options:
        held[process].update((layer, expert) for layer, ids in held_experts(option, layers).items() for expert in ids)
    return {process: frozenset(experts) for process, experts in held.items()}


def _is_served(graph: Graph, node: str) -> bool:
    """Whether other processes send requests to the node."""
    return any(edge.target == node and graph.crosses(edge) for edge in graph.edges.values())
