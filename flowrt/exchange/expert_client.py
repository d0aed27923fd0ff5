"""State of one client of the expert servers: the current expert map, and the outstanding parts of each tag. Pure but for tensors.

The dispatch and combine nodes of a group share one ExpertClient.

A lost part is split again over the remaining replicas, under new ids, and the first complete cover of a tag counts (DESIGN section 1;
EaaS section 3.4). Pairs of an expert without a replica form a part of UNAVAILABLE: it is not sent, and is split again when a replica
returns. Pairs of experts that are given up are left out when a tag is split (without.py).

Nodes call `begin`, `ask`, `parts` and `forget` from the compute thread; all other calls come from the loop. Each call is one step on a
dict, or works on entries that it has taken out.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from flowrt.dataflow.parts import PartHeader
from flowrt.dataflow.payload import Payload
from flowrt.exchange.without import Without
from flowrt.operators.dispatch import UNAVAILABLE, Part, ReplicaTable, repartition
from flowrt.reliability.expert_map import Copies, ExpertMap
from flowrt.reliability.hedging import OVERDUE_SECONDS, Steering
from flowrt.transports.wire.message import Tag


@dataclass(slots=True)
class Asked:
    """A tag's parts, by id. Redispatched and hedged parts are appended."""

    since_seconds: float
    x_TH: Tensor
    positions_T: Tensor
    num_active: int
    parts: list[Part]
    num_first: int  # parts before any was cut anew
    losses: dict[int, int] = field(default_factory=dict)  # by id of a part: servers that were lost with it, or with what it replaces
    hedged: set[int] = field(default_factory=set)  # ids of parts that were asked of another server too


@dataclass(frozen=True)
class Again:
    """What is to be sent in the place of a part, by output port, and the ids that cover its pairs (some may be of UNAVAILABLE)."""

    part: int
    by: tuple[int, ...]
    outputs: dict[str, Payload]


class Tables:
    """Copy tables by layer, made when they are asked for; layers that are alike share one. For one state of the map."""

    def __init__(self, expert_map: ExpertMap, avoided: frozenset[int], num_servers: int, device: torch.device | str) -> None:
        self._map, self._avoided, self._num_servers, self._device = expert_map, avoided, num_servers, device
        self._by_layer: dict[int, ReplicaTable] = {}
        self._made: dict[Copies, ReplicaTable] = {}

    def of(self, layer: int) -> ReplicaTable:
        table = self._by_layer.get(layer)
        if table is None:
            copies = self._map.table(layer)
            if self._avoided:
                copies = tuple(tuple(server for server in servers if server not in self._avoided) or servers for servers in copies)
            table = self._made.get(copies)
            if table is None:
                table = self._made[copies] = ReplicaTable.from_lists(copies, self._num_servers, self._device)
            self._by_layer[layer] = table
        return table


