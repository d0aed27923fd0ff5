"""Which expert servers hold a copy of which expert. Pure values: changing a map makes a new one with the next version.

Here: ExpertMap. Not here: where copies should lie (flowrt/graph/placement.py), who is alive (the detector), cutting rows by the map
(operators/dispatch.py). Called by the attention workers, which make their tables of copies from it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

Copies = tuple[tuple[int, ...], ...]  # expert -> the servers that hold it, ascending; () when none does


@dataclass(frozen=True)
class ExpertMap:
    """The copies of every expert, alike in all layers but for those named in `by_layer`.

    `version` grows by one with each change.
    """

    copies: Copies
    by_layer: Mapping[int, Copies] = field(default_factory=dict)
    version: int = 0

    def __post_init__(self) -> None:
        for table in (self.copies, *self.by_layer.values()):
            if len(table) != len(self.copies):
                raise ValueError(f"a layer has {len(table)} experts where others have {len(self.copies)}; give every layer the same number")
            for expert, servers in enumerate(table):
                if any(server < 0 for server in servers) or list(servers) != sorted(set(servers)):
                    raise ValueError(f"expert {expert} lies on servers {list(servers)}; give each server once, ascending, from 0")

    @classmethod
    def from_held(cls, held: Mapping[int, Sequence[int]], num_experts: int, version: int = 0) -> ExpertMap:
        """Of server -> the experts it holds, alike in all layers. Raises ValueError for an expert id that is too large."""
        return cls(invert(held, num_experts), version=version)

    @property
    def num_experts(self) -> int:
        return len(self.copies)

    @property
    def servers(self) -> tuple[int, ...]:
        """Every server that holds something, ascending."""
        tables = (self.copies, *self.by_layer.values())
        return tuple(sorted({server for table in tables for servers in table for server in servers}))

    def servers_of(self, expert: int, layer: int | None = None) -> tuple[int, ...]:
        """The servers with a copy of `expert` (in `layer`), ascending; () when none is left."""
        return self.table(layer)[expert]

    def table(self, layer: int | None = None) -> Copies:
        """The whole layer: expert -> servers, as flowrt.operators.dispatch.CopyTable.from_lists takes it."""
        return self.copies if layer is None else self.by_layer.get(layer, self.copies)

    def missing(self, layer: int | None = None) -> tuple[int, ...]:
        """Experts without any copy: while there are some, rows for them have nowhere to go."""
        return tuple(expert for expert, servers in enumerate(self.table(layer)) if not servers)

    def without(self, server: int) -> ExpertMap:
        """The next version, in which `server` holds nothing. The same map if it held nothing."""
        if server not in self.servers:
            return self

        def others(table: Copies) -> Copies:
            return tuple(tuple(other for other in servers if other != server) for servers in table)

        return ExpertMap(others(self.copies), {layer: others(table) for layer, table in sorted(self.by_layer.items())}, self.version + 1)


def invert(held: Mapping[int, Sequence[int]], num_experts: int) -> Copies:
    """server -> experts turned into expert -> servers. Raises ValueError for an expert id that is too large."""
    servers_of: list[set[int]] = [set() for _ in range(num_experts)]
    for server, experts in held.items():
        for expert in experts:
            if not 0 <= expert < num_experts:
                raise ValueError(f"server {server} cannot hold expert {expert}; this model has experts 0 to {num_experts - 1}")
            servers_of[expert].add(server)
    return tuple(tuple(sorted(servers)) for servers in servers_of)
