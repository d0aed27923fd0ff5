"""A worker on emulated hardware: its computing takes modelled time, and its channels are emulated links.

process.py creates it when the graph has `emulate:`. flowrt/actors/emulated_links.py emulates the links.

An `attention` node is charged for every layer that it runs, and an `experts` node for every layer in each of its calls: requests of
one layer in one call are one batch, as on hardware. Nodes fused into a firing with them (gate, dispatch, combine, dense and shared
experts) run within that time. A firing with neither (the embedding alone, the head) takes its real time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from flowrt.actors.emulated_links import EmulatedLinks
from flowrt.dataflow.matching import Firing
from flowrt.dataflow.payload import Payload
from flowrt.dataflow.subgraph import NodeFunction
from flowrt.emulation import EmulatedCompute, EmulationStatistics
from flowrt.graph.fuse import fuse
from flowrt.graph.model import Emulation, Graph
from flowrt.seams import Compute
from flowrt.timer import Timer


class EmulatedWorker:
    """The emulation of one process of `graph`. It owns `timer`; its `compute` and `links` are for the worker's runner and Links."""

    def __init__(self, graph: Graph, process: str, emulation: Emulation, compute: Compute, timer: Timer) -> None:
        self._timer = timer
        charges = emulation.charges()
        self._seconds = {node.name: charges[node.operator] for node in graph.nodes_of(process) if node.operator in charges}
        charging = [chain[0] for chain in fuse(graph, process).chains if self._seconds.keys() & set(chain)]
        self.compute = EmulatedCompute(compute, timer, emulation.dilation, charging)
        self.links = EmulatedLinks(emulation, timer)

    def charged(self, functions: Mapping[str, NodeFunction]) -> dict[str, NodeFunction]:
        """Return the functions, with charging added to those of charged nodes."""
        return {name: self._charged(name, function) if name in self._seconds else function for name, function in functions.items()}

    def statistics(self) -> EmulationStatistics:
        return EmulationStatistics(replace(self.compute.lateness), replace(self.links.lateness), self.compute.free_seconds)

    def close(self) -> None:
        """Release the timer and the links. Call after the links and the compute seam are closed. Idempotent."""
        self.links.close()
        self._timer.close()

    def _charged(self, name: str, function: NodeFunction) -> NodeFunction:
        seconds: float = self._seconds[name]
        charge: Callable[[float], None] = self.compute.charge

        def run(firings: Sequence[Firing]) -> Sequence[Mapping[str, Payload]]:
            charge(seconds * len({firing.tag.layer for firing in firings}))
            return function(firings)

        return run
