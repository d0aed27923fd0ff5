"""What one client of the expert servers knows: who holds what now, and which parts of which tag are out. Pure but for tensors.

Here: ExpertClient, shared by the dispatch and combine nodes of a group. Not here: sending and matching (flowrt/dataflow), when a server
counts as lost (flowrt/workers), cutting itself (operators/dispatch.py).

A part that is lost is cut anew over the copies that are left, under new ids, and the first complete cover of a tag counts (DESIGN section
1; EaaS section 3.4). Pairs whose expert has no copy are a part of NOWHERE, which is sent to nobody and cut anew when a copy is back.

Nodes call `begin`, `ask`, `parts` and `forget` from the compute thread, the rest is called from the loop; each is one step on a dict, or
works on what it has taken out.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from flowrt.dataflow.parts import PartHeader
from flowrt.dataflow.payload import Payload
from flowrt.reliability.expert_map import Copies, ExpertMap
from flowrt.reliability.hedging import OVERDUE_SECONDS, Steering
from operators.dispatch import NOWHERE, CopyTable, Part, cut_again
from transports.message import Tag


@dataclass(slots=True)
class Asked:
    """A tag's parts, by id; more are added as they are cut anew, or asked of a second server."""

    since_seconds: float
    x_TH: Tensor
    positions_T: Tensor
    num_active: int
    parts: list[Part]
    version: int  # of the map by which it was cut last
    num_first: int  # parts before any was cut anew
    hedged: set[int] = field(default_factory=set)  # ids of parts that were asked of another server too


@dataclass(frozen=True)
class Again:
    """What is to be sent in the place of a part, by output port, and the ids that cover its pairs (some may be of NOWHERE)."""

    part: int
    by: tuple[int, ...]
    outputs: dict[str, Payload]


class Tables:
    """Copy tables by layer, made when they are asked for; layers that are alike share one. For one state of the map."""

    def __init__(self, expert_map: ExpertMap, avoided: frozenset[int], num_servers: int, device: torch.device | str) -> None:
        self.version = expert_map.version
        self._map, self._avoided, self._num_servers, self._device = expert_map, avoided, num_servers, device
        self._by_layer: dict[int, CopyTable] = {}
        self._made: dict[Copies, CopyTable] = {}

    def of(self, layer: int) -> CopyTable:
        table = self._by_layer.get(layer)
        if table is None:
            copies = self._map.table(layer)
            if self._avoided:
                copies = tuple(tuple(server for server in servers if server not in self._avoided) or servers for servers in copies)
            table = self._made.get(copies)
            if table is None:
                table = self._made[copies] = CopyTable.from_lists(copies, self._num_servers, self._device)
            self._by_layer[layer] = table
        return table


