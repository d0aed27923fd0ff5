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
from flowrt.graph.model import Graph, ReliabilitySettings
from flowrt.operators.dispatch import UNAVAILABLE
from flowrt.transports.wire.message import Tag


class Failover:
    """Failover of one client. `dispatch` names its dispatch node. `begin` passes the runner, which needs `on_unsent` first."""

    def __init__(self, graph: Graph, dispatch: str, client: ExpertClient) -> None:
        self._dispatch = dispatch
        self._client = client
        self._runner: Runner | None = None
        edges = [edge for edge in graph.edges.values() if edge.source == dispatch]
        (self._combine, self._gather), *_ = [
            (edge.target, port.name)
            for edge in edges
            for port in graph.nodes[edge.target].inputs.values()
            if port.takes == "gather" and port.count == edge.target_port
        ]
        here = graph.nodes[dispatch].process
        self._edges: dict[str, list[int]] = {}  # process -> the edges of its requests
        self._servers: dict[str, list[int]] = {}  # process -> its server numbers in the expert map
        for edge in edges:
            process = graph.nodes[edge.target].process
            if process != here and edge.source_port.startswith("server"):
                self._edges.setdefault(process, []).append(edge.id)
                self._servers.setdefault(process, []).append(int(edge.source_port.removeprefix("server")))
        self._server_of = {  # by the edge of its responses
            edge.id: int(graph.edges[edge.response_to].source_port.removeprefix("server"))
            for edge in graph.edges.values()
            if edge.target == self._combine and edge.response_to is not None
        }

    def begin(self, runner: Runner, may_redispatch: Callable[[Tag, int], bool] = lambda tag, num_losses: True) -> None:
        """`may_redispatch(tag, num_losses)`: whether to resend a part lost with that many servers. False: its step has ended."""
        self._runner, self._may_redispatch = runner, may_redispatch

    @property
    def processes(self) -> frozenset[str]:
        """The expert servers that this group uses."""
        return frozenset(self._servers)

    @property
    def num_redispatched(self) -> int:
        return self._client.num_redispatched

    def mark_lost(self, process: str) -> None:
        """Mark the server lost and redispatch its pending parts to the remaining replicas, under the same tags."""
        assert self._runner is not None
        servers = self._servers.get(process, [])
        self._runner.close_edges(self._edges.get(process, []))
        for server in servers:
            self._client.remove_server(server)
        for tag, part in self._missing_at(frozenset(servers)):
            if self._may_redispatch(tag, self._client.record_loss(tag, part)):
                self._redispatch(tag, part)

    def mark_joined(self, process: str) -> None:
        """Use a new incarnation of the server, and dispatch the parts that waited for a replica."""
        assert self._runner is not None
        self._runner.open_edges(self._edges.get(process, []))
        for server in self._servers.get(process, []):
            self._client.restore_server(server)
        self._redispatch_from(frozenset({UNAVAILABLE}))

    @property
    def has_waiting_parts(self) -> bool:
        """Whether some part waits for a replica of its experts."""
        return self._client.has_waiting_parts

    def redispatch_waiting(self) -> None:
        """Redispatch parts that were split by the previous map while `mark_joined` ran: their replica is back."""
        self._redispatch_from(frozenset({UNAVAILABLE}))

    def on_response(self, edge: int, tag: Tag) -> None:
        """Record the response of a server. The runner calls this before it matches the response."""
        self._client.record_response(self._server_of[edge], tag)

    def can_hedge(self, settings: ReliabilitySettings) -> bool:
        """Whether late parts are also sent to other servers: hedging is enabled and replicas exist."""
        return settings.hedge and bool(self._servers) and self._client.has_replicas

    def hedge(self) -> None:
        """Send late parts to other servers as well. The caller repeats this every few milliseconds."""
        assert self._runner is not None
        self._client.hedging.update_avoided()
        for tag in self._client.tags:
            for redispatch in self._client.hedge(tag, self._runner.missing(self._combine, self._gather, tag)):
                self._send(tag, redispatch)

    @property
    def is_idle(self) -> bool:
        """Whether no tag is outstanding."""
        return not self._client.tags

    def overdue(self) -> dict[str, tuple[float, float]]:
        """Expert servers whose response is long overdue: process -> (seconds waited, usual maximum in seconds)."""
        assert self._runner is not None
        found: dict[str, tuple[float, float]] = {}
        for tag in self._client.tags:
            for server, late in self._client.overdue(tag, partial(self._runner.missing, self._combine, self._gather, tag)).items():
                process = self._client.processes[server]
                found[process] = max(late, found.get(process, late))
        return found

    def on_unsent(self, output: RoutedOutput) -> None:
        """Redispatch a part that was split before the loss of its server was known."""
        part = part_of(output.payload)
        if part is not None:
            self._redispatch(output.tag, part)

    def roll_back(self, source: str, epoch: int) -> None:
        self._client.roll_back(source, epoch)

    def omit_unavailable(self, after_seconds: float) -> bool:
        """Leave out experts that have had no replica for `after_seconds`.

        Returns True when there are new ones: the caller rolls back the tags that wait for them, and the next attempt leaves them out.
        """
        return self._client.omitted.omit_unavailable(after_seconds)

    @property
    def omits_experts(self) -> bool:
        """Whether some expert is left out until a replica returns."""
        return self._client.omitted.has_omitted

    def take_degraded(self, step: Tag) -> bool:
        """Whether any tag of this step left out an expert. Called once per step, after its end."""
        return self._client.omitted.take_degraded(step)

    def unavailable_text(self) -> str | None:
        """The user-visible reason why no step can be computed now; None when every expert has a replica."""
        experts = self._client.unavailable_experts
        if not experts:
            return None
        lost = ", ".join(sorted({self._client.processes[server] for server in self._client.lost}))
        some = ", ".join(map(str, experts[:8])) + (", ..." if len(experts) > 8 else "")
        return f"no replica is left of expert{'s' if len(experts) > 1 else ''} {some}: {lost} went down and is not back"

    # --- inside -----------------------------------------------------------------------------------------------------------

    def _redispatch_from(self, servers: frozenset[int]) -> None:
        for tag, part in self._missing_at(servers):
            self._redispatch(tag, part)

    def _missing_at(self, servers: frozenset[int]) -> Iterator[tuple[Tag, int]]:
        assert self._runner is not None
        for tag in self._client.tags:
            missing = self._runner.missing(self._combine, self._gather, tag)
            for part in self._client.parts_at(servers, tag, missing):
                yield tag, part

    def _redispatch(self, tag: Tag, part: int) -> None:
        assert self._runner is not None
        redispatch = self._client.redispatch(tag, part)
        if redispatch is not None:
            self._send(tag, redispatch)

    def _send(self, tag: Tag, redispatch: Redispatch) -> None:
        assert self._runner is not None
        self._runner.replace_part(self._combine, self._gather, tag, redispatch.part, redispatch.by, self._dispatch, redispatch.outputs)
