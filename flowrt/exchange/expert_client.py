"""The outstanding parts of one client of the expert servers, by tag. Pure but for tensors. Which servers are used: servers.py.

The dispatch and combine nodes of a group share one ExpertClient.

A lost part is split again over the remaining replicas, under new ids, and the first complete cover of a tag counts
(EaaS section 3.4). Pairs of an expert without a replica form a part of UNAVAILABLE: it is not sent, and is split again when a replica
returns. Pairs of omitted experts are left out when a tag is split (omitted_experts.py).

Nodes call `parts_to_send`, `add_tag`, `parts`, `note_not_finite` and `forget` from the compute thread; all other calls come from the loop.
Each call is one step on a dict, or works on entries that it has taken out.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import torch
from torch import Tensor

from flowrt.dataflow.parts import PartHeader
from flowrt.dataflow.payload import Payload
from flowrt.exchange.servers import Servers
from flowrt.operators.dispatch import Part, repartition
from flowrt.operators.replica_table import UNAVAILABLE, ReplicaTable
from flowrt.reliability.expert_map import ExpertMap
from flowrt.reliability.fault_table import FaultKind, Redo, redo
from flowrt.reliability.hedging import MIN_SECONDS, OVERDUE_SECONDS
from flowrt.transports.wire.message import Tag

log = logging.getLogger("flowrt.worker")


@dataclass(slots=True)
class OutstandingTag:
    """A tag's parts, by id. Redispatched and hedged parts are appended."""

    since_seconds: float
    x_TH: Tensor
    num_active: int
    parts: list[Part]
    sent: dict[int, float] = field(default_factory=dict)  # when a part was sent, of those that were sent after `since_seconds`
    losses: dict[int, int] = field(default_factory=dict)  # by id of a part: servers that were lost with it, or with what it replaces
    in_flight: int | None = None  # of parts of a suspect: the one that was sent, and
    unsent: list[int] = field(default_factory=list)  # those that are sent after it
    hedged: dict[int, int] = field(
        default_factory=dict
    )  # id of a late part that was sent to other servers too, or of one of those -> late one


@dataclass(frozen=True)
class Redispatch:
    """Requests that replace a part, by output port, and the ids that cover its pairs (some may be of UNAVAILABLE)."""

    part: int
    by: tuple[int, ...]
    outputs: dict[str, Payload]


