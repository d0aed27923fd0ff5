"""Computes when an expert had no replica that a group could use. Pure: starts and ends of servers in, time intervals out."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from flowrt.graph.model import Graph
from flowrt.graph.placement import expert_map_of, servers_behind, servers_of
from flowrt.operators.model_config import ModelConfig

Interval = tuple[float, float]  # begin, end
Holders = frozenset[frozenset[str]]  # each inner set: the processes that hold a replica of one expert


def holders_of(graph: Graph, config: ModelConfig) -> dict[str, Holders]:
    """By group: for every expert of every layer the processes with a replica. Experts that the group holds itself are omitted."""
    found: dict[str, Holders] = {}
    for node in graph.nodes.values():
        if not node.kind.dispatches or node.kind.forwards:
            continue
        processes = servers_of(graph, node.name)
        expert_map = expert_map_of(graph, node.name, config.moe_layers, config.num_experts)
        expert_map = expert_map.without_servers(servers_behind(graph, node.name))
        tables = [expert_map.table(layer) for layer in config.moe_layers]
        holders = {frozenset(processes[each] for each in servers) - {*graph.leaving} for table in tables for servers in table if servers}
        found[node.process] = frozenset(each for each in holders if node.process not in each)
    return found


class Outages:
    """Records outages. Call `down` and `up` in the order of their times; both are idempotent."""

    def __init__(self, holders: Mapping[str, Holders]) -> None:
        self._holders = holders
        self._down: defaultdict[str, set[str]] = defaultdict(set)  # group -> servers that it cannot use now
        self._ended: defaultdict[str, list[Interval]] = defaultdict(list)  # group -> outages that are over
        self._since: dict[str, float] = {}  # group -> begin of the current outage

    def place(self, holders: Mapping[str, Holders], now: float) -> None:
        """From now on these processes hold the experts."""
        self._holders = holders
        for group in holders:
            self._update(group, now)

    def down(self, server: str, now: float, by: str | None = None) -> None:
        """From now on the group `by` (None: no group) cannot use this incarnation of the server."""
        for group in self._holders if by is None else (by,):
            self._down[group].add(server)
            self._update(group, now)

    def is_down(self, group: str, server: str) -> bool:
        return server in self._down[group]

    def up(self, group: str, server: str, now: float) -> None:
        """From now on the group can use a new incarnation of the server."""
        self._down[group].discard(server)
        self._update(group, now)

    def intervals(self, group: str, now: float) -> list[Interval]:
        """The intervals until now in which all holders of at least one expert were down."""
        current = [(self._since[group], now)] if group in self._since else []
        return self._ended[group] + current

    def longest(self, group: str, since: float, now: float) -> float:
        """The length of the longest interval that ended at or after `since`; 0 if there is none."""
        return max((end - begin for begin, end in self.intervals(group, now) if end >= since), default=0.0)

    def _update(self, group: str, now: float) -> None:
        """Begin or end the outage of a group. One that begins at the end of the last continues it."""
        is_out = any(servers <= self._down[group] for servers in self._holders.get(group, ()))
        ended = self._ended[group]
        if is_out and group not in self._since:
            self._since[group] = ended.pop()[0] if ended and ended[-1][1] == now else now
        elif not is_out and group in self._since:
            ended.append((self._since.pop(group), now))