class ExpertClient:
    """`expert_map`: as the graph places experts, every server alive. Servers are numbers, as in the ports "server<s>". `now`: the clock."""

    def __init__(
        self, expert_map: ExpertMap, num_servers: int, device: torch.device | str = "cpu", now: Callable[[], float] = lambda: 0.0
    ) -> None:
        self._full = self._map = expert_map
        self._num_servers, self._device, self._now = num_servers, device, now
        self._lost: set[int] = set()
        self._asked: dict[Tag, Asked] = {}
        self._epochs: dict[str, int] = {}
        self._cutting: int | None = None  # the version of the map by which a tag is being cut now
        self.steering = Steering(num_servers)
        self.num_again = 0  # parts that were cut anew
        self._change()

    @property
    def map(self) -> ExpertMap:
        return self._map

    def begin(self) -> Tables:
        """A new tag is to be cut by these: without servers that are slow, where others hold a copy. `ask` follows."""
        tables = self._all if self._avoided and self.steering.probes() else self._tables
        self._cutting = tables.version
        return tables

    def _change(self) -> None:
        self._avoided = self.steering.avoided
        self._all = Tables(self._map, frozenset(), self._num_servers, self._device)
        self._tables = Tables(self._map, self._avoided, self._num_servers, self._device) if self._avoided else self._all

    # --- what is asked ----------------------------------------------------------------------------------------------------

    def ask(
        self, tag: Tag, x_TH: Tensor, positions_T: Tensor, num_active: int, parts: list[Part], version: int | None = None
    ) -> dict[str, Payload]:
        """Note the parts of a tag, cut by this version of the map (default: that of now). What goes to whom, by output port; ids are
        places in `parts`."""
        if tag.epoch >= self._epochs.get(tag.source, 0):  # else it was rolled back while it was cut, and nobody will ever add it up
            version = self._map.version if version is None else version
            self._asked[tag] = Asked(self._now(), x_TH, positions_T, num_active, parts, version, len(parts))
        self._cutting = None
        return {f"server{part.server}": _request(x_TH, number, part) for number, part in enumerate(parts) if part.server != NOWHERE}

    def part(self, tag: Tag, number: int) -> Part:
        return self._asked[tag].parts[number]

    def parts(self, tag: Tag, numbers: Sequence[int | None]) -> list[Part] | None:
        """None for a tag that was rolled back meanwhile."""
        asked = self._asked.get(tag)
        return None if asked is None else [asked.parts[number or 0] for number in numbers]

    @property
    def waits(self) -> bool:
        """Whether some part waits for a copy, or may turn out to when it has been cut."""
        cutting = self._cutting
        if cutting is not None and cutting != self._map.version:
            return True
        return any(part.server == NOWHERE for tag in self.tags if (asked := self._asked.get(tag)) is not None for part in asked.parts)

    def forget(self, tag: Tag) -> None:
        """It is whole."""
        self._asked.pop(tag, None)

    def roll_back(self, source: str, epoch: int) -> None:
        """Forget what is older than `epoch`."""
        self._epochs[source] = epoch
        for tag in self.tags:
            if tag.source == source and tag.epoch < epoch:
                self._asked.pop(tag, None)

    @property
    def hedges(self) -> bool:
        """Whether any expert has a second copy."""
        layers: list[int | None] = [*self._full.by_layer] or [None]
        return any(len(servers) > 1 for layer in layers for servers in self._full.table(layer))

    @property
    def tags(self) -> list[Tag]:
        return list(self._asked)

    def at(self, servers: Collection[int], tag: Tag, numbers: Sequence[int]) -> list[int]:
        """Which of these parts of a tag lie at one of `servers`. At NOWHERE: only if the map has changed since the tag was cut last."""
        asked = self._asked.get(tag)
        if asked is None:
            return []
        changed = asked.version != self._map.version
        return [number for number in numbers if (server := asked.parts[number].server) in servers and (changed or server != NOWHERE)]

    def again(self, tag: Tag, number: int) -> Again | None:
        """Cut a part anew by the map of now. None for a tag that is whole."""
        asked = self._asked.get(tag)
        if asked is None:
            return None
        asked.version = self._map.version
        self.num_again += 1
        return self._cut(asked, number, self._tables.of(tag.layer))

    def _cut(self, asked: Asked, number: int, table: CopyTable) -> Again:
        new = cut_again(asked.parts[number], asked.positions_T, asked.num_active, table)
        first = len(asked.parts)
        asked.parts.extend(new)
        outputs = {f"server{part.server}": _request(asked.x_TH, first + at, part) for at, part in enumerate(new) if part.server != NOWHERE}
        return Again(number, tuple(range(first, first + len(new))), outputs)

    def answered(self, server: int, tag: Tag) -> None:
        """Judge a server by how long it took. Parts that were cut anew began later than their tag, and are left out."""
        asked = self._asked.get(tag)
        if asked is None or asked.hedged:
            return
        for part in asked.parts[: asked.num_first]:
            if part.server == server:
                if self.steering.answered(server, len(part.rows_R), self._now() - asked.since_seconds):
                    self._change()
                return

    def hedge(self, tag: Tag, missing: Sequence[int]) -> list[Again]:
        """Parts among `missing` that are late, asked of other servers too, if others hold copies of all they need and the budget allows.
        The late answer still counts if it comes first."""
        asked = self._asked.get(tag)
        if asked is None:
            return []
        age, found = self._now() - asked.since_seconds, []
        for number in missing:
            part = asked.parts[number]
            if number in asked.hedged or part.server == NOWHERE:
                continue
            late = self.steering.late_after(part.server, len(part.rows_R))
            if late is None or age < late:
                continue
            others = CopyTable.from_lists(self._map.without(part.server).table(tag.layer), self._num_servers, self._device)
            if (others.servers_EB[part.expert_P, 0] == NOWHERE).any() or not self.steering.spend():
                continue
            again = self._cut(asked, number, others)
            asked.hedged.update((number, *again.by))  # once: a third server would be asked for what two are at work on
            found.append(again)
        return found

    def overdue(self, tag: Tag, missing: Callable[[], Sequence[int]]) -> dict[int, tuple[float, float]]:
        """Servers that owe `tag` an answer for far too long: server -> seconds waited, seconds usual at most."""
        asked = self._asked.get(tag)
        if asked is None or (age := self._now() - asked.since_seconds) < OVERDUE_SECONDS:
            return {}
        found = {}
        for number in missing():
            part = asked.parts[number]
            if number >= asked.num_first or part.server == NOWHERE or part.server in self._lost:
                continue
            usual = self.steering.late_after(part.server, len(part.rows_R))
            overdue = self.steering.overdue_after(part.server, len(part.rows_R))
            if usual is not None and overdue is not None and age >= overdue:
                found[part.server] = age, usual
        return found

    # --- who is there -----------------------------------------------------------------------------------------------------

    def lose(self, server: int) -> None:
        """The next version of the map, without this server."""
        self._lost.add(server)
        self._map = self._map.without(server)
        self.steering.forget(server)
        self._change()

    def regain(self, server: int) -> None:
        """The next version, in which it holds what the graph gave it."""
        if server not in self._lost:
            return
        self._lost.discard(server)
        version = self._map.version + 1
        left = self._full
        for lost in sorted(self._lost):
            left = left.without(lost)
        self._map = ExpertMap(left.copies, left.by_layer, version)
        self._change()

    @property
    def lost(self) -> frozenset[int]:
        return frozenset(self._lost)

    def homeless(self) -> list[int]:
        """Experts that have no copy in some layer, though the graph gives them one."""
        layers: list[int | None] = [*self._full.by_layer] or [None]
        return sorted({expert for layer in layers for expert in set(self._map.missing(layer)) - set(self._full.missing(layer))})


def _request(x_TH: Tensor, number: int, part: Part) -> Payload:
    rows_RH = x_TH if len(part.rows_R) == len(x_TH) else x_TH.index_select(0, part.rows_R)  # each row once, in order
    return Payload((rows_RH, part.row_P, part.expert_P, part.weight_P), PartHeader(number))
