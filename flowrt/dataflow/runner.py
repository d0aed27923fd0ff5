"""The runner of one process: takes messages and minted tags, matches them, fires nodes, sends what comes out.

Here: Runner, credit windows. Not here: what a firing computes (region.py), when inputs are complete (matching.py), channels
(flowrt/actors/links.py), minting tags (the source: flowrt/workers/group.py, or `input` of a user's graph). One Runner per
worker; model graphs and users' graphs run through it alike.

Credits. An edge that leaves the process has `credits` messages that may be on the way or unconsumed. The credit of a request
comes back with its answer, so whoever answers never waits for whoever asked; other credits are returned when the firing that
consumed the message has ended. A firing starts only when every edge that it can reach has a credit left.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Collection, Mapping
from functools import partial

import msgspec
import torch

from flowrt.dataflow.matching import Firing, MatchingTable
from flowrt.dataflow.parts import PlanHeader
from flowrt.dataflow.payload import Payload, from_message, to_message
from flowrt.dataflow.region import NodeFunction, Output, Region, part_of
from flowrt.graph.fuse import fuse
from flowrt.graph.model import Edge, Graph
from flowrt.seams import Clock, Compute
from transports.message import Message, Tag


class CreditHeader(msgspec.Struct, frozen=True, array_like=True):
    """Header of a "credit" message: how many credits of its edge come back."""

    count: int


class RunnerStatistics(msgspec.Struct):
    """Counters since the start. `sent` is (messages, payload bytes) per edge that leaves the process."""

    num_firings: int = 0
    num_dropped: int = 0
    compute_seconds: float = 0.0
    sent: dict[int, list[int]] = {}


class _Window:
    """Credits of one outgoing edge, and the outputs that wait for one."""

    __slots__ = ("free", "pending", "size")

    def __init__(self, size: int) -> None:
        self.size = size
        self.free = size
        self.pending: deque[Output] = deque()


class Runner:
    """Runs the nodes of `process`. `functions` gives each node its function; a node without one is a sink: its firings go to
    `on_sink`. `post(edge, message)` hands a message to the link of that edge and never waits.
    """

    def __init__(
        self,
        graph: Graph,
        process: str,
        functions: Mapping[str, NodeFunction],
        compute: Compute,
        clock: Clock,
        post: Callable[[Edge, Message], None],
        on_sink: Callable[[Firing], None],
        device: torch.device | None = None,
    ) -> None:
        nodes = graph.nodes_of(process)
        self._sinks = {node.name for node in nodes if node.name not in functions}
        fused = frozenset(fuse(graph, process).fused) - self._sinks
        self._edges = list(graph.edges)
        self._device = device
        self._compute = compute
        self._clock = clock
        self._post = post
        self._on_sink = on_sink
        self._table = MatchingTable(nodes, graph.edges, _plan_of)
        self._region = Region(graph, process, fused, functions, self._table)
        local = {node.name for node in nodes}
        self._local = local
        leaving = [edge for edge in graph.edges if edge.source in local and edge.target not in local]
        self._windows = {edge.id: _Window(edge.credits) for edge in leaving if edge.answers is None}
        self._incoming = {edge.id for edge in graph.edges if edge.target in local and edge.source not in local}
        self._reach = {node.name: self._reachable(node.name, fused) for node in nodes}
        self._epochs: dict[str, int] = {}
        self._ready: dict[str, deque[Firing]] = {}
        self._wakeup = asyncio.Event()
        self.statistics = RunnerStatistics(sent={edge.id: [0, 0] for edge in leaving})

    # --- what comes in -------------------------------------------------------------------------------------------------

    def mint(self, node: str, tag: Tag, outputs: Mapping[str, Payload]) -> None:
        """A source gives out the messages of a new tag. Never waits; the source bounds the tags in flight."""
        for output in self._region.route(Firing(node, tag, {}), outputs):
            self._emit(output)
        self._wakeup.set()

    def deliver(self, message: Message) -> None:
        """A message from another process: data, or credits coming back. Raises ValueError for an edge that is not ours."""
        edge_id = message.edge
        if message.kind == "credit":
            self._release(edge_id, message.decode_header(CreditHeader).count)
            return
        if edge_id not in self._incoming or message.tag is None:
            raise ValueError(f"a {message.kind!r} message for edge {edge_id}, which does not lead here")
        edge, tag = self._edges[edge_id], message.tag
        if edge.answers is not None:
            self._release(edge.answers, 1)
        if tag.epoch < self._epochs.get(tag.source, 0):
            self._drop(edge)
            return
        payload = from_message(message, self._device)
        self._arrive(edge, tag, payload)
        self._wakeup.set()

    def roll_back(self, source: str, epoch: int) -> int:
        """From now on only `epoch` and later of `source` count; rows and waiting firings of older ones are deleted."""
        self._epochs[source] = epoch

        def stale(tag: Tag) -> bool:
            return tag.source == source and tag.epoch < epoch

        dropped = self._table.drop(stale)
        for node, firings in self._ready.items():
            kept = deque(firing for firing in firings if not stale(firing.tag))
            for firing in firings:
                if stale(firing.tag):
                    self._consumed(firing, answered=())
            dropped += len(firings) - len(kept)
            self._ready[node] = kept
        return dropped

    # --- the one task ---------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Fire until cancelled. Raises OperatorError when an operator fails."""
        while True:
            batch = self._take()
            if batch is None:
                self._wakeup.clear()
                await self._wakeup.wait()
                continue
            node = batch[0].node
            start = self._clock.now()
            outputs = await self._compute.run(node, partial(self._region.run, batch))
            self.statistics.compute_seconds += self._clock.now() - start
            self.statistics.num_firings += len(batch)
            answered = {(output.edge.answers, output.tag) for output in outputs if output.edge.answers is not None}
            for output in outputs:
                self._emit(output)
            for firing in batch:
                self._consumed(firing, answered)

    def waiting(self) -> list[str]:
        """What every unfinished tag waits for, a line each: the answer to "why is it stuck?"."""
        lines = [
            f"{node} at step {tag.step}, layer {tag.layer} of {tag.source} waits for {', '.join(empty)}"
            for node, tag, empty in self._table.waiting()
        ]
        lines += [f"{self._edges[edge]} waits for credits" for edge, window in self._windows.items() if window.pending]
        return lines

    # --- inside -----------------------------------------------------------------------------------------------------------

    def _take(self) -> list[Firing] | None:
        """The next node to fire, oldest first, with all its tags that may go in one call."""
        for node, firings in self._ready.items():
            room = min((self._windows[edge].free for edge in self._reach[node]), default=len(firings))
            room = min(room, len(firings)) if self._region.batches(node) else min(room, 1, len(firings))
            if room < 1:
                continue
            batch = [firings.popleft() for _ in range(room)]
            del self._ready[node]
            if firings:
                self._ready[node] = firings  # at the end: the others' turn comes first
            return batch
        return None

    def _arrive(self, edge: Edge, tag: Tag, payload: Payload) -> None:
        part = part_of(payload) if self._table.gathers(edge) else None
        arrival = self._table.arrive(edge, tag, payload, part)
        if arrival.dropped:
            self._drop(edge)
        elif arrival.firing is not None:
            self._fire(arrival.firing)
            for firing in self._table.released():
                self._fire(firing)

    def _fire(self, firing: Firing) -> None:
        if firing.node in self._sinks:
            self._consumed(firing, answered=())
            self._on_sink(firing)
        else:
            self._ready.setdefault(firing.node, deque()).append(firing)

    def _emit(self, output: Output) -> None:
        edge = output.edge
        if edge.target in self._local:
            if self._region.is_fused(edge.target):
                self._region.arrive(output)
            else:
                self._arrive(edge, output.tag, output.payload)
            return
        window = self._windows.get(edge.id)
        if window is not None:
            if window.free == 0 or window.pending:
                window.pending.append(output)
                return
            window.free -= 1
        self._send(output)

    def _send(self, output: Output) -> None:
        message = to_message(output.payload, output.edge.id, output.tag)
        counters = self.statistics.sent[output.edge.id]
        counters[0] += 1
        counters[1] += message.payload_bytes
        self._post(output.edge, message)

    def _release(self, edge_id: int, count: int) -> None:
        window = self._windows.get(edge_id)
        if window is None or count < 1 or window.free + count > window.size:
            raise ValueError(f"{count} credits came back on edge {edge_id}, more than were out")
        window.free += count
        while window.pending and window.free:
            window.free -= 1
            self._send(window.pending.popleft())
        self._wakeup.set()

    def _consumed(self, firing: Firing, answered: Collection[tuple[int, Tag]]) -> None:
        """Return the credits of the messages this firing used up, but for requests that were answered."""
        for edge_id in firing.via:
            if edge_id in self._incoming and (edge_id, firing.tag) not in answered:
                self._return_credit(self._edges[edge_id])

    def _drop(self, edge: Edge) -> None:
        self.statistics.num_dropped += 1
        self._return_credit(edge)

    def _return_credit(self, edge: Edge) -> None:
        if edge.answers is None:
            self._post(edge, Message("credit", edge=edge.id, header=CreditHeader(1)))

    def _reachable(self, entry: str, fused: frozenset[str]) -> list[int]:
        """Edges with credits that a firing of `entry` may send on."""
        seen, queue, found = {entry}, [entry], []
        while queue:
            node = queue.pop()
            for edge in self._edges:
                if edge.source != node:
                    continue
                if edge.id in self._windows:
                    found.append(edge.id)
                elif edge.target in fused and edge.target not in seen:
                    seen.add(edge.target)
                    queue.append(edge.target)
        return found


def _plan_of(value: Payload) -> tuple[int, ...] | int:
    if value.header is not None:
        return value.header_as(PlanHeader).parts
    if len(value.tensors) != 1 or value.tensors[0].numel() != 1:
        raise ValueError("a count port takes one integer tensor of one element")
    return int(value.tensors[0].item())
