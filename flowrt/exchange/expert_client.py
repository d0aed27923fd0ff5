"""State of one client of the expert servers: the current expert map, and the outstanding parts of each tag. Pure but for tensors.

The dispatch and combine nodes of a group share one ExpertClient.

A lost part is split again over the remaining replicas, under new ids, and the first complete cover of a tag counts (DESIGN section 1;
EaaS section 3.4). Pairs of an expert without a replica form a part of UNAVAILABLE: it is not sent, and is split again when a replica
returns. Pairs of omitted experts are left out when a tag is split (omitted_experts.py).

Nodes call `replica_table`, `add_tag`, `parts` and `forget` from the compute thread; all other calls come from the loop. Each call is one
step on a dict, or works on entries that it has taken out.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from flowrt.dataflow.parts import PartHeader
from flowrt.dataflow.payload import Payload
from flowrt.exchange.not_finite_parts import NotFiniteParts
from flowrt.exchange.omitted_experts import OmittedExperts
from flowrt.exchange.trampoline import Trampolines, bundle
from flowrt.operators.dispatch import Part, repartition
from flowrt.operators.replica_table import UNAVAILABLE, ReplicaTable
from flowrt.reliability.expert_map import ExpertMap, Replicas
from flowrt.reliability.fault_table import FaultKind, Redo, redo
from flowrt.reliability.hedging import MIN_SECONDS, OVERDUE_SECONDS, HedgingPolicy
from flowrt.transports.wire.message import Tag


@dataclass(slots=True)
class OutstandingTag:
    """A tag's parts, by id. Redispatched and hedged parts are appended."""

    since_seconds: float
    x_TH: Tensor
    num_active: int
    parts: list[Part]
    num_first: int  # parts before any redispatch
    losses: dict[int, int] = field(default_factory=dict)  # by id of a part: servers that were lost with it, or with what it replaces
    in_flight: int | None = None  # of parts of a suspect: the one that was sent, and
    unsent: list[int] = field(default_factory=list)  # those that are sent after it
    hedged: dict[int, int] = field(
        default_factory=dict
    )  # id of a late part that was sent to other servers too, or of one of those -> late one
    via: dict[int, int] = field(default_factory=dict)  # id of a part -> the trampoline through which it travels
    responded: set[int] = field(default_factory=set)  # trampolines


@dataclass(frozen=True)
class Redispatch:
    """Requests that replace a part, by output port, and the ids that cover its pairs (some may be of UNAVAILABLE)."""

    part: int
    by: tuple[int, ...]
    outputs: dict[str, Payload]