class ExpertClient:
    """The arguments are those of Servers."""

    def __init__(
        self,
        expert_map: ExpertMap,
        processes: Mapping[int, str],
        device: torch.device | str = "cpu",
        now: Callable[[], float] = lambda: 0.0,
        behind: Mapping[int, Collection[int]] = MappingProxyType({}),
    ) -> None:
        self._now, self.servers = now, Servers(expert_map, processes, device, now, behind)
        self.processes, self.hedging = self.servers.processes, self.servers.hedging
        self._outstanding: dict[Tag, OutstandingTag] = {}
        self._epochs: dict[str, int] = {}
        self._not_finite: dict[tuple[str, int, int, int], str] = {}  # by step: the first part that was not finite, as text
        self.computes_alone = False  # the running step belongs to a suspect, and no other step runs
        self.num_redispatched = 0  # parts that were split again

    def replica_table(self, layer: int) -> ReplicaTable:
        """The table for splitting a new tag. Only first parts travel through trampolines, and those of a suspect do not: they crash one
        process at a time."""
        return self.servers.replica_table(layer, forwards=not self.computes_alone)

    # --- outstanding parts ------------------------------------------------------------------------------------------------

    def parts_to_send(self, tag: Tag, parts: list[Part]) -> list[Part]:
        """`parts` of a tag that is being split, without the pairs of omitted experts."""
        return self.servers.omitted.leave_out(tag, parts) if self.servers.omitted.has_omitted else parts

    def add_tag(self, tag: Tag, x_TH: Tensor, num_active: int, parts: list[Part]) -> dict[str, Payload]:
        """Record the parts of a tag. Returns the requests by output port; part ids are indexes into `parts`."""
        entry = OutstandingTag(self._now(), x_TH, num_active, parts)
        requests = self._requests(entry, 0)
        self._outstanding[tag] = entry
        if tag.epoch < self._epochs.get(tag.source, 0):  # it was rolled back while it was split: no combine follows
            self._outstanding.pop(tag, None)
            self.servers.omitted.roll_back(tag.source, self._epochs[tag.source])
        self.servers.end_split()
        return requests

    def parts(self, tag: Tag, numbers: Sequence[int]) -> list[Part] | None:
        """The parts with these ids. None for a tag that was rolled back meanwhile."""
        entry = self._outstanding.get(tag)
        return None if entry is None else [entry.parts[number] for number in numbers]

    def note_not_finite(self, tag: Tag, numbers: Sequence[int], responses: Sequence[Tensor]) -> None:
        """Avoid the servers of responses to these parts that are not finite although their rows are. Strict ones have a row per pair."""
        if (entry := self._outstanding.get(tag)) is None:
            return
        is_finite_T = entry.x_TH.isfinite().all(dim=1)
        for part, y in zip([entry.parts[number] for number in numbers], responses, strict=True):
            rows = part.rows_R if len(y) == len(part.rows_R) else part.rows_R[part.row_P]
            if not y[is_finite_T[rows]].isfinite().all():
                process, behind = self.processes[part.server], " or a server behind it" if part.server in self.servers.behind else ""
                text = f"{process}{behind} returned NaN or infinity in layer {tag.layer}"
                if self.servers.avoid(part.server):
                    log.error("%s, step %d; check the weights, or run in a wider dtype", text, tag.step)
                self._not_finite.setdefault((tag.source, tag.epoch, tag.micro_batch, tag.step), text)

    def take_not_finite(self, step: Tag) -> str:
        """The first part of this step, which has ended, that was not finite, as text; "" for none."""
        return self._not_finite.pop((step.source, step.epoch, step.micro_batch, step.step), "")

    @property
    def has_waiting_parts(self) -> bool:
        """Whether some part waits for a replica, or may wait for one once it is split."""
        return self.servers.splits_by_old_map or any(
            part.server == UNAVAILABLE for tag in self.tags if (entry := self._outstanding.get(tag)) is not None for part in entry.parts
        )

    def forget(self, tag: Tag) -> None:
        """Delete a tag that is complete, possibly without unavailable experts."""
        self._outstanding.pop(tag, None)
        self.servers.omitted.forget(tag)

    def roll_back(self, source: str, epoch: int) -> None:
        """Delete the tags of `source` older than `epoch`."""
        self._epochs[source] = epoch
        self._not_finite.clear()  # one source has one client
        for tag in self.tags:
            if tag.source == source and tag.epoch < epoch:
                self._outstanding.pop(tag, None)
        self.servers.omitted.roll_back(source, epoch)

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
        first_E = self.servers.table(tag.layer).servers_EB[:, 0]

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
        return self._split(tag, entry, number, self.servers.table(tag.layer))

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

    def _requests(self, entry: OutstandingTag, first: int) -> dict[str, Payload]:
        """The requests of the parts from number `first` on, by output port. Parts of a suspect go one by one: they crash one server at a
        time."""
        numbers = [number for number, part in enumerate(entry.parts[first:], first) if part.server != UNAVAILABLE]
        if self.computes_alone:
            entry.unsent += numbers
            numbers = []
            if entry.in_flight is None and entry.unsent:
                numbers = [entry.unsent.pop(0)]
                entry.in_flight = numbers[0]
        if first or self.computes_alone:
            entry.sent.update(dict.fromkeys(numbers, self._now()))
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
        """Record how long a server took. The parts of a tag with redispatched ones do not count: which of them responds is not known."""
        self.servers.note_response(server)
        entry = self._outstanding.get(tag)
        if entry is None or entry.sent or self.computes_alone:
            return
        for part in entry.parts:
            if part.server == server:
                self.hedging.record_response(server, part.rows_R.shape[0], self._now() - entry.since_seconds)
                return

    def has_parts_of(self, process: str) -> bool:
        """Whether a tag that is not complete has, or is about to have, parts at this process."""
        entries = [self._outstanding.get(tag) for tag in self.tags]
        parts = (part for entry in entries if entry is not None for part in entry.parts)
        return self.servers.splits_by_old_map or any(self.processes.get(part.server) == process for part in parts)

    def server_of(self, tag: Tag, number: int) -> int | None:
        """The server of a part; None for a tag that is complete."""
        entry = self._outstanding.get(tag)
        return None if entry is None else entry.parts[number].server

    def hedge(self, tag: Tag, missing: Callable[[], Sequence[int]]) -> list[Redispatch]:
        """Send late parts of the `missing` ones to other servers too, if these hold replicas of all needed experts and the budget allows.

        The late response still counts if it comes first. Until it arrives, other replicas are preferred to its server: a server that
        stands still delays one tag, not every next one. Of a late trampoline, any server behind it may be the reason."""
        entry = self._outstanding.get(tag)
        if entry is None or self.computes_alone or (now := self._now()) - entry.since_seconds < MIN_SECONDS:
            return []  # a suspect crashes one server at a time
        found = []
        for number in missing() if self.hedging.has_budget else ():
            part, late = entry.parts[number], now - entry.sent.get(number, entry.since_seconds)
            if self.servers.is_lost(part.server) or late < self.hedging.late_after(part.server, len(part.rows_R)):
                continue
            if redo(FaultKind.LATE_PART, int(number in entry.hedged)) is not Redo.PART:
                continue  # no third server computes the same part
            if not self.hedging.has_budget:
                break
            others = self.servers.table(tag.layer, {part.server, *self.servers.behind.get(part.server, ())})
            if (others.servers_EB[part.expert_P] == part.server).any():
                continue  # it alone holds some of them
            self.hedging.spend()
            entry.hedged[number] = number
            self.servers.note_late(part.server)
            found.append(self._split(tag, entry, number, others))
        return found

    def overdue(self, tag: Tag, missing: Callable[[], Sequence[int]]) -> dict[str, tuple[float, float]]:
        """Servers whose response to `tag` is long overdue: process -> (seconds waited, usual maximum in seconds)."""
        entry = self._outstanding.get(tag)
        if entry is None or (now := self._now()) - entry.since_seconds < OVERDUE_SECONDS:
            return {}
        found = {}
        for number in missing():
            part, age = entry.parts[number], now - entry.sent.get(number, entry.since_seconds)
            if number in entry.unsent or self.servers.is_lost(part.server):
                continue
            usual = self.hedging.late_after(part.server, len(part.rows_R))
            overdue = self.hedging.overdue_after(part.server, len(part.rows_R))
            if age >= overdue:
                found[self.processes[part.server]] = age, usual
        return found