class ExpertClient:
    """Expert map and outstanding parts of one client. `expert_map` is the placement of the graph, with every server alive.

    Servers are numbers, as in the ports "server<s>". `now` returns the time in seconds.
    """

    def __init__(
        self, expert_map: ExpertMap, num_servers: int, device: torch.device | str = "cpu", now: Callable[[], float] = lambda: 0.0
    ) -> None:
        self._full = expert_map
        self._num_servers, self._device, self._now = num_servers, device, now
        self._lost: set[int] = set()
        self._asked: dict[Tag, Asked] = {}
        self._epochs: dict[str, int] = {}
        self._cutting: Tables | None = None  # by which a tag is being cut now
        self._owing: frozenset[int] = frozenset()  # servers that owe a late answer: while they do, others are asked
        self.steering = Steering(num_servers)
        self.without = Without(now)
        self.num_again = 0  # parts that were cut anew
        self._change(expert_map)

    @property
    def map(self) -> ExpertMap:
        return self._map

    def begin(self, layer: int) -> ReplicaTable:
        """The replica table for splitting a new tag. It avoids slow servers where another server holds a replica. `ask` must follow."""
        avoided = self._owing if self.steering.avoided and self.steering.probes() else self._avoided
        tables = self._cutting = self._without(avoided)
        return tables.of(layer)

    def _without(self, avoided: frozenset[int]) -> Tables:
        tables = self._tables.get(avoided)
        if tables is None:
            tables = self._tables[avoided] = Tables(self._map, avoided, self._num_servers, self._device)
        return tables

    def _change(self, expert_map: ExpertMap) -> None:
        self._map = expert_map
        layers: list[int | None] = [*self._full.by_layer] or [None]
        lost = {layer: frozenset(expert_map.missing(layer)) - frozenset(self._full.missing(layer)) for layer in layers}
        # Experts without a copy in some layer where the graph gives them one.
        self.homeless = sorted(frozenset[int]().union(*lost.values()))
        self.without.update(lost)
        self._tables: dict[frozenset[int], Tables] = {}  # by the avoided servers

    @property
    def _avoided(self) -> frozenset[int]:
        return self.steering.avoided | self._owing

    # --- outstanding parts------------------------------------------------------------------------------------------------

    def parts_to_ask(self, tag: Tag, parts: list[Part]) -> list[Part]:
        """`parts` of a tag that is being cut, but for pairs whose expert is given up."""
        return self.without.leave_out(tag, parts) if self.without.any_given_up else parts

    def ask(self, tag: Tag, x_TH: Tensor, positions_T: Tensor, num_active: int, parts: list[Part]) -> dict[str, Payload]:
        """Record the parts of a tag. Returns the requests by output port; part ids are indexes into `parts`."""
        self._asked[tag] = Asked(self._now(), x_TH, positions_T, num_active, parts, len(parts))
        if tag.epoch < self._epochs.get(tag.source, 0):  # it was rolled back while it was cut: nobody will ever add it up
            self._asked.pop(tag, None)
            self.without.roll_back(tag.source, self._epochs[tag.source])
        self._cutting = None
        return {f"server{part.server}": _request(x_TH, number, part) for number, part in enumerate(parts) if part.server != UNAVAILABLE}

    def parts(self, tag: Tag, numbers: Sequence[int]) -> list[Part] | None:
        """The parts with these ids. None for a tag that was rolled back meanwhile."""
        asked = self._asked.get(tag)
        return None if asked is None else [asked.parts[number] for number in numbers]

    @property
    def waits(self) -> bool:
        """Whether some part waits for a replica, or may wait for one once it is split."""
        cutting = self._cutting
        if cutting is not None and cutting not in list(self._tables.values()):
            return True
        return any(part.server == UNAVAILABLE for tag in self.tags if (asked := self._asked.get(tag)) is not None for part in asked.parts)

    def forget(self, tag: Tag) -> None:
        """Delete a tag that is complete, possibly without unavailable experts."""
        self._asked.pop(tag, None)
        self.without.forget(tag)

    def roll_back(self, source: str, epoch: int) -> None:
        """Delete the tags of `source` older than `epoch`."""
        self._epochs[source] = epoch
        for tag in self.tags:
            if tag.source == source and tag.epoch < epoch:
                self._asked.pop(tag, None)
        self.without.roll_back(source, epoch)

    @property
    def has_copies(self) -> bool:
        """Whether any expert has a second replica."""
        layers: list[int | None] = [*self._full.by_layer] or [None]
        return any(len(servers) > 1 for layer in layers for servers in self._full.table(layer))

    @property
    def tags(self) -> list[Tag]:
        return list(self._asked)

    def at(self, servers: Collection[int], tag: Tag, numbers: Sequence[int]) -> list[int]:
        """Which of these parts of a tag lie at one of `servers`; of UNAVAILABLE ones, those with a pair that a server can compute now."""
        asked = self._asked.get(tag)
        if asked is None:
            return []
        here = [number for number in numbers if asked.parts[number].server in servers]
        first_E = self._without(self._avoided).of(tag.layer).servers_EB[:, 0]

        def can_be_asked(part: Part) -> bool:
            return part.server != UNAVAILABLE or bool((first_E[part.expert_P] != UNAVAILABLE).any())

        return [number for number in here if can_be_asked(asked.parts[number])]

    def lose_part(self, tag: Tag, number: int) -> int:
        """Record that the server of this part was lost. Returns how many servers were lost with it, or with the parts that it replaces."""
        asked = self._asked.get(tag)
        if asked is None:
            return 0
        asked.losses[number] = asked.losses.get(number, 0) + 1
        return asked.losses[number]

    def again(self, tag: Tag, number: int) -> Again | None:
        """Split a part again by the current map. None for a tag that is complete."""
        asked = self._asked.get(tag)
        if asked is None:
            return None
        self.num_again += 1
        return self._cut(asked, number, self._without(self._avoided).of(tag.layer))

    def _cut(self, asked: Asked, number: int, table: ReplicaTable) -> Again:
        new = repartition(asked.parts[number], asked.positions_T, asked.num_active, table)
        first = len(asked.parts)
        asked.parts.extend(new)
        if losses := asked.losses.get(number):
            asked.losses.update(dict.fromkeys(range(first, first + len(new)), losses))
        outputs = {
            f"server{part.server}": _request(asked.x_TH, first + at, part) for at, part in enumerate(new) if part.server != UNAVAILABLE
        }
        return Again(number, tuple(range(first, first + len(new))), outputs)

    def answered(self, server: int, tag: Tag) -> None:
        """Note how long a server took. Parts that were cut anew began later than their tag, and are left out."""
        if server in self._owing:
            self._owing -= {server}
        asked = self._asked.get(tag)
        if asked is None or asked.hedged:
            return
        for part in asked.parts[: asked.num_first]:
            if part.server == server:
                self.steering.answered(server, len(part.rows_R), self._now() - asked.since_seconds)
                return

    def hedge(self, tag: Tag, missing: Sequence[int]) -> list[Again]:
        """Parts among `missing` that are late, asked of other servers too, if others hold copies of all they need and the budget allows.
        The late answer still counts if it comes first. Until it is there, its server is asked nothing that others can answer: one that
        stands still holds up one tag, not every next one."""
        asked = self._asked.get(tag)
        if asked is None:
            return []
        age, found = self._now() - asked.since_seconds, []
        for number in missing:
            part = asked.parts[number]
            if number in asked.hedged or part.server == UNAVAILABLE or not self.steering.may_spend:
                continue
            if age < self.steering.late_after(part.server, len(part.rows_R)):
                continue
            others = self._without(self._avoided | {part.server}).of(tag.layer)
            if (others.servers_EB[part.expert_P] == part.server).any():
                continue  # it alone holds some of them
            self.steering.spend()
            again = self._cut(asked, number, others)
            asked.hedged.update((number, *again.by))  # once: a third server would be asked for what two are at work on
            self._owing |= {part.server}
            found.append(again)
        return found

    def overdue(self, tag: Tag, missing: Callable[[], Sequence[int]]) -> dict[int, tuple[float, float]]:
        """Servers whose response to `tag` is long overdue: server -> (seconds waited, usual maximum in seconds)."""
        asked = self._asked.get(tag)
        if asked is None or (age := self._now() - asked.since_seconds) < OVERDUE_SECONDS:
            return {}
        found = {}
        for number in missing():
            part = asked.parts[number]
            if number >= asked.num_first or part.server == UNAVAILABLE or part.server in self._lost:
                continue
            usual = self.steering.late_after(part.server, len(part.rows_R))
            overdue = self.steering.overdue_after(part.server, len(part.rows_R))
            if age >= overdue:
                found[part.server] = age, usual
        return found

    # --- lost servers ------------------------------------------------------------------------------------------------------

    def lose(self, server: int) -> None:
        """Switch to the next version of the map, without this server."""
        self._lost.add(server)
        self._owing -= {server}
        self.steering.forget(server)
        self._change(self._map.without(server))

    def regain(self, server: int) -> None:
        """Switch to the next version of the map, in which this server again holds the experts that the graph assigns to it."""
        if server not in self._lost:
            return
        self._lost.discard(server)
        version = self._map.version + 1
        left = self._full
        for lost in sorted(self._lost):
            left = left.without(lost)
        self._change(ExpertMap(left.copies, left.by_layer, version))

    @property
    def lost(self) -> frozenset[int]:
        return frozenset(self._lost)


def _request(x_TH: Tensor, number: int, part: Part) -> Payload:
    rows_RH = x_TH if len(part.rows_R) == len(x_TH) else x_TH.index_select(0, part.rows_R)  # each row once, in order
    return Payload((rows_RH, part.row_P, part.expert_P, part.weight_P), PartHeader(number))
