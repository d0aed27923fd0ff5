"""Maps each expert to the expert servers that hold a replica of it. Pure values: a change returns a new map.

The placement of replicas is in flowrt/graph/placement.py; operators/dispatch.py partitions rows by the map.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field

Replicas = tuple[tuple[int, ...], ...]  # expert -> the servers that hold it, ascending; () if no server holds it


@dataclass(frozen=True)
class ExpertMap:
    """The replicas of every expert. All layers share `replicas`, except the layers in `by_layer`."""

    replicas: Replicas
    by_layer: Mapping[int, Replicas] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for table in (self.replicas, *self.by_layer.values()):
            if len(table) != len(self.replicas):
                raise ValueError(f"a layer has {len(table)} experts, expected {len(self.replicas)}; give every layer the same number")
            for expert, servers in enumerate(table):
                if any(server < 0 for server in servers) or list(servers) != sorted(set(servers)):
                    raise ValueError(f"expert {expert} lies on servers {list(servers)}; give each server once, ascending, from 0")

    @property
    def num_experts(self) -> int:
        return len(self.replicas)

    @property
    def servers(self) -> tuple[int, ...]:
        """All servers that hold at least one expert, ascending."""
        tables = (self.replicas, *self.by_layer.values())
        return tuple(sorted({server for table in tables for servers in table for server in servers}))

    def servers_of(self, expert: int, layer: int | None = None) -> tuple[int, ...]:
        """The servers with a replica of `expert` (in `layer`), ascending; () if none is left."""
        return self.table(layer)[expert]

    def table(self, layer: int | None = None) -> Replicas:
        """The table of a whole layer: expert -> servers, as ReplicaTable.from_lists in flowrt.operators takes it."""
        return self.replicas if layer is None else self.by_layer.get(layer, self.replicas)

    def missing(self, layer: int | None = None) -> tuple[int, ...]:
        """The unavailable experts: no server can take rows for them."""
        return tuple(expert for expert, servers in enumerate(self.table(layer)) if not servers)

    def without_servers(self, servers: Iterable[int]) -> ExpertMap:
        """Returns a map in which these servers hold no expert; the same map if they held none."""
        removed = {*servers}.intersection(self.servers)
        return self._kept(lambda server, _: server not in removed) if removed else self

    def reached_through(self, behind: Mapping[int, Collection[int]]) -> ExpertMap:
        """Returns a map in which a server with others behind it holds only experts that one of those holds."""
        return self._kept(lambda server, holders: server not in behind or not holders.isdisjoint(behind[server])) if behind else self

    def _kept(self, is_kept: Callable[[int, Set[int]], bool]) -> ExpertMap:
        """Returns a map with the replicas for which `is_kept(server, all servers with a replica)`."""

        def kept(table: Replicas) -> Replicas:
            return tuple(tuple(server for server in servers if is_kept(server, {*servers})) for servers in table)

        return ExpertMap(kept(self.replicas), {layer: kept(table) for layer, table in sorted(self.by_layer.items())})


def servers_by_expert(held: Mapping[int, Sequence[int]], num_experts: int) -> Replicas:
    """Inverts server -> experts into expert -> servers. Raises ValueError for an expert id that is too large."""
    servers_of: list[set[int]] = [set() for _ in range(num_experts)]
    for server, experts in held.items():
        for expert in experts:
            if not 0 <= expert < num_experts:
                raise ValueError(f"server {server} cannot hold expert {expert}; this model has experts 0 to {num_experts - 1}")
            servers_of[expert].add(server)
    return tuple(tuple(sorted(servers)) for servers in servers_of)
