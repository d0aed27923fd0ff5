"""The outstanding parts of one client of the expert servers, by tag. Pure but for tensors. Which servers are used: servers.py.

The dispatch and combine nodes of a group share one ExpertClient.

A lost part is split again over the remaining replicas, under new ids, and the first complete cover of a tag counts (DESIGN section 1;
EaaS section 3.4). Pairs of an expert without a replica form a part of UNAVAILABLE: it is not sent, and is split again when a replica
returns. Pairs of omitted experts are left out when a tag is split (omitted_experts.py).

Nodes call `parts_to_send`, `add_tag`, `parts`, `note_not_finite` and `forget` from the compute thread; all other calls come from the loop.
Each call is one step on a dict, or works on entries that it has taken out.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from flowrt.dataflow.parts import PartHeader
from flowrt.dataflow.payload import Payload
from flowrt.exchange.servers import Servers, via
from flowrt.exchange.trampoline import Trampolines, bundle
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
    """The arguments are those of Servers."""

    def __init__(
        self,
        expert_map: ExpertMap,
        processes: Sequence[str],
        device: torch.device | str = "cpu",
        now: Callable[[], float] = lambda: 0.0,
        trampolines: Trampolines | None = None,
    ) -> None:
        self._now, self.servers = now, Servers(expert_map, processes, device, now)
        self.processes, self.hedging = processes, self.servers.hedging
        self._outstanding: dict[Tag, OutstandingTag] = {}
        self._epochs: dict[str, int] = {}
        self.trampolines = trampolines or Trampolines({}, {}, {})
        self._late_parts: dict[tuple[Tag, int], int] = {}  # parts of late servers, through trampolines -> server
        self._not_finite: dict[tuple[str, int, int, int], str] = {}  # by step: the first part that was not finite, as text
        self.computes_alone = False  # the running step belongs to a suspect, and no other step runs
        self.num_redispatched = 0  # parts that were split again

    # --- outstanding parts ------------------------------------------------------------------------------------------------

    def parts_to_send(self, tag: Tag, parts: list[Part]) -> list[Part]:
        """`parts` of a tag that is being split, without the pairs of omitted experts."""
        return self.servers.omitted.leave_out(tag, parts) if self.servers.omitted.has_omitted else parts

    def add_tag(self, tag: Tag, x_TH: Tensor, num_active: int, parts: list[Part]) -> dict[str, Payload]:
        """Record the parts of a tag. Returns the requests by output port; part ids are indexes into `parts`."""
        entry = OutstandingTag(self._now(), x_TH, num_active, parts, len(parts))
        requests = self._requests(entry, 0, may_forward=True)
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
                text = f"{self.processes[part.server]} returned NaN or infinity in layer {tag.layer}"
                if self.servers.avoid(self.processes[part.server]):
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
            found = self.trampolines.route({number: entry.parts[number] for number in numbers}, self.servers.may_forward)
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
        self.servers.note_response(self.processes[server])
        entry = self._outstanding.get(tag)
        if entry is None or entry.hedged or self.computes_alone:
            return
        for part in entry.parts[: entry.num_first]:
            if part.server == server:
                self.hedging.record_response(server, part.rows_R.shape[0], self._now() - entry.since_seconds)
                return

    def record_forwarded(self, trampoline: int, tag: Tag, numbers: Sequence[int]) -> None:
        """Record responses that came through a trampoline."""
        self.servers.note_response(via(self.trampolines.processes[trampoline]))
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
        self.servers.note_response(via(self.trampolines.processes[trampoline]))
        if (server := self._late_parts.pop((tag, number), None)) is not None:
            self.servers.note_response(self.processes[server])

    def lose_trampoline(self, trampoline: int) -> list[tuple[Tag, int]]:
        """The trampoline is lost, and what is late behind it will not come. Returns the parts that travelled through it."""
        for part, server in list(self._late_parts.items()):
            if self.trampolines.of(server) == trampoline:
                del self._late_parts[part]
                self.servers.note_response(self.processes[server])
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
            if self.servers.is_lost(part.server) or age < self.hedging.late_after(part.server, len(part.rows_R)):
                continue
            if redo(FaultKind.LATE_PART, int(number in entry.hedged)) is not Redo.PART:
                continue  # no third server computes the same part
            if not self.hedging.has_budget:
                break
            trampoline, is_server_suspect = self._late_hop(entry, number)
            others = self.servers.table(tag.layer, {part.server} if is_server_suspect else ())
            if trampoline is None and (others.servers_EB[part.expert_P] == part.server).any():
                continue  # it alone holds some of them
            self.hedging.spend()
            entry.hedged[number] = number
            redispatch = self._split(tag, entry, number, others)
            if trampoline is not None:
                self.servers.note_late(via(self.trampolines.processes[trampoline]))
            if is_server_suspect:
                self.servers.note_late(self.processes[part.server])
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
            if number >= entry.num_first or number in entry.unsent or self.servers.is_lost(part.server):
                continue
            usual = self.hedging.late_after(part.server, len(part.rows_R))
            overdue = self.hedging.overdue_after(part.server, len(part.rows_R))
            if age >= overdue:
                trampoline, is_server_suspect = self._late_hop(entry, number)
                is_trampolines = trampoline is not None and not is_server_suspect
                found[self.trampolines.processes[trampoline or 0] if is_trampolines else self.processes[part.server]] = age, usual
        return found

    def lose(self, process: str) -> None:
        """Forget what is late at this process: it has ended."""
        self._late_parts = {part: server for part, server in self._late_parts.items() if self.processes[server] != process}
