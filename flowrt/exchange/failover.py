"""Failover between expert servers: redispatches the parts of a lost server, and includes the server again when it returns.

Each attention worker whose experts are in other processes has one Failover (EaaS section 3.4; DESIGN section 1). The worker's links and
the launcher detect the loss; expert_client.py splits the parts.

All calls are synchronous and on the loop. A server is identified by its process name. Events may come twice and in any order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from flowrt.dataflow.runner import Runner
from flowrt.dataflow.subgraph import RoutedOutput, part_of
from flowrt.exchange.expert_client import ExpertClient, Redispatch
from flowrt.graph.model import Graph
from flowrt.operators.replica_table import UNAVAILABLE
from flowrt.transports.wire.message import Tag


class Failover:
    """Failover of one client. `dispatch` names its dispatch node.

    `may_redispatch(tag, num_losses)`: whether to resend a part lost with that many servers. False: its step has ended.
    """

    def __init__(
        self, graph: Graph, dispatch: str, client: ExpertClient, runner: Runner, may_redispatch: Callable[[Tag, int], bool]
    ) -> None:
        self._dispatch, self.client, self._runner, self._may_redispatch = dispatch, client, runner, may_redispatch
        edges = [edge for edge in graph.edges.values() if edge.source == dispatch]
        (self._combine, self._gather), *_ = [
            (edge.target, port.name)
            for edge in edges
            for port in graph.nodes[edge.target].inputs.values()
            if port.takes == "gather" and port.count == edge.target_port
        ]
        here = graph.nodes[dispatch].process
        self._servers: dict[str, list[int]] = {}  # process -> its server numbers in the expert map
        for edge in edges:
            process = graph.nodes[edge.target].process
            if process != here and edge.source_port.startswith("server"):
                self._servers.setdefault(process, []).append(int(edge.source_port.removeprefix("server")))
        self._server_of = {  # by the edge of its responses
            edge.id: int(graph.edges[edge.response_to].source_port.removeprefix("server"))
            for edge in graph.edges.values()
            if edge.target == self._combine and edge.response_to is not None
        }

    @property
    def processes(self) -> frozenset[str]:
        """The expert servers that this group uses."""
        return frozenset(self._servers)

    def mark_lost(self, process: str) -> None:
        """Mark the server lost and redispatch its pending parts to the remaining replicas, under the same tags. Its edges are closed."""
        servers = self._servers.get(process, [])
        for server in servers:
            self.client.remove_server(server)
        for tag, part in self._missing_at(frozenset(servers)):
            if self._may_redispatch(tag, self.client.record_loss(tag, part)):
                self._redispatch(tag, part)

    def mark_joined(self, process: str) -> None:
        """Use a new incarnation of the server, whose edges are open, and dispatch the parts that waited for a replica."""
        for server in self._servers.get(process, []):
            self.client.restore_server(server)
        self._redispatch_from(frozenset({UNAVAILABLE}))

    def redispatch_waiting(self) -> None:
        """Redispatch parts that were split by the previous map while `mark_joined` ran: their replica is back."""
        self._redispatch_from(frozenset({UNAVAILABLE}))

    def on_response(self, edge: int, tag: Tag) -> None:
        """Record the response of a server. The runner calls this before it matches the response."""
        self.client.record_response(self._server_of[edge], tag)

    def hedge(self) -> None:
        """Send late parts to other servers as well. The caller repeats this every few milliseconds."""
        self.client.hedging.update_avoided()
        for tag in self.client.tags:
            for redispatch in self.client.hedge(tag, self._runner.missing(self._combine, self._gather, tag)):
                self._send(tag, redispatch)

    def overdue(self) -> dict[str, tuple[float, float]]:
        """Expert servers whose response is long overdue: process -> (seconds waited, usual maximum in seconds)."""
        found: dict[str, tuple[float, float]] = {}
        for tag in self.client.tags:
            for server, late in self.client.overdue(tag, partial(self._runner.missing, self._combine, self._gather, tag)).items():
                process = self.client.processes[server]
                found[process] = max(late, found.get(process, late))
        return found

    def on_unsent(self, output: RoutedOutput) -> None:
        """Redispatch a part that was split before the loss of its server was known."""
        part = part_of(output.payload)
        if part is not None:
            self._redispatch(output.tag, part)

    def unavailable_text(self) -> str | None:
        """The user-visible reason why no step can be computed now; None when every expert has a replica."""
        experts = self.client.unavailable_experts
        if not experts:
            return None
        lost = ", ".join(sorted({self.client.processes[server] for server in self.client.lost}))
        some = ", ".join(map(str, experts[:8])) + (", ..." if len(experts) > 8 else "")
        return f"no replica is left of expert{'s' if len(experts) > 1 else ''} {some}: {lost} went down and is not back"

    # --- inside -----------------------------------------------------------------------------------------------------------

    def _redispatch_from(self, servers: frozenset[int]) -> None:
        for tag, part in self._missing_at(servers):
            self._redispatch(tag, part)

    def _missing_at(self, servers: frozenset[int]) -> Iterator[tuple[Tag, int]]:
        for tag in self.client.tags:
            missing = self._runner.missing(self._combine, self._gather, tag)
            for part in self.client.parts_at(servers, tag, missing):
                yield tag, part

    def _redispatch(self, tag: Tag, part: int) -> None:
        redispatch = self.client.redispatch(tag, part)
        if redispatch is not None:
            self._send(tag, redispatch)

    def _send(self, tag: Tag, redispatch: Redispatch) -> None:
        self._runner.replace_part(self._combine, self._gather, tag, redispatch.part, redispatch.by, self._dispatch, redispatch.outputs)
