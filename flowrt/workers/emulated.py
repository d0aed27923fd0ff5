"""A worker on emulated hardware: its computing takes modelled time, and its channels are emulated links.

process.py creates it when the graph has `emulate:`. flowrt/actors/emulated_links.py emulates the links.

A node whose operator has a cost (flowrt/kinds/emulated_costs.py) is charged for every layer of each of its calls: requests of one layer in
one call are one batch, as on hardware. Nodes without a cost that are fused into a firing with it run within that time. A firing without
any charged node takes its real time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from flowrt.actors.emulated_links import EmulatedLinks
from flowrt.costs.work import FiringLoad
from flowrt.dataflow.matching import Firing
from flowrt.dataflow.payload import Payload
from flowrt.dataflow.subgraph import NodeFunction
from flowrt.emulation import EmulatedCompute, EmulationStatistics
from flowrt.graph.fuse import fuse
from flowrt.graph.kinds import kind_of
from flowrt.graph.model import Graph
from flowrt.kinds.emulated_costs import CallCosts, MessageBytes, link_share
from flowrt.seams import Compute
from flowrt.timer import Timer
from flowrt.workers.model_nodes import config_of


class EmulatedWorker:
    """The emulation of one process of `graph`. It owns `timer`; its `compute` and `links` are for the worker's runner and Links."""

    def __init__(self, graph: Graph, process: str, compute: Compute, timer: Timer) -> None:
        emulation = graph.emulation
        assert emulation is not None
        self._timer = timer
        checkpoint = config_of(graph) if emulation.devices or emulation.model else None
        self._costs = CallCosts(graph, process, checkpoint)
        self._charged = {node.name: node.operator for node in graph.nodes_of(process) if self._costs.charges(node.operator)}
        charging = [chain[0] for chain in fuse(graph, process).chains if self._charged.keys() & set(chain)]
        self.compute = EmulatedCompute(compute, timer, emulation.dilation, charging)
        pulls = {edge.id for edge in graph.edges.values() if graph.nodes[edge.target].kind.kv == "offers"}
        self.links = EmulatedLinks(emulation, timer, MessageBytes(graph, checkpoint), link_share(graph, checkpoint), pulls)

    def charged(self, functions: Mapping[str, NodeFunction]) -> dict[str, NodeFunction]:
        """Return the functions, with charging added to those of charged nodes."""
        charge: Callable[[float], None] = self.compute.charge

        def charging(function: NodeFunction, operator: str) -> NodeFunction:
            def run(firings: Sequence[Firing]) -> Sequence[Mapping[str, Payload]]:
                charge(modelled_seconds(operator, self._costs, firings))
                return function(firings)

            return run

        return {name: charging(each, self._charged[name]) if name in self._charged else each for name, each in functions.items()}

    def statistics(self) -> EmulationStatistics:
        return EmulationStatistics(replace(self.compute.lateness), replace(self.links.lateness), self.compute.free_seconds)

    def close(self) -> None:
        """Release the timer and the links. Call after the links and the compute seam are closed. Idempotent."""
        self.links.close()
        self._timer.close()


def modelled_seconds(operator: str, costs: CallCosts, firings: Iterable[Firing]) -> float:
    """The undilated time of one call: for each layer, the cost of the rows of all its firings as one batch."""
    load_of, layers = kind_of(operator).load or _rows_load, defaultdict[int, list[Mapping[str, Any]]](list)
    for firing in firings:
        layers[firing.tag.layer].append(firing.inputs)
    return sum(costs.seconds(operator, layer, load_of(inputs), len(inputs)) for layer, inputs in layers.items())


def _rows_load(firings: Sequence[Mapping[str, Any]]) -> FiringLoad:
    """The rows of each firing's longest input."""
    return FiringLoad(sum(max(map(num_rows_of, inputs.values()), default=0) for inputs in firings))


def num_rows_of(payload: Payload | list[Payload]) -> int:
    """Rows of the first tensor of an input."""
    if isinstance(payload, list):  # of a gather port
        return sum(map(num_rows_of, payload))
    return len(payload.tensors[0]) if payload.tensors and payload.tensors[0].dim() else 1
