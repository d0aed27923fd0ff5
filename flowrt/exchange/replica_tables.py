"""Replica tables by layer, for one state of the expert map."""

from __future__ import annotations

import torch

from flowrt.operators.replica_table import ReplicaTable
from flowrt.reliability.expert_map import ExpertMap, Replicas


class ReplicaTables:
    """Tables made at their first use. Equal layers share one. `avoided`: servers that get nothing where another one holds a replica."""

    def __init__(self, expert_map: ExpertMap, avoided: frozenset[int], num_servers: int, device: torch.device | str) -> None:
        self._map, self._avoided, self._num_servers, self._device = expert_map, avoided, num_servers, device
        self._by_layer: dict[int, ReplicaTable] = {}
        self._made: dict[Replicas, ReplicaTable] = {}

    def of(self, layer: int) -> ReplicaTable:
        table = self._by_layer.get(layer)
        if table is None:
            replicas = self._map.table(layer)
            if self._avoided:
                replicas = tuple(tuple(server for server in servers if server not in self._avoided) or servers for servers in replicas)
            table = self._made.get(replicas)
            if table is None:
                table = self._made[replicas] = ReplicaTable.from_lists(replicas, self._num_servers, self._device)
            self._by_layer[layer] = table
        return table
