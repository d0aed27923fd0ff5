"""One firing and all that is fused behind it: the pure-compute half of the runner.

Here: NodeFunction, Output, Region, which runs an entry node and goes on into every node of the process whose inputs are then
at hand. Not here: the loop, credits, links (runner.py), which nodes are fused (flowrt/graph/fuse.py). Called by the runner,
inside the compute seam.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager

import msgspec
import torch

from flowrt.dataflow.matching import Firing, MatchingTable
from flowrt.dataflow.parts import PartHeader
from flowrt.dataflow.payload import Payload
from flowrt.graph.model import Edge, Graph
from transports.message import Tag

# torch.inference_mode() does the same behind three Python calls, which cost more than routing a message.
_InferenceMode: Callable[[bool], AbstractContextManager[object]] = getattr(torch._C, "_InferenceMode", torch.inference_mode)
_Route = tuple[Edge, int | None, bool]  # the edge, the edge that it answers, whether it changes the tag

NodeFunction = Callable[[Sequence[Firing]], Sequence[Mapping[str, Payload]]]
"""Runs a node for one or more tags. Firing.inputs hold a Payload per port (a list of them on a gather port); the answer holds,
per firing, at most one Payload per output port. A port left out sends nothing."""


class OperatorError(Exception):
    """An operator raised, or gave something its ports do not allow. The text names the node; the cause is kept."""


class Output(msgspec.Struct, frozen=True, gc=False):
    """A payload that leaves the firing: along `edge`, with its tag already stepped."""

    edge: Edge
    tag: Tag
    payload: Payload


class Region:
    """The nodes of one process, run from an entry until everything left goes to another entry or another process."""

    def __init__(
        self, graph: Graph, process: str, fused: frozenset[str], functions: Mapping[str, NodeFunction], table: MatchingTable
    ) -> None:
        self._functions = functions
        self._table = table
        self._fused = fused
        self._out: dict[tuple[str, str], list[Edge]] = {}
        self._gathers = {edge.id for edge in graph.edges if edge.target in fused and table.gathers(edge)}
        self._routes: dict[tuple[str, str, int], tuple[_Route, ...]] = {}
        names = {node.name for node in graph.nodes_of(process)}
        for edge in graph.edges:
            if edge.source in names:
                self._out.setdefault((edge.source, edge.source_port), []).append(edge)

    def run(self, firings: Sequence[Firing]) -> list[Output]:
        """Fire them (all of one node, more than one only if it `batches`), and what is fused behind. Raises OperatorError."""
        fused, functions, route = self._fused, self._functions, self.route
        leaving: list[Output] = []
        waiting: deque[Sequence[Firing]] = deque()
        with _InferenceMode(True):
            while True:
                node = firings[0].node
                try:
                    answers = functions[node](firings)
                except OperatorError:
                    raise
                except KeyboardInterrupt:
                    raise
                except BaseException as error:  # CancelledError or SystemExit too: raised on, it would end our tasks without a word
                    raise _failed(firings[0], error) from error
                if len(answers) != len(firings):
                    raise OperatorError(f"{node} was given {len(firings)} tags and answered {len(answers)}")
                for firing, outputs in zip(firings, answers, strict=True):
                    for output in route(firing, outputs):
                        if not fused or output.edge.target not in fused:
                            leaving.append(output)
                        else:
                            waiting.extend((next_firing,) for next_firing in self.arrive(output))
                if not waiting:
                    return leaving
                firings = waiting.popleft()

    def arrive(self, output: Output) -> tuple[Firing, ...]:
        """Match a message for a fused node of this process."""
        edge, payload = output.edge, output.payload
        part = part_of(payload) if edge.id in self._gathers else None
        return self._table.arrive(edge, output.tag, payload, part).firings

    def route(self, firing: Firing, outputs: Mapping[str, Payload]) -> list[Output]:
        """Which edges the outputs of a firing take. Raises OperatorError for a port the node does not have."""
        routed = []
        node, tag = firing.node, firing.tag
        for port, payload in outputs.items():
            routes = self._routes.get((node, port, tag.layer))
            if routes is None:
                routes = self._find_routes(node, port, tag.layer)
            for edge, answers, changes_tag in routes:
                if answers is None or answers in firing.via:
                    routed.append(Output(edge, edge.tag.apply(tag) if changes_tag else tag, payload))
        return routed

    def _find_routes(self, node: str, port: str, layer: int) -> tuple[_Route, ...]:
        edges = self._out.get((node, port))
        if edges is None:
            raise OperatorError(f"{node} gave an output {port!r} that no edge takes")
        routes = tuple((edge, edge.answers, edge.tag.kind != "same") for edge in edges if layer in edge.layers)
        self._routes[node, port, layer] = routes
        return routes

    def is_fused(self, node: str) -> bool:
        return node in self._fused


def _failed(firing: Firing, error: BaseException) -> OperatorError:
    tag = firing.tag
    return OperatorError(f"{firing.node} failed at step {tag.step}, layer {tag.layer}: {type(error).__name__}: {error}")


def part_of(payload: Payload) -> int | None:
    """The part id a payload carries, if it carries one."""
    return None if payload.header is None else payload.header_as(PartHeader).part
