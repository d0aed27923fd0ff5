"""Failover between expert servers: redispatches the parts of a lost server, and includes the server again when it returns.

Each attention worker whose experts are in other processes has one Failover (EaaS section 3.4). The worker's links and
the launcher detect the loss; expert_client.py splits the parts.

All calls are synchronous and on the loop. A server is identified by its process name. Events may come twice and in any order.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from functools import partial
from typing import Protocol

from flowrt.actors.control import DeathCause
from flowrt.dataflow.fences import ENDED
from flowrt.dataflow.parts import FAILED, FailedHeader, PartHeader
from flowrt.dataflow.runner import Runner
from flowrt.dataflow.subgraph import RoutedOutput, part_of
from flowrt.errors import FailureCause
from flowrt.exchange.expert_client import ExpertClient, Redispatch
from flowrt.graph.model import Graph
from flowrt.graph.placement import servers_of
from flowrt.operators.replica_table import UNAVAILABLE
from flowrt.reliability.fault_table import FaultKind, Redo, redo
from flowrt.transports.wire.message import Message, Tag


class Steps(Protocol):
    """The running steps of the group."""

    def fail_steps(self, tags: Collection[Tag], error: str, *, crashed: bool = False, left: Collection[Tag] = ()) -> None:
        """The steps of these tags may be the reason why a server was lost, or has `crashed`; or those of `left`, which were rolled back."""
        ...


class Failover:
    """Failover of one client. `dispatch` names its dispatch node."""

    def __init__(
        self,
        graph: Graph,
        dispatch: str,
        client: ExpertClient,
        runner: Runner,
        steps: Steps,
    ) -> None:
        self._dispatch, self.client, self._runner, self._steps = dispatch, client, runner, steps
        self._awaited: dict[str, Collection[Tag]] = {}  # lost server -> the tags that it had not responded to
        self._exposed: dict[tuple[Tag, int], str] = {}  # part at a trampoline when a server behind it crashed -> that crash
        self.use(graph)

    def use(self, graph: Graph) -> None:
        """Use this graph from now on."""
        dispatch = self._dispatch
        edges = [edge for edge in graph.edges.values() if edge.source == dispatch]
        (self._combine, self._gather), *_ = [
            (edge.target, port.name)
            for edge in edges
            for port in graph.nodes[edge.target].inputs.values()
            if port.takes == "gather" and port.count == edge.target_port
        ]
        here = graph.nodes[dispatch].process
        self._servers: dict[str, list[int]] = {}  # process -> its server numbers in the expert map
        for server, process in servers_of(graph, dispatch).items():
            if process != here:
                self._servers.setdefault(process, []).append(server)
        self._server_of = {  # by the edge of its responses
            edge.id: int(graph.edges[edge.response_to].source_port.removeprefix("server"))
            for edge in graph.edges.values()
            if edge.target == self._combine and edge.response_to is not None
        }

    @property
    def processes(self) -> frozenset[str]:
        """The expert servers that this group uses."""
        return frozenset(self._servers)

    def undispatched(self) -> set[tuple[Tag, int]]:
        """Parts, by tag and number, that wait for a replica of their experts although there is an available one."""
        return set(self._missing_at(frozenset({UNAVAILABLE})))

    def leftovers(self) -> list[str]:
        """What is left when all requests have ended and no message is in flight."""
        late = [f"server {server} counts as late" for server in self.client.servers.late]
        return [f"parts of {tag}" for tag in self.client.tags] + late

    def ways_to(self, process: str) -> set[str]:
        """The processes that parts for this server may be at: itself, and the trampolines in front of it."""
        servers = self._servers.get(process, ())
        fronts = [front for front, behind in self.client.servers.behind.items() if not {*servers}.isdisjoint(behind)]
        return {process, *(self.client.processes[front] for front in fronts)}

    def mark_lost(self, process: str, sources: Iterable[str] = (), awaited: Collection[Tag] = ()) -> None:
        """Mark the server lost. Its pending parts wait for `settle`: a part may be the cause of the death. Its edges are closed: what is
        to be sent there later comes to `on_unsent`. `sources`: of its tags, which have ended with it. `awaited`: the tags that it,
        or a trampoline in front of it, had not responded to."""
        self._awaited[process] = awaited
        for source in sources:
            self.client.roll_back(source, ENDED)
        self.client.servers.lose(process)
        if any(self._missing_at(frozenset(self._servers.get(process, [])))):
            self.client.servers.lose(process, awaits_cause=True)

    def settle(self, process: str, cause: DeathCause | None) -> None:
        """Redo the pending parts of a lost server, now that the cause of its death is known, or (None) has not come in time: after a crash
        or hang the steps fail that have parts there, after any other loss the parts go to replicas. The loss counts, unless the run
        ended the server on purpose. A trampoline that is lost with a crashed server behind it cannot report the parts that it had sent
        there: the steps of the parts that it had then fail as well."""
        awaited = self._awaited.pop(process, ())
        servers = frozenset(self._servers.get(process, ()))
        if crash := f"{process} {cause.how}" if cause is not None and cause.may_recur else "":
            self._expose(servers, crash)
        if not self.client.servers.settle(process):
            return
        if crash:
            left = [tag for tag in awaited if tag not in self.client.tags]
            return self._steps.fail_steps(self._tags_at(servers), crash, crashed=True, left=left)
        counts, lost = cause is None or not cause.is_on_purpose, []
        missing = [each for each in self._missing_at(servers) if self.client.server_of(*each) in servers]  # else others compute late ones
        if exposed := next((self._exposed[each] for each in missing if each in self._exposed), None):
            return self._steps.fail_steps(self._tags_at(servers), exposed, crashed=True)
        for tag, part in missing:
            if not counts or redo(FaultKind.LOST_SERVER, self.client.record_loss(tag, part) - 1) is Redo.PART:
                self._redispatch(tag, part)
            else:
                lost.append(tag)
        self._steps.fail_steps(lost, "expert servers died or hung again and again while they computed a part of this request")

    def mark_joined(self, process: str) -> None:
        """Use a new incarnation of the server, whose edges are open, and dispatch the parts that waited for a replica."""
        self.client.servers.join(process)
        self._redispatch_from(frozenset({UNAVAILABLE}))

    def redispatch_waiting(self) -> None:
        """Redispatch parts that were split by the previous map while `mark_joined` ran: their replica is back."""
        self._redispatch_from(frozenset({UNAVAILABLE}))

    def on_response(self, edge: int, tag: Tag, message: Message) -> None:
        """Record the response of a server, and send the next one of parts that go one by one. The runner calls this before it matches the
        response."""
        server = self._server_of.get(edge)
        if server is None:
            return  # of a KV transfer
        self.client.record_response(server, tag)
        if message.kind == FAILED:
            self._on_failed(tag, server, message.decode_header(FailedHeader))
        elif self.client.computes_alone and (requests := self.client.next_request(tag, message.decode_header(PartHeader).part)):
            self._runner.emit(self._dispatch, tag, requests)

    def hedge(self) -> None:
        """Send late parts to other servers as well. The caller repeats this every few milliseconds."""
        self.client.hedging.update_slow()
        for tag in self.client.tags:
            for redispatch in self.client.hedge(tag, partial(self._missing, tag)):
                self._send(tag, redispatch)

    def overdue(self) -> dict[str, tuple[float, float]]:
        """Expert servers whose response is long overdue: process -> (seconds waited, usual maximum in seconds)."""
        found: dict[str, tuple[float, float]] = {}
        for tag in self.client.tags:
            for process, late in self.client.overdue(tag, partial(self._missing, tag)).items():
                found[process] = max(late, found.get(process, late))
        return found

    def on_unsent(self, output: RoutedOutput) -> None:
        """Redispatch a part that was split before the loss of its server was known."""
        if (part := part_of(output.payload)) is not None:
            self._redispatch(output.tag, part)

    def unavailable_text(self) -> str | None:
        """The user-visible reason why no step can be computed now; None when every expert has a replica."""
        experts = self.client.servers.unavailable_experts
        if not experts:
            return None
        lost = ", ".join(name for name in self.client.servers.lost if name in self._servers)
        some = ", ".join(map(str, experts[:8])) + (", ..." if len(experts) > 8 else "")
        return f"no replica is left of expert{'s' if len(experts) > 1 else ''} {some}: {lost} went down and is not back"

    # --- inside -----------------------------------------------------------------------------------------------------------

    def _expose(self, servers: frozenset[int], crash: str) -> None:
        """Note the parts at the trampolines in front of servers that crashed. Each trampoline that is not lost reports those that it had
        sent there."""
        fronts = frozenset(each for each, behind in self.client.servers.behind.items() if not servers.isdisjoint(behind))
        self._exposed = {each: text for each, text in self._exposed.items() if each[0] in self.client.tags}
        self._exposed |= dict.fromkeys(self._missing_at(fronts), crash)

    def _tags_at(self, servers: Iterable[int]) -> list[Tag]:
        """The tags that may have crashed one of these servers: with parts there, at another lost one whose cause of death is not known yet,
        or at a trampoline in front of one of these. They fail together: the rollback forgets the parts that later notices are about."""
        numbers, behind = {*servers}, self.client.servers.behind
        numbers.update(number for process in self.client.servers.due for number in self._servers.get(process, ()))
        numbers.update([each for each in behind if not numbers.isdisjoint(behind[each])])
        return list(dict.fromkeys(tag for tag, _ in self._missing_at(frozenset(numbers))))

    def _on_failed(self, tag: Tag, server: int, header: FailedHeader) -> None:
        """A trampoline has lost what a part needs."""
        if header.cause == FailureCause.CRASHED:
            is_open = tag in self.client.tags  # else it was rolled back, or is complete
            others = self._tags_at((server, *self.client.servers.behind.get(server, ()))) if is_open else ()
            self._steps.fail_steps(dict.fromkeys((tag, *others)), header.error, crashed=True)
        elif header.cause == FailureCause.LOST and header.part in self._missing(tag):
            self._redispatch(tag, header.part)

    def _missing(self, tag: Tag) -> list[int]:
        return self._runner.missing(self._combine, self._gather, tag)

    def _redispatch_from(self, servers: frozenset[int]) -> None:
        for tag, part in self._missing_at(servers):
            self._redispatch(tag, part)

    def _missing_at(self, servers: frozenset[int]) -> Iterator[tuple[Tag, int]]:
        for tag in self.client.tags:
            for part in self.client.parts_at(servers, tag, self._missing(tag)):
                yield tag, part

    def _redispatch(self, tag: Tag, part: int) -> None:
        redispatch = self.client.redispatch(tag, part)
        if redispatch is not None:
            self._send(tag, redispatch)

    def _send(self, tag: Tag, redispatch: Redispatch) -> None:
        self._runner.replace_part(self._combine, self._gather, tag, redispatch.part, redispatch.by, self._dispatch, redispatch.outputs)