class ExpertClient:
    """Expert map and outstanding parts of one client. `expert_map` is the placement of the graph, with every server alive.

    Servers are numbers, as in the ports "server<s>"; `processes` are their names. `now` returns the time in seconds.
    """

    def __init__(
        self,
        expert_map: ExpertMap,
        processes: Sequence[str],
        device: torch.device | str = "cpu",
        now: Callable[[], float] = lambda: 0.0,
        trampolines: Trampolines | None = None,
    ) -> None:
        self._full = expert_map
        self.processes, self._num_servers, self._device, self._now = processes, len(processes), device, now
        self.lost: set[int] = set()
        self._outstanding: dict[Tag, OutstandingTag] = {}
        self._epochs: dict[str, int] = {}
        self._tables_in_use: ReplicaTables | None = None  # of the tag that is being split now
        self._late_servers: frozenset[int] = frozenset()  # servers whose response is late: until it arrives, others are preferred
        self.trampolines = trampolines or Trampolines({}, {}, {})
        self._late_parts: dict[tuple[Tag, int], int] = {}  # parts of late servers, through trampolines -> server
        self.not_finite = NotFiniteParts(processes, now)
        self.hedging = HedgingPolicy(len(processes))
        self.omitted = OmittedExperts(now)
        self.computes_alone = False  # the running step belongs to a suspect, and no other step runs
        self.num_redispatched, self.map_version = 0, 0  # parts that were split again; how often the map has changed
        self._change(expert_map)

    def replica_table(self, layer: int) -> ReplicaTable:
        """The replica table for splitting a new tag. It avoids slow servers where another server holds a replica. `add_tag` must follow."""
        avoided = self._suspected if self.hedging.avoided and self.hedging.probes() else self._avoided
        tables = self._tables_in_use = self._tables_avoiding(avoided)
        return tables.of(layer)

    def _tables_avoiding(self, avoided: frozenset[int]) -> ReplicaTables:
        tables = self._tables.get(avoided)
        if tables is None:
            tables = self._tables[avoided] = ReplicaTables(self.map, avoided, self._num_servers, self._device)
        return tables

    def _change(self, expert_map: ExpertMap) -> None:
        self.map, self.map_version = expert_map, self.map_version + 1
        layers: list[int | None] = [*self._full.by_layer] or [None]
        lost = {layer: frozenset(expert_map.missing(layer)) - frozenset(self._full.missing(layer)) for layer in layers}
        # Experts without a replica in some layer in which the graph places one.
        self.unavailable_experts = sorted(frozenset[int]().union(*lost.values()))
        self.omitted.update(lost)
        self._tables: dict[frozenset[int], ReplicaTables] = {}  # by the avoided servers

    @property
    def _avoided(self) -> frozenset[int]:
        return self.hedging.avoided | self._suspected

    @property
    def _suspected(self) -> frozenset[int]:
        return self._late_servers | self.not_finite.servers

    # --- outstanding parts ------------------------------------------------------------------------------------------------

    def parts_to_send(self, tag: Tag, parts: list[Part]) -> list[Part]:
        """`parts` of a tag that is being split, without the pairs of omitted experts."""
        return self.omitted.leave_out(tag, parts) if self.omitted.has_omitted else parts

    def add_tag(self, tag: Tag, x_TH: Tensor, num_active: int, parts: list[Part]) -> dict[str, Payload]:
        """Record the parts of a tag. Returns the requests by output port; part ids are indexes into `parts`."""
        entry = OutstandingTag(self._now(), x_TH, num_active, parts, len(parts))
        requests = self._requests(entry, 0, may_forward=True)
        self._outstanding[tag] = entry
        if tag.epoch < self._epochs.get(tag.source, 0):  # it was rolled back while it was split: no combine follows
            self._outstanding.pop(tag, None)
            self.omitted.roll_back(tag.source, self._epochs[tag.source])
        self._tables_in_use = None
        return requests

    def parts(self, tag: Tag, numbers: Sequence[int]) -> list[Part] | None:
        """The parts with these ids. None for a tag that was rolled back meanwhile."""
        entry = self._outstanding.get(tag)
        return None if entry is None else [entry.parts[number] for number in numbers]

    def note_not_finite(self, tag: Tag, numbers: Sequence[int], responses: Sequence[Tensor]) -> None:
        """Avoid the servers of responses to these parts that are not finite although their rows are."""
        if (entry := self._outstanding.get(tag)) is not None:
            self.not_finite.note(tag, entry.x_TH, [entry.parts[number] for number in numbers], responses)

    @property
    def has_waiting_parts(self) -> bool:
        """Whether some part waits for a replica, or may wait for one once it is split."""
        splitting = self._tables_in_use
        if splitting is not None and splitting not in list(self._tables.values()):
            return True
        return any(
            part.server == UNAVAILABLE for tag in self.tags if (entry := self._outstanding.get(tag)) is not None for part in entry.parts
        )

    def forget(self, tag: Tag) -> None:
        """Delete a tag that is complete, possibly without unavailable experts."""
        self._outstanding.pop(tag, None)
        self.omitted.forget(tag)

    def roll_back(self, source: str, epoch: int) -> None:
        """Delete the tags of `source` older than `epoch`."""
        self._epochs[source] = epoch
        self.not_finite.roll_back()  # one source has one client
        for tag in self.tags:
            if tag.source == source and tag.epoch < epoch:
                self._outstanding.pop(tag, None)
        self.omitted.roll_back(source, epoch)

    @property
    def has_replicas(self) -> bool:
        """Whether any expert has a second replica."""
        layers: list[int | None] = [*self._full.by_layer] or [None]
        return any(len(servers) > 1 for layer in layers for servers in self._full.table(layer))

    @property
    def tags(self) -> list[Tag]:
        return list(self._outstanding)

    def parts_at(self, servers: Collection[int], tag: Tag, numbers: Sequence[int]) -> list[int]:
        """Those of these parts that were sent to one of `servers`, or for a part that is late there. A part at UNAVAILABLE counts only when
        some pair of it has a replica now."""
        entry = self._outstanding.get(tag)
        if entry is None:
            return []
        places = {number: {entry.parts[each].server for each in (number, entry.hedged.get(number, number))} for number in numbers}
        here = [number for number, at in places.items() if not at.isdisjoint(servers) and number not in entry.unsent]
        first_E = self._tables_avoiding(self._avoided).of(tag.layer).servers_EB[:, 0]

        def has_replica(part: Part) -> bool:
            return part.server != UNAVAILABLE or bool((first_E[part.expert_P] != UNAVAILABLE).any())

        return [number for number in here if has_replica(entry.parts[number])]

    def record_loss(self, tag: Tag, number: int) -> int:
        """Record that the server of this part was lost. Returns how many servers were lost with it, or with the parts that it replaces."""
        entry = self._outstanding.get(tag)
        if entry is None:
            return 1
        entry.losses[number] = entry.losses.get(number, 0) + 1
        return entry.losses[number]

    def redispatch(self, tag: Tag, number: int) -> Redispatch | None:
        """Split a part again by the current map. None for a tag that is complete."""
        entry = self._outstanding.get(tag)
        if entry is None:
            return None
        self.num_redispatched += 1
        if number == entry.in_flight:
            entry.in_flight = None
        elif number in entry.unsent:
            entry.unsent.remove(number)
        return self._split(tag, entry, number, self._tables_avoiding(self._avoided).of(tag.layer))

    def _split(self, tag: Tag, entry: OutstandingTag, number: int, table: ReplicaTable) -> Redispatch:
        new = repartition(entry.parts[number], entry.num_active, table, tag.step + tag.layer)
        first = len(entry.parts)
        ids = range(first, first + len(new))
        entry.parts.extend(new)
        if losses := entry.losses.get(number):
            entry.losses.update(dict.fromkeys(ids, losses))
        if number in entry.hedged:
            entry.hedged.update(dict.fromkeys(ids, entry.hedged[number]))
        return Redispatch(number, tuple(ids), self._requests(entry, first))

    def _requests(self, entry: OutstandingTag, first: int, may_forward: bool = False) -> dict[str, Payload]:
        """The requests of the parts from number `first` on, by output port. Parts of a suspect go one by one: they crash one server at a
        time.

        Only the first parts of a tag travel through trampolines: what is sent again goes directly, past a trampoline that may be at fault.
        """
        numbers = [number for number, part in enumerate(entry.parts[first:], first) if part.server != UNAVAILABLE]
        if self.computes_alone:
            entry.unsent += numbers
            numbers = []
            if entry.in_flight is None and entry.unsent:
                numbers = [entry.unsent.pop(0)]
                entry.in_flight = numbers[0]
        elif may_forward and self.trampolines:
            found = self.trampolines.route({number: entry.parts[number] for number in numbers})
            entry.via = {number: trampoline for trampoline, parts in found.items() for number in parts}
            bundles = {f"via{trampoline}": bundle(entry.x_TH, parts) for trampoline, parts in found.items()}
            return bundles | {f"server{entry.parts[each].server}": self._request(entry, each) for each in numbers if each not in entry.via}
        return {f"server{entry.parts[number].server}": self._request(entry, number) for number in numbers}

    def next_request(self, tag: Tag, number: int) -> dict[str, Payload]:
        """The next request of parts that go one by one, by output port, when part `number` has its response; none when all are sent."""
        entry = self._outstanding.get(tag)
        if entry is None or number != entry.in_flight:
            return {}
        entry.in_flight = None
        return self._requests(entry, len(entry.parts))

    def _request(self, entry: OutstandingTag, number: int) -> Payload:
        part, x_TH = entry.parts[number], entry.x_TH
        rows_RH = x_TH if part.rows_R.shape[0] == x_TH.shape[0] else x_TH.index_select(0, part.rows_R)  # each row once, in order
        return Payload((rows_RH, part.row_P, part.expert_P, part.weight_P), PartHeader(number))

    def record_response(self, server: int, tag: Tag) -> None:
        """Record how long a server took. Redispatched parts began later than their tag and do not count."""
        if server in self._late_servers:
            self._late_servers -= {server}
        entry = self._outstanding.get(tag)
        if entry is None or entry.hedged or self.computes_alone:
            return
        for part in entry.parts[: entry.num_first]:
            if part.server == server:
                self.hedging.record_response(server, part.rows_R.shape[0], self._now() - entry.since_seconds)
                return

    def record_forwarded(self, trampoline: int, tag: Tag, numbers: Sequence[int]) -> None:
        """Record responses that came through a trampoline."""
        self.trampolines.late.discard(trampoline)
        entry = self._outstanding.get(tag)
        for number in numbers:
            server = self._late_parts.pop((tag, number), None)
            if entry is not None:
                server = entry.parts[number].server
                entry.responded.add(trampoline)
            if server is not None:
                self.record_response(server, tag)

    def record_undelivered(self, trampoline: int, tag: Tag, number: int) -> None:
        """Record that no response to this part comes: the trampoline has lost the server."""
        self.trampolines.late.discard(trampoline)
        if (server := self._late_parts.pop((tag, number), None)) is not None:
            self._late_servers -= {server}

    def lose_trampoline(self, trampoline: int) -> list[tuple[Tag, int]]:
        """Send no part through this trampoline until it is restored. Returns the parts that travelled through it."""
        self.trampolines.lost.add(trampoline)
        self.trampolines.late.discard(trampoline)
        behind = {server for server in self._late_parts.values() if self.trampolines.of(server) == trampoline}
        self._late_parts = {part: server for part, server in self._late_parts.items() if server not in behind}
        self._late_servers -= behind
        entries = [(tag, self._outstanding.get(tag)) for tag in self.tags]
        return [(tag, number) for tag, entry in entries if entry is not None for number, via in entry.via.items() if via == trampoline]

    def server_of(self, tag: Tag, number: int) -> int | None:
        """The server of a part; None for a tag that is complete."""
        entry = self._outstanding.get(tag)
        return None if entry is None else entry.parts[number].server

    def hedge(self, tag: Tag, missing: Callable[[], Sequence[int]]) -> list[Redispatch]:
        """Send late parts of the `missing` ones to other servers too, if these hold replicas of all needed experts and the budget allows.

        The late response still counts if it comes first. Until it arrives, other replicas are preferred to its server: a server that
        stands still delays one tag, not every next one. The same holds for a late trampoline; past it, the same server may compute the
        part."""
        entry = self._outstanding.get(tag)
        if entry is None or self.computes_alone or (age := self._now() - entry.since_seconds) < MIN_SECONDS:
            return []  # a suspect crashes one server at a time
        found = []
        for number in missing() if self.hedging.has_budget else ():
            part = entry.parts[number]
            if part.server == UNAVAILABLE or part.server in self.lost or age < self.hedging.late_after(part.server, len(part.rows_R)):
                continue
            if redo(FaultKind.LATE_PART, int(number in entry.hedged)) is not Redo.PART:
                continue  # no third server computes the same part
            if not self.hedging.has_budget:
                break
            trampoline, is_server_suspect = self._late_hop(entry, number)
            others = self._tables_avoiding(self._avoided | ({part.server} if is_server_suspect else set())).of(tag.layer)
            if trampoline is None and (others.servers_EB[part.expert_P] == part.server).any():
                continue  # it alone holds some of them
            self.hedging.spend()
            entry.hedged[number] = number
            redispatch = self._split(tag, entry, number, others)
            if trampoline is not None:
                self.trampolines.late.add(trampoline)
            if is_server_suspect:
                self._late_servers |= {part.server}
                if number in entry.via:
                    self._late_parts[tag, number] = part.server
            found.append(redispatch)
        return found

    @staticmethod
    def _late_hop(entry: OutstandingTag, number: int) -> tuple[int | None, bool]:
        """The trampoline, if it may be why a part is late, and whether the server may be. A trampoline that has sent some response of the
        tag is not why; of one that has sent none of several, it is more likely than that all their servers are late."""
        trampoline = entry.via.get(number)
        if trampoline is None or trampoline in entry.responded:
            return None, True
        return trampoline, list(entry.via.values()).count(trampoline) == 1

    def overdue(self, tag: Tag, missing: Callable[[], Sequence[int]]) -> dict[str, tuple[float, float]]:
        """Servers and trampolines whose response to `tag` is long overdue: process -> (seconds waited, usual maximum in seconds)."""
        entry = self._outstanding.get(tag)
        if entry is None or (age := self._now() - entry.since_seconds) < OVERDUE_SECONDS:
            return {}
        found = {}
        for number in missing():
            part = entry.parts[number]
            if number >= entry.num_first or number in entry.unsent or part.server == UNAVAILABLE or part.server in self.lost:
                continue
            usual = self.hedging.late_after(part.server, len(part.rows_R))
            overdue = self.hedging.overdue_after(part.server, len(part.rows_R))
            if age >= overdue:
                trampoline, is_server_suspect = self._late_hop(entry, number)
                is_trampolines = trampoline is not None and not is_server_suspect
                found[self.trampolines.processes[trampoline or 0] if is_trampolines else self.processes[part.server]] = age, usual
        return found

    # --- lost servers ------------------------------------------------------------------------------------------------------

    def remove_server(self, server: int) -> None:
        """Switch to a map without this server."""
        self.lost.add(server)
        self._late_servers -= {server}
        self._late_parts = {part: late for part, late in self._late_parts.items() if late != server}
        self.not_finite.forget(server)
        self.hedging.forget(server)
        self._change(self.map.without_server(server))

    def restore_server(self, server: int) -> None:
        """Switch to a map in which this server again holds the experts that the graph assigns to it."""
        if server not in self.lost:
            return
        self.lost.discard(server)
        left = self._full
        for lost in sorted(self.lost):
            left = left.without_server(lost)
        self._change(left)


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
