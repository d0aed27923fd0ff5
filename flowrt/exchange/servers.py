"""Which expert servers a client may use: one state per process, and the replica tables that follow from the states. Pure but for tensors.

Each client of the expert servers has one Servers, which owns this fact. Others ask it, and report what they see:

| event | state |
|---|---|
| `lose`: the incarnation of its process has ended | lost; parts that were sent there wait for the cause of the death, until it is `due` |
| `settle`: its parts are redone | lost |
| `join`: its next incarnation is linked | usable |
| `note_late`: a part there is late | late: until a response arrives (`note_response`), others are preferred |
| `avoid`: it returned NaN or infinity for finite rows | avoided for AVOIDED_SECONDS, others are preferred |
| HedgingPolicy finds it slower than the others | slow: others are preferred, but for some tags |
| `place`: the graph has another placement | lost until it joins; a process that is gone stays lost |

No part is sent to a lost server, nor a new one to a server that leaves the graph. A server that is late, avoided or slow still computes the
experts that no other one has. A trampoline (trampoline.py) is a server as well, with the experts of the servers behind it that are not
lost. It gets the first parts of a tag in place of these, while it and all of them are usable or lost.

The compute thread calls `replica_table`, `end_split` and `avoid`; the loop makes all other calls. Each is one step on a dict or a set.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from enum import StrEnum
from types import MappingProxyType

import torch

from flowrt.exchange.omitted_experts import OmittedExperts
from flowrt.operators.replica_table import UNAVAILABLE, ReplicaTable
from flowrt.reliability.expert_map import ExpertMap, Replicas
from flowrt.reliability.hedging import HedgingPolicy

AVOIDED_SECONDS = 2.0  # the sequence is computed again on other servers
# The longest wait for the cause of a server's loss; longer than the launcher waits for an exit status (FENCE_SECONDS). The loss of a link
# alone does not take so long: both ends report it, which is cause enough.
CAUSE_SECONDS = 1.0


class ServerState(StrEnum):
    """The strongest reason not to use a server."""

    LOST = "lost"
    LATE = "late"
    AVOIDED = "avoided"
    SLOW = "slow"
    USABLE = "usable"


class Servers:
    """`expert_map` is the placement of the graph. Its servers are numbers, as in the ports "server<s>"; `processes` are their names. `now`
    returns the time in seconds. `behind`: trampoline -> the servers behind it."""

    def __init__(
        self,
        expert_map: ExpertMap,
        processes: Mapping[int, str],
        device: torch.device | str = "cpu",
        now: Callable[[], float] = lambda: 0.0,
        behind: Mapping[int, Collection[int]] = MappingProxyType({}),
    ) -> None:
        self.processes = dict(processes)  # also of servers that are gone
        self._full, self._device, self._now, self.behind = expert_map, device, now, behind
        self._numbers = _numbers_of(processes)
        self._lost: dict[str, float | None] = {}  # process -> until when the cause of its death is awaited; None: no part waits for it
        self._late: set[int] = set()
        self._avoided_until: dict[int, float] = {}
        self.hedging = HedgingPolicy(processes)
        self.omitted = OmittedExperts(now)
        self._tables_in_use: ReplicaTables | None = None  # of the tag that is being split now
        self.map_version = 0  # how often the map has changed
        self._update_map()

    # --- events -----------------------------------------------------------------------------------------------------------

    def place(self, expert_map: ExpertMap, processes: Mapping[int, str], leaving: Collection[str] = ()) -> None:
        """Use another placement. A process that is new has not joined yet; one that is gone does not join again. No new part goes to those
        that are `leaving`, whose responses still count."""
        before, self._numbers = self._numbers, _numbers_of(processes)
        self._full = expert_map.without_servers(server for process in leaving for server in self._numbers.get(process, ()))
        self._lost |= dict.fromkeys(process for process in sorted(before.keys() ^ self._numbers.keys()) if process not in self._lost)
        old = {server for own in before.values() for server in own}
        for server in sorted(processes.keys() - old):
            self.hedging.add(server)
        for server in old - processes.keys():
            self.hedging.remove(server)
            self._late.discard(server)
            self._avoided_until.pop(server, None)
        self.processes |= processes
        self._update_map()

    def lose(self, process: str, *, awaits_cause: bool = False) -> None:
        """The incarnation of the process has ended. `awaits_cause`: parts were sent there."""
        is_new = process not in self._lost
        self._lost[process] = self._now() + CAUSE_SECONDS if awaits_cause else self._lost.get(process)
        if is_new:
            for server in self._numbers.get(process, ()):
                self._late.discard(server)
                self._avoided_until.pop(server, None)
                self.hedging.forget(server)
            self._update_map()

    def settle(self, process: str) -> bool:
        """The parts that wait for the cause of this process's death are redone now. Returns False when none wait."""
        if self._lost.get(process) is None:
            return False
        self._lost[process] = None
        return True

    def join(self, process: str) -> None:
        """A new incarnation of the process is linked."""
        if process in self._lost:
            del self._lost[process]
            self._update_map()

    def note_late(self, server: int) -> None:
        self._late.add(server)

    def note_response(self, server: int) -> None:
        self._late.discard(server)

    def avoid(self, server: int) -> bool:
        """Avoid a server for a while. Returns whether it was not avoided before."""
        is_new = self._now() >= self._avoided_until.get(server, 0.0)
        self._avoided_until[server] = self._now() + AVOIDED_SECONDS
        return is_new

    # --- states -----------------------------------------------------------------------------------------------------------

    def state(self, server: int) -> ServerState:
        if self.is_lost(server):
            return ServerState.LOST
        if server in self._late:
            return ServerState.LATE
        if self._avoided_until.get(server, 0.0) > self._now():
            return ServerState.AVOIDED
        return ServerState.SLOW if server in self.hedging.slow else ServerState.USABLE

    def is_lost(self, server: int) -> bool:
        """Also for UNAVAILABLE."""
        return server == UNAVAILABLE or self.processes[server] in self._lost

    @property
    def late(self) -> list[int]:
        return sorted(self._late)

    @property
    def lost(self) -> list[str]:
        return sorted(self._lost)

    @property
    def due(self) -> dict[str, float]:
        """Lost servers whose parts wait for the cause of the death -> until when."""
        return {process: until for process, until in self._lost.items() if until is not None}

    def in_use(self) -> set[str]:
        """The processes that hold experts which parts are sent for."""
        return {self.processes[server] for server in self._map.servers}

    def has_replicas(self) -> bool:
        """Whether the graph gives any expert a second replica."""
        layers: list[int | None] = [*self._full.by_layer] or [None]
        return any(len(servers) > 1 for layer in layers for servers in self._full.table(layer))

    # --- replica tables ---------------------------------------------------------------------------------------------------

    def replica_table(self, layer: int, forwards: bool = True) -> ReplicaTable:
        """The replica table for splitting a new tag. It avoids slow servers where another server holds a replica, but for some tags, which
        show when they have recovered. `forwards`: it uses trampolines. `end_split` must follow."""
        states = {ServerState.LATE, ServerState.AVOIDED}
        if not (self.hedging.slow and self.hedging.probes()):
            states.add(ServerState.SLOW)
        avoided = self._in(states)
        used = [each for each, behind in self.behind.items() if forwards and not self.is_lost(each) and avoided.isdisjoint({each, *behind})]
        tables = self._tables_in_use = self._tables_avoiding(avoided.union(*(self.behind[each] for each in used)), used)
        return tables.of(layer)

    def end_split(self) -> None:
        self._tables_in_use = None

    @property
    def splits_by_old_map(self) -> bool:
        """Whether a tag is being split by tables from before the latest change."""
        splitting = self._tables_in_use
        return splitting is not None and splitting not in list(self._tables.values())

    def table(self, layer: int, besides: Iterable[int] = ()) -> ReplicaTable:
        """The table for splitting a part again. It avoids the servers `besides`, too, where others hold a replica."""
        preferred = self._in({ServerState.LATE, ServerState.AVOIDED, ServerState.SLOW})
        return self._tables_avoiding(preferred.union(besides)).of(layer)

    def _in(self, states: Collection[ServerState]) -> frozenset[int]:
        if not (self._late or self._avoided_until or self.hedging.slow):
            return frozenset()
        return frozenset(server for server in self.processes if self.state(server) in states)

    def _tables_avoiding(self, avoided: frozenset[int], trampolines: Sequence[int] = ()) -> ReplicaTables:
        """The tables that use no other trampolines."""
        key = avoided, tuple(trampolines)
        known = self._tables  # before the map: the loop may change both meanwhile, the map first
        if (tables := known.get(key)) is None:
            others = self.behind.keys() - {*trampolines}
            tables = known[key] = ReplicaTables(self._map.without_servers(others), avoided, max(self.processes) + 1, self._device)
        return tables

    def _update_map(self) -> None:
        left = self._full.without_servers(filter(self.is_lost, self.processes)).reached_through(self.behind)
        self._map, self.map_version = left, self.map_version + 1
        layers: list[int | None] = [*self._full.by_layer] or [None]
        missing = {layer: frozenset(left.missing(layer)) - frozenset(self._full.missing(layer)) for layer in layers}
        # Experts without a replica in some layer in which the graph places one.
        self.unavailable_experts = sorted(frozenset[int]().union(*missing.values()))
        self.omitted.update(missing)
        self._tables: dict[tuple[frozenset[int], tuple[int, ...]], ReplicaTables] = {}  # by avoided servers and used trampolines


def _numbers_of(processes: Mapping[int, str]) -> dict[str, list[int]]:
    numbers: dict[str, list[int]] = {}
    for server, process in processes.items():
        numbers.setdefault(process, []).append(server)
    return numbers


class ReplicaTables:
    """Tables made at their first use. Equal layers share one. `avoided`: servers that get nothing where another one holds a replica."""

    def __init__(self, expert_map: ExpertMap, avoided: frozenset[int], num_servers: int, device: torch.device | str) -> None:
        self._map, self._unwanted, self._num_servers, self._device = expert_map, avoided, num_servers, device
        self._by_layer: dict[int, ReplicaTable] = {}
        self._made: dict[Replicas, ReplicaTable] = {}

    def of(self, layer: int) -> ReplicaTable:
        table = self._by_layer.get(layer)
        if table is None:
            replicas = self._map.table(layer)
            if self._unwanted:
                replicas = tuple(tuple(server for server in servers if server not in self._unwanted) or servers for servers in replicas)
            table = self._made.get(replicas)
            if table is None:
                table = self._made[replicas] = ReplicaTable.from_lists(replicas, self._num_servers, self._device)
            self._by_layer[layer] = table
        return table
