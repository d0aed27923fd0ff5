"""Executes one firing and the nodes fused behind it: the pure computing part of the runner.

A `FusedSubgraph` runs an entry node and continues into every fused node whose inputs are then complete. flowrt/graph/fuse.py decides
which nodes are fused.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress

import msgspec
import torch

from flowrt.dataflow.matching import Firing, MatchingTable
from flowrt.dataflow.parts import PartHeader, PlanHeader
from flowrt.dataflow.payload import Payload
from flowrt.errors import OperatorError, as_line, error_text, place_of
from flowrt.graph.model import Edge, Graph
from flowrt.transports.wire.message import Tag

log = logging.getLogger("flowrt.worker")

# torch.inference_mode() does the same behind three Python calls, which cost more than routing a message.
InferenceMode: Callable[[bool], AbstractContextManager[object]] = getattr(torch._C, "_InferenceMode", torch.inference_mode)

MAX_NAMED_EDGES = 3  # in an error

NodeFunction = Callable[[Sequence[Firing]], Sequence[Mapping[str, Payload]]]
"""Runs a node for one or more tags. Firing.inputs hold a Payload per port (a list of them on a gather port); the result holds,
per firing, at most one Payload per output port. A port left out sends nothing."""


class RoutedOutput(msgspec.Struct, frozen=True, gc=False):
    """A payload that leaves a firing along `edge`. `tag` already has the edge's step applied. `via`: the edges of the firing's requests,
    if the target responds to them."""

    edge: Edge
    tag: Tag
    payload: Payload
    via: tuple[int, ...] = ()


class FailedFiringsError(Exception):
    """Calls of a user's graph that failed in one firing. `errors`: a tag of each call, and its error. `outputs`: those of other calls.
    `is_interrupted`: an error was a KeyboardInterrupt."""

    def __init__(self, errors: Iterable[tuple[Tag, OperatorError]], outputs: list[RoutedOutput], is_interrupted: bool) -> None:
        self.errors, self.outputs, self.is_interrupted = tuple(errors), outputs, is_interrupted


SendEarly = Callable[[list[RoutedOutput]], object]


class _Route:
    """One edge that takes an output at one layer, with the properties needed per message."""

    __slots__ = ("alone", "changes_tag", "edge", "fused", "port", "request_id", "responds", "target", "urgent", "via")

    def __init__(self, edge: Edge, fused: bool, alone: bool, urgent: bool, responds: bool) -> None:
        self.edge, self.request_id, self.changes_tag = edge, edge.request_id, edge.tag.kind != "same"
        self.target, self.port, self.via = edge.target, edge.target_port, (edge.id,)
        self.fused = fused
        self.alone = alone  # fused targets: this message is the target's only input
        self.urgent = urgent  # fused targets: outputs of the target may go to another worker
        self.responds = responds  # the target responds to the requests of the source


class FusedSubgraph:
    """The nodes of one process. Runs from an entry node until all remaining outputs go to another entry or another process."""

    def __init__(
        self, graph: Graph, process: str, fused: frozenset[str], functions: Mapping[str, NodeFunction], table: MatchingTable
    ) -> None:
        self._functions = functions
        self._isolates = graph.model is None
        self._process, self._table, self._fused = process, table, fused
        self.use(graph)

    def use(self, graph: Graph) -> None:
        """Route by this graph from now on. The compute thread may be in `run`: each of its routes is of the old graph or of this one."""
        fused = self._fused
        self._responders = graph.responders
        self._edge_names = {edge.id: edge.name for edge in graph.edges.values()}
        self._edges = [edge for edge in graph.edges.values() if graph.nodes[edge.source].process == self._process]
        out: dict[tuple[str, str], list[Edge]] = {}
        for edge in self._edges:
            out.setdefault((edge.source, edge.source_port), []).append(edge)
        self._out = out
        # Responses go with the rest: with them goes the credit of the request, which is consumed only when the firing ends.
        self._crossing = {edge.id for edge in self._edges if graph.crosses(edge) and edge.request_id is None}
        progress = {edge.id for edge in self._edges if graph.nodes[edge.target].kind.is_early}
        self._early = self._crossing | progress  # edges whose outputs do not wait for the end of the firing
        self._urgent = _leading_to(self._crossing, [edge for edge in self._edges if edge.source in fused])
        self._routes: dict[tuple[str, str, int], tuple[_Route, ...]] = {}

    def run(self, firings: Sequence[Firing], send_early: SendEarly | None = None, first: NodeFunction | None = None) -> list[RoutedOutput]:
        """Run `firings` (all of one node; several only if it has `batches`) and the nodes fused behind them.

        Nodes with outputs to other workers run first. Calls `send_early(outputs)` with the outputs collected so far when they include
        outputs to other workers, or the progress of prompts, and the firing continues.

        Raises OperatorError at the first error in a model graph. In a user's graph an error ends only its call; FailedFiringsError then
        follows at the end. `first` is called in place of the function of the node.
        """
        functions, routes = self._functions, self._routes
        outgoing: list[RoutedOutput] = []
        urgent: deque[Sequence[Firing]] = deque()
        waiting: deque[Sequence[Firing]] = deque()
        errors: dict[tuple[str, int], tuple[Tag, OperatorError]] = {}  # by source and step
        is_interrupted = False
        if self._isolates and len(firings) > 1:
            waiting.extend((firing,) for firing in firings[1:])
            firings = firings[:1]
        with InferenceMode(True):
            while True:
                node, results = firings[0].node, None
                try:
                    results = (first or functions[node])(firings)
                    first = None
                    if len(results) != len(firings):
                        raise OperatorError(f"{node} got {len(firings)} tags and returned {len(results)} results", node)
                    for firing, outputs in zip(firings, results, strict=True):
                        tag = firing.tag
                        for port, payload in outputs.items():
                            found = routes.get((node, port, tag.layer))
                            if found is None:
                                found = self._find_routes(node, port, tag.layer)
                            for route in found:
                                if route.request_id is not None and route.request_id not in firing.via:
                                    continue
                                edge = route.edge
                                stepped = edge.tag.apply(tag) if route.changes_tag else tag
                                if not route.fused:
                                    outgoing.append(RoutedOutput(edge, stepped, payload, firing.via if route.responds else ()))
                                    continue
                                ready: tuple[Firing, ...]
                                if route.alone:
                                    ready = (Firing(route.target, stepped, {route.port: payload}, route.via),)
                                else:
                                    ready = self._table.arrive(edge, stepped, payload).firings
                                for then in ready:
                                    (urgent if route.urgent else waiting).append((then,))
                except BaseException as error:  # CancelledError or SystemExit too: raised on, it would end the worker's tasks silently
                    if not self._isolates:
                        if results is None and not isinstance(error, OperatorError | KeyboardInterrupt):
                            raise self.failure(firings[0], error) from error
                        raise
                    tag, failure = firings[0].tag, self.failure(firings[0], error)
                    log.info("%s", failure, exc_info=error)  # not kept as the cause: a traceback holds tensors
                    errors[tag.source, tag.step] = tag, failure
                    is_interrupted = is_interrupted or isinstance(error, KeyboardInterrupt)
                    urgent = deque(batch for batch in urgent if _call_of(batch[0].tag) not in errors)
                    waiting = deque(batch for batch in waiting if _call_of(batch[0].tag) not in errors)
                if urgent:
                    firings = urgent.popleft()
                elif waiting:
                    firings = waiting.popleft()
                elif errors:
                    kept = [output for output in outgoing if _call_of(output.tag) not in errors]
                    raise FailedFiringsError(errors.values(), kept, is_interrupted)
                else:
                    return outgoing
                if send_early is not None and any(output.edge.id in self._early for output in outgoing):
                    # Includes all earlier outputs: a response may arrive before this firing ends, and its plan must be known by then.
                    early = [output for output in outgoing if output.edge.request_id is None]
                    outgoing = [output for output in outgoing if output.edge.request_id is not None]
                    send_early(early)

    def resume(
        self, firing: Firing, results: Sequence[Mapping[str, Payload]] | None, error: BaseException | None, send_early: SendEarly | None
    ) -> list[RoutedOutput]:
        """As `run`, of a firing whose function has returned these results or has raised already."""

        def first(firings: Sequence[Firing]) -> Sequence[Mapping[str, Payload]]:
            nonlocal error
            raised, error = error, None  # its traceback will lead here: no cycle may keep the tensors that it holds
            if raised is None:
                return results  # type: ignore[return-value]  # `run` checks what users return
            try:
                raise raised
            finally:
                del raised

        return self.run((firing,), send_early, first)

    def plain_routes(self, node: str, layer: int) -> dict[str, list[tuple[Edge, Callable[[Tag], Tag] | None]]] | None:
        """By output port, the edges that an output takes at this layer, and how its tag changes. None: it depends on the firing, or another
        node fires with it."""
        found: dict[str, list[tuple[Edge, Callable[[Tag], Tag] | None]]] = {}
        for source, port in self._out:
            if source == node:
                routes = self._find_routes(node, port, layer)
                if any(route.fused or route.responds or route.request_id is not None for route in routes):
                    return None
                found[port] = [(route.edge, route.edge.tag.apply if route.changes_tag else None) for route in routes]
        return found

    def failure(self, firing: Firing, error: BaseException) -> OperatorError:
        """The error of a firing in one line: the node, the tag, the cause; in a user's graph the edges that fed it, and the place, too."""
        node, tag = firing.node, firing.tag
        edges = ", ".join(self._edge_names[edge] for edge in firing.via[:MAX_NAMED_EDGES]) if self._isolates else ""
        if len(firing.via) > MAX_NAMED_EDGES and edges:
            edges += f" and {len(firing.via) - MAX_NAMED_EDGES} more"
        fed = f", fed by {edges}" if edges else ""
        cause = str(error) if isinstance(error, OperatorError) else error_text(error)
        if self._isolates and (place := place_of(error)):
            cause = f"{place}: {cause}"
        return OperatorError(as_line(f"{node} failed at step {tag.step}, layer {tag.layer}{fed}: {cause}"), node)

    def route(self, firing: Firing, outputs: Mapping[str, Payload]) -> list[RoutedOutput]:
        """Select the edges of each output of a firing. Raises OperatorError for an output port that no edge takes."""
        node, tag = firing.node, firing.tag
        return [
            RoutedOutput(route.edge, route.edge.tag.apply(tag) if route.changes_tag else tag, payload)
            for port, payload in outputs.items()
            for route in self._routes.get((node, port, tag.layer)) or self._find_routes(node, port, tag.layer)
            if route.request_id is None or route.request_id in firing.via
        ]

    def reachable(self, entry: str) -> list[int]:
        """Edges with credits that a firing of `entry` may send on, and needs a credit of."""
        nodes = [entry]
        for node in nodes:
            nodes += {edge.target for edge in self._edges if edge.source == node and edge.target in self._fused} - set(nodes)
        return [edge.id for edge in self._edges if edge.source in nodes and edge.id in self._crossing]

    def _find_routes(self, node: str, port: str, layer: int) -> tuple[_Route, ...]:
        known = self._routes  # before the edges: `use` replaces it last
        edges = self._out.get((node, port))
        if edges is None:
            raise OperatorError(f"{node} gave an output {port!r} that no edge takes")
        routes = tuple(self._route(edge, layer) for edge in edges if layer in edge.layers)
        known[node, port, layer] = routes
        return routes

    def _route(self, edge: Edge, layer: int) -> _Route:
        responds = self._responders.get(edge.target) == edge.source
        if edge.target not in self._fused:
            return _Route(edge, fused=False, alone=False, urgent=False, responds=responds)
        target_layer = edge.tag.apply(Tag("", layer=layer)).layer
        return _Route(edge, True, self._table.alone(edge, target_layer), edge.target in self._urgent, responds)


