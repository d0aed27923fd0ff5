"""Executes one firing and the nodes fused behind it: the pure computing part of the runner.

A `Region` runs an entry node and continues into every fused node whose inputs are then complete. flowrt/graph/fuse.py decides
which nodes are fused.
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
from flowrt.transports.wire.message import Tag

# torch.inference_mode() does the same behind three Python calls, which cost more than routing a message.
_InferenceMode: Callable[[bool], AbstractContextManager[object]] = getattr(torch._C, "_InferenceMode", torch.inference_mode)

NodeFunction = Callable[[Sequence[Firing]], Sequence[Mapping[str, Payload]]]
"""Runs a node for one or more tags. Firing.inputs hold a Payload per port (a list of them on a gather port); the answer holds,
per firing, at most one Payload per output port. A port left out sends nothing."""


class OperatorError(Exception):
    """An operator raised an error, or returned outputs that its ports do not allow. The text names the node; `__cause__` is kept."""


class Output(msgspec.Struct, frozen=True, gc=False):
    """A payload that leaves a firing along `edge`. `tag` already has the edge's step applied."""

    edge: Edge
    tag: Tag
    payload: Payload


class _Route:
    """One edge that takes an output at one layer, with the properties needed per message."""

    __slots__ = ("alone", "changes_tag", "edge", "fused", "port", "request_id", "target", "urgent", "via")

    def __init__(self, edge: Edge, fused: bool, alone: bool, urgent: bool) -> None:
        self.edge, self.request_id, self.changes_tag = edge, edge.request_id, edge.tag.kind != "same"
        self.target, self.port, self.via = edge.target, edge.target_port, (edge.id,)
        self.fused = fused
        self.alone = alone  # fused targets: this message is the target's only input
        self.urgent = urgent  # fused targets: outputs of the target may go to another worker


class Region:
    """The nodes of one process. Runs from an entry node until all remaining outputs go to another entry or another process."""

    def __init__(
        self, graph: Graph, process: str, fused: frozenset[str], functions: Mapping[str, NodeFunction], table: MatchingTable
    ) -> None:
        self._functions = functions
        self._table = table
        self._fused = fused
        self._out: dict[tuple[str, str], list[Edge]] = {}
        self._gathers = {edge.id for edge in graph.edges.values() if edge.target in fused and table.gathers(edge)}
        self._routes: dict[tuple[str, str, int], tuple[_Route, ...]] = {}
        names = {node.name for node in graph.nodes_of(process)}
        for edge in graph.edges.values():
            if edge.source in names:
                self._out.setdefault((edge.source, edge.source_port), []).append(edge)
        # Answers go with the rest: with them goes the credit of what was asked, which is consumed only when the firing ends.
        self._crossing = {
            edge.id for edge in graph.edges.values() if edge.source in names and edge.target not in names and edge.request_id is None
        }
        self._urgent = _leading_to(self._crossing, [edge for edge in graph.edges.values() if edge.source in fused])

    def run(self, firings: Sequence[Firing], leave: Callable[[list[Output]], None] | None = None) -> list[Output]:
        """Run `firings` (all of one node; several only if it `batches`) and the nodes fused behind them.

        Nodes with outputs to other workers run first. Calls `leave(outputs)` with the outputs collected so far when they include outputs to
        other workers and the firing continues, so that they are sent early. Raises OperatorError.
        """
        functions, routes = self._functions, self._routes
        leaving: list[Output] = []
        urgent: deque[Sequence[Firing]] = deque()
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
                    tag = firing.tag
                    for port, payload in outputs.items():
                        ways = routes.get((node, port, tag.layer))
                        if ways is None:
                            ways = self._find_routes(node, port, tag.layer)
                        for route in ways:
                            if route.request_id is not None and route.request_id not in firing.via:
                                continue
                            edge = route.edge
                            stepped = edge.tag.apply(tag) if route.changes_tag else tag
                            if not route.fused:
                                leaving.append(Output(edge, stepped, payload))
                            elif route.alone:
                                then = Firing(route.target, stepped, {route.port: payload}, route.via)
                                (urgent if route.urgent else waiting).append((then,))
                            else:
                                for then in self.arrive(Output(edge, stepped, payload)):
                                    (urgent if route.urgent else waiting).append((then,))
                if urgent:
                    firings = urgent.popleft()
                elif waiting:
                    firings = waiting.popleft()
                else:
                    return leaving
                if leave is not None and any(output.edge.id in self._crossing for output in leaving):
                    # With all that was given before: an answer may be back before this ends, and its plan must be known by then.
                    going = [output for output in leaving if output.edge.request_id is None]
                    leaving = [output for output in leaving if output.edge.request_id is not None]
                    leave(going)

    def arrive(self, output: Output) -> tuple[Firing, ...]:
        """Match a message for a fused node of this process."""
        edge, payload = output.edge, output.payload
        part = part_of(payload) if edge.id in self._gathers else None
        return self._table.arrive(edge, output.tag, payload, part).firings

    def route(self, firing: Firing, outputs: Mapping[str, Payload]) -> list[Output]:
        """Select the edges of each output of a firing. Raises OperatorError for an output port that no edge takes."""
        routed = []
        node, tag = firing.node, firing.tag
        for port, payload in outputs.items():
            for route in self._routes.get((node, port, tag.layer)) or self._find_routes(node, port, tag.layer):
                if route.request_id is None or route.request_id in firing.via:
                    routed.append(Output(route.edge, route.edge.tag.apply(tag) if route.changes_tag else tag, payload))
        return routed

    def _find_routes(self, node: str, port: str, layer: int) -> tuple[_Route, ...]:
        edges = self._out.get((node, port))
        if edges is None:
            raise OperatorError(f"{node} gave an output {port!r} that no edge takes")
        routes = tuple(self._route(edge, layer) for edge in edges if layer in edge.layers)
        self._routes[node, port, layer] = routes
        return routes

    def _route(self, edge: Edge, layer: int) -> _Route:
        if edge.target not in self._fused:
            return _Route(edge, fused=False, alone=False, urgent=False)
        there = edge.tag.apply(Tag("", layer=layer)).layer
        return _Route(edge, fused=True, alone=self._table.alone(edge, there), urgent=edge.target in self._urgent)

    def is_fused(self, node: str) -> bool:
        return node in self._fused


def _leading_to(crossing: set[int], edges: Sequence[Edge]) -> frozenset[str]:
    """Sources of `edges` from which a path over `edges` reaches one of the `crossing` edges."""
    found = {edge.source for edge in edges if edge.id in crossing}
    while more := {edge.source for edge in edges if edge.target in found} - found:
        found |= more
    return frozenset(found)


def _failed(firing: Firing, error: BaseException) -> OperatorError:
    tag = firing.tag
    return OperatorError(f"{firing.node} failed at step {tag.step}, layer {tag.layer}: {type(error).__name__}: {error}")


def part_of(payload: Payload) -> int | None:
    """The part id of a payload, or None if it has no header."""
    return None if payload.header is None else payload.header_as(PartHeader).part
