"""Trampolines of the expert exchange: bundles, the functions of the nodes forward, return and collect, and a client's use of them.

A bundle carries all parts of a tag for the servers behind one trampoline, with each row once. The client has split the rows by its own
map, so a trampoline decides nothing. It responds to each part of a bundle exactly once: with the server's response, with the server's
error, or with the notice that it has lost the server (`FailedHeader.lost`). flowrt/graph/trampoline_edges.py describes the nodes and edges.

What waits at a trampoline is bounded: a client sends a trampoline no more parts than its window, counted until their responses arrive.
The credit of a bundle returns with the last response to its parts; no message carries credits alone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from flowrt.dataflow.matching import Firing
from flowrt.dataflow.parts import BundledPart, BundleHeader, FailedHeader, PartHeader, PlanHeader
from flowrt.dataflow.payload import Payload
from flowrt.dataflow.runner import Runner
from flowrt.dataflow.subgraph import RoutedOutput, part_of
from flowrt.errors import OperatorError
from flowrt.graph.model import Graph
from flowrt.graph.trampoline_edges import group_ports
from flowrt.operators.dispatch import Part
from flowrt.transports.wire.message import Tag

Outputs = dict[str, Payload]


def bundle(x_TH: Tensor, parts: Mapping[int, Part]) -> Payload:
    """Parts of one tag, by id, as one message: x_RH, row_S (into x_RH, the rows of each part), row_P (into the part's rows), expert_P,
    weight_P."""
    rows_R, row_S = torch.unique(torch.cat([part.rows_R for part in parts.values()]), return_inverse=True)
    x_RH = x_TH if len(rows_R) == len(x_TH) else x_TH.index_select(0, rows_R)
    row_P, expert_P, weight_P = (torch.cat([getattr(part, name) for part in parts.values()]) for name in ("row_P", "expert_P", "weight_P"))
    header = BundleHeader(tuple(BundledPart(number, part.server, len(part.rows_R), len(part.row_P)) for number, part in parts.items()))
    return Payload((x_RH, row_S, row_P, expert_P, weight_P), header)


def forward(firings: Sequence[Firing]) -> list[Outputs]:
    """The function of a `forward` node. Port in: `bundle`. Out: `server<s>`, the part that dispatch would have sent to server s."""
    return [split_bundle(firing.inputs["bundle"]) for firing in firings]


def split_bundle(payload: Payload) -> Outputs:
    """The parts of a bundle, by output port. Raises ValueError, IndexError or RuntimeError for a bundle that contradicts itself."""
    header = payload.header_as(BundleHeader)
    x_RH, row_S, *pairs = payload.tensors
    rows = torch.split(row_S, [part.num_rows for part in header.parts])
    pairs_of_parts = zip(*(torch.split(each_P, [part.num_pairs for part in header.parts]) for each_P in pairs), strict=True)
    num_siblings = len(header.parts) - 1
    return {
        f"server{part.server}": Payload(
            (x_RH if len(own_rows) == len(x_RH) else x_RH.index_select(0, own_rows), *own_pairs),
            PartHeader(part.part, siblings=num_siblings),
        )
        for part, own_rows, own_pairs in zip(header.parts, rows, pairs_of_parts, strict=True)
    }


class Return:
    """The function of a `return` node. Port in: `results`. Out: `group<g>`, the responses of a tag in one message, to the group that
    emitted it. `ports`: by source."""

    def __init__(self, ports: Mapping[str, str]) -> None:
        self._ports = ports

    def __call__(self, firings: Sequence[Firing]) -> list[Outputs]:
        found: list[Outputs] = [{} for _ in firings]
        by_tag: dict[Tag, list[int]] = {}
        for place, firing in enumerate(firings):
            if isinstance(firing.inputs["results"].header, FailedHeader):
                found[place] = {self._port(firing.tag): firing.inputs["results"]}
            else:
                by_tag.setdefault(firing.tag, []).append(place)
        for tag, places in by_tag.items():
            found[places[0]] = {self._port(tag): merge([firings[place].inputs["results"] for place in places])}
        return found

    def _port(self, tag: Tag) -> str:
        return self._ports[tag.source.partition("@")[0]]


def merge(responses: Sequence[Payload]) -> Payload:
    """Responses of one tag as one message: y_RH, one after another; header: the part ids."""
    y = [response.tensors[0] for response in responses]
    ids = tuple(response.header_as(PartHeader).part for response in responses)
    return Payload((y[0] if len(y) == 1 else torch.cat(y),), PlanHeader(ids))


class Collect:
    """The function of a `collect` node. Port in: `bundle`, merged responses. Out: `part<i>`, the responses one by one.

    `parts_of(tag, ids)`: the parts of a tag; None when it is complete or rolled back.
    """

    def __init__(self, parts_of: Callable[[Tag, Sequence[int]], list[Part] | None], strict: bool = False) -> None:
        self._parts_of, self._strict = parts_of, strict

    def __call__(self, firings: Sequence[Firing]) -> list[Outputs]:
        return [self._collect(firing) for firing in firings]

    def _collect(self, firing: Firing) -> Outputs:
        payload = firing.inputs["bundle"]
        ids = payload.header_as(PlanHeader).parts
        parts = self._parts_of(firing.tag, ids)
        if parts is None:
            return {}
        sizes = [len(part.pair_P if self._strict else part.rows_R) for part in parts]
        y = torch.split(payload.tensors[0], sizes)
        return {f"part{place}": Payload((own,), PartHeader(number)) for place, (number, own) in enumerate(zip(ids, y, strict=True))}


class Trampolines:
    """The trampolines of one client. Pure. By trampoline: `servers` behind it, `processes`, and `windows` (graph/trampoline_edges.py).

    The loop and the compute thread use it; each use is one step on a set.
    """

    def __init__(self, servers: Mapping[int, Collection[int]], processes: Mapping[int, str], windows: Mapping[int, int]) -> None:
        self.processes = processes
        self._of = {server: trampoline for trampoline, behind in servers.items() for server in behind}
        self._windows = windows
        self.num_outstanding: Callable[[int], int] = lambda trampoline: 0  # parts without a response through it

    def __bool__(self) -> bool:
        return bool(self._of)

    def of(self, server: int) -> int | None:
        return self._of.get(server)

    def route(self, parts: Mapping[int, Part], may_forward: Callable[[str], bool]) -> dict[int, dict[int, Part]]:
        """Those of a tag's parts that travel through a trampoline: trampoline -> id -> part. All others go directly."""
        found: dict[int, dict[int, Part]] = {}
        for number, part in parts.items():
            trampoline = self._of.get(part.server)
            if trampoline is not None and may_forward(self.processes[trampoline]):
                found.setdefault(trampoline, {})[number] = part
        return {
            trampoline: behind
            for trampoline, behind in found.items()
            if self.num_outstanding(trampoline) + len(behind) <= self._windows[trampoline]
        }


class Forwarder:
    """Notices of the trampoline in this process to the groups: servers that it has lost, and bundles that it cannot split."""

    def __init__(self, graph: Graph, process: str, runner: Runner) -> None:
        self._returning = next(node.name for node in graph.nodes_of(process) if node.kind.relays == "responses")
        self._process_of = {node.name: node.process for node in graph.nodes.values()}
        self._forwarding = {node.name for node in graph.nodes_of(process) if node.kind.relays == "requests"}
        self._ports = group_ports(graph, self._returning)
        self._runner = runner
        self._lost: dict[str, str] = {}  # process -> its latest incarnation that was lost

    def mark_lost(self, process: str, incarnation: str, unanswered: Iterable[tuple[Tag, int]]) -> None:
        """Record a lost server, and notify the groups whose requests it has not responded to."""
        self._lost[process] = incarnation
        for tag, part in unanswered:
            self._notify(tag, process, part)

    def on_unsent(self, output: RoutedOutput) -> None:
        """A part for a server that is lost."""
        if output.edge.source in self._forwarding and (part := part_of(output.payload)) is not None:
            self._notify(output.tag, self._process_of[output.edge.target], part)

    def fail(self, tag: Tag, error: OperatorError) -> None:
        """Report a bundle that cannot be split."""
        self._send(tag, FailedHeader(str(error)))

    def _notify(self, tag: Tag, process: str, part: int) -> None:
        self._send(tag, FailedHeader(f"{process} is lost", part, self._lost.get(process, "")))

    def _send(self, tag: Tag, header: FailedHeader) -> None:
        self._runner.emit(self._returning, tag, {self._ports[tag.source.partition("@")[0]]: Payload((), header)})
