"""Plans of the commonest case of a runner, which `_common_case.c` carries out: a message that alone completes a firing, and a short firing
whose outputs have credits. Every decision is made here or by the modules that the plans are made of; without the C module these do all."""

from __future__ import annotations

from collections.abc import Collection

from flowrt.dataflow.inbound_edges import InboundEdges
from flowrt.dataflow.matching import MatchingTable
from flowrt.dataflow.outbound_edges import OutboundEdges
from flowrt.dataflow.ready_firings import ReadyFirings
from flowrt.dataflow.subgraph import FusedSubgraph

try:
    from flowrt.dataflow._common_case import CommonCase
except ImportError:  # it was not built
    CommonCase = None  # type: ignore[assignment, misc]

__all__ = ["CommonCase", "CommonCasePlans"]


class CommonCasePlans:
    """`one_by_one`: the nodes that run one tag per call, and keep no request."""

    def __init__(
        self,
        inbound: InboundEdges,
        outbound: OutboundEdges,
        subgraph: FusedSubgraph,
        table: MatchingTable,
        ready: ReadyFirings,
        sinks: Collection[str],
    ) -> None:
        self._inbound, self._outbound, self._subgraph, self._table, self._ready = inbound, outbound, subgraph, table, ready
        self._sinks = sinks
        self.one_by_one: Collection[str] = ()

    def plan_arrival(self, edge_id: int, layer: int) -> tuple[object, ...] | None:
        """How to accept a message of an edge from another worker that alone completes a firing; None: `accept` decides each time."""
        inbound = self._inbound.edges.get(edge_id)
        if inbound is None or not inbound.is_plain_at(layer) or inbound.target in self._sinks:
            return None
        if not self._table.alone(inbound.edge, layer):
            return None
        schema = inbound.schema
        checked = (None, 0, None) if schema is None else (schema.known_sources, schema.num_micro_batches, schema.fitting)
        return inbound, inbound.peer, inbound.size, inbound.target, inbound.port, inbound.via, inbound.read, *checked

    def plan_firing(self, node: str, layer: int) -> tuple[object, ...] | None:
        """How to send the outputs of a firing; None: `settle` decides each time."""
        routes = self._subgraph.plain_routes(node, layer) if node in self.one_by_one else None
        if routes is None:
            return None
        plans: dict[str, tuple[object, ...]] = {}
        for port, edges in routes.items():
            outbound = [self._outbound.edges.get(edge.id) for edge, _ in edges]
            if not all(each is not None and each.is_plain for each in outbound):
                return None
            plans[port] = tuple(each.plan(apply) for each, (_, apply) in zip(outbound, edges, strict=True) if each is not None)
        return self._ready.reach_of(node), plans
