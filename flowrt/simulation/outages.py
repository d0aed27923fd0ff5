"""Computes when an expert had no replica that a group could use. Pure: starts and ends of servers in, time intervals out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from flowrt.graph.model import Graph
from flowrt.graph.placement import expert_map_of
from flowrt.operators.model_config import ModelConfig

Stretch = tuple[float, float]
Holders = frozenset[frozenset[str]]  # each inner set: the processes that hold a replica of one expert


def holders_of(graph: Graph, config: ModelConfig) -> dict[str, Holders]:
    """By group: for every expert of every layer the processes with a replica. Experts that the group holds itself are omitted."""
    found: dict[str, Holders] = {}
    for node in graph.nodes.values():
        if node.operator != "dispatch":
            continue
        ports = {edge.source_port: graph.nodes[edge.target].process for edge in graph.edges.values() if edge.source == node.name}
        expert_map = expert_map_of(graph, node.name, config.moe_layers, config.num_experts)
        tables = [expert_map.table(layer) for layer in config.moe_layers]
        holders = {frozenset(ports[f"server{server}"] for server in servers) for table in tables for servers in table if servers}
        found[node.process] = frozenset(each for each in holders if node.process not in each)
    return found


class Outages:
    """Records outages. Call `down` and `up` in the order of their times; both are idempotent."""

    def __init__(self, holders: Mapping[str, Holders]) -> None:
        self._holders = holders
        self._down: dict[tuple[str, str], list[Stretch]] = {}  # (group, server) -> over and done
        self._since: dict[tuple[str, str], float] = {}

    def down(self, server: str, now: float, by: str | None = None) -> None:
        """From now on the group `by` (None: no group) cannot use this incarnation of the server."""
        for group in self._holders if by is None else (by,):
            self._since.setdefault((group, server), now)

    def is_down(self, group: str, server: str) -> bool:
        return (group, server) in self._since

    def up(self, group: str, server: str, now: float) -> None:
        """From now on the group can use a new incarnation of the server."""
        since = self._since.pop((group, server), None)
        if since is not None:
            self._down.setdefault((group, server), []).append((since, now))

    def stretches(self, group: str, now: float) -> list[Stretch]:
        """The merged intervals until now in which all holders of at least one expert were down."""
        found: list[Stretch] = []
        for holders in self._holders.get(group, ()):
            common: list[Stretch] = [(float("-inf"), float("inf"))]
            for server in holders:
                own = list(self._down.get((group, server), ()))
                if (since := self._since.get((group, server))) is not None:
                    own.append((since, now))
                common = _common(common, own)
            found += common
        return _merged(found)

    def longest(self, group: str, since: float, now: float) -> float:
        """The length of the longest interval that ended at or after `since`; 0 if there is none."""
        return max((end - begin for begin, end in self.stretches(group, now) if end >= since), default=0.0)


def _merged(stretches: Iterable[Stretch]) -> list[Stretch]:
    merged: list[Stretch] = []
    for begin, end in sorted(stretches):
        if merged and begin <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((begin, end))
    return merged


def _common(ones: Iterable[Stretch], others: Iterable[Stretch]) -> list[Stretch]:
    others = list(others)
    both = [(max(one[0], other[0]), min(one[1], other[1])) for one in ones for other in others]
    return [(begin, end) for begin, end in both if begin < end]
