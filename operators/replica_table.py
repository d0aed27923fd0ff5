"""Holds which servers have a replica of each expert of a layer, as tensors for the kernels that partition pairs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import torch
from torch import Tensor

UNAVAILABLE = -1  # the server number of an unavailable expert
PartFields: TypeAlias = tuple[int, Tensor, Tensor, Tensor, Tensor, Tensor]  # of dispatch.Part, in order


@dataclass(frozen=True, eq=False)
class ReplicaTable:
    """The servers that hold a replica of each expert of a layer: servers_EB (int64, unused places repeat the first), num_replicas_E.

    An unavailable expert has the server UNAVAILABLE. Its pairs form a part of that server, which cannot be sent."""

    servers_EB: Tensor
    num_replicas_E: Tensor
    num_servers: int
    is_complete: bool = True  # every expert has a replica

    @cached_property
    def replicas(self) -> list[list[int]]:
        """The servers of each expert, on the host."""
        numbers: list[int] = self.num_replicas_E.tolist()
        return [servers[:number] for servers, number in zip(self.servers_EB.tolist(), numbers, strict=True)]

    @classmethod
    def from_lists(cls, replicas: Sequence[Sequence[int]], num_servers: int, device: torch.device | str = "cpu") -> ReplicaTable:
        """`replicas[e]` are the servers that hold expert e, in turn order. Raises ValueError for a server number that does not exist."""
        for expert, servers in enumerate(replicas):
            if not all(0 <= server < num_servers for server in servers):
                raise ValueError(f"expert {expert} has replicas on servers {list(servers)}; there are servers 0 to {num_servers - 1}")
        is_complete = all(replicas)
        replicas = [servers or (UNAVAILABLE,) for servers in replicas]
        width = max(len(servers) for servers in replicas)
        table = torch.tensor([[*servers, *[servers[0]] * (width - len(servers))] for servers in replicas])
        return cls(table.to(device), torch.tensor([len(servers) for servers in replicas], device=device), num_servers, is_complete)