def _leading_to(crossing: set[int], edges: Sequence[Edge]) -> frozenset[str]:
    """Sources of `edges` from which a path over `edges` reaches one of the `crossing` edges."""
    found = {edge.source for edge in edges if edge.id in crossing}
    while more := {edge.source for edge in edges if edge.target in found} - found:
        found |= more
    return frozenset(found)


def _call_of(tag: Tag) -> tuple[str, int]:
    return tag.source, tag.step


def part_of(payload: Payload) -> int | None:
    """The part id of a payload, or None if it has no header."""
    return None if payload.header is None else payload.header_as(PartHeader).part


def part_of_request(firing: Firing) -> int | None:
    """The part id that a firing computes, if its messages carry one."""
    for payload in firing.inputs.values():
        with suppress(AttributeError, msgspec.DecodeError):  # a gather's list, or another header
            return payload.header.responds_to if isinstance(payload.header, PlanHeader) else part_of(payload)
    return None


def plan_of(value: Payload) -> tuple[int, ...] | int:
    """The plan in a message for a count port: the ids of the expected parts, or their number. Raises ValueError."""
    if value.header is not None:
        return value.header_as(PlanHeader).parts
    if len(value.tensors) != 1 or value.tensors[0].numel() != 1:
        raise ValueError("a count port takes one integer tensor of one element")
    return int(value.tensors[0].item())
