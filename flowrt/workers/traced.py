"""A traced worker: records its calls, the nodes within them, and its messages.

It wraps what the data path gives its runner and its links, so that a worker that is not traced runs none of this.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TypeVar

import msgspec

from flowrt.dataflow.matching import Firing
from flowrt.dataflow.parts import PartHeader
from flowrt.dataflow.payload import Payload
from flowrt.dataflow.subgraph import NodeFunction
from flowrt.graph.model import Edge, Graph
from flowrt.seams import Compute, Running
from flowrt.trace.records import RecordKind, TraceRing
from flowrt.transports.wire.message import Message
from flowrt.workers.emulated import EmulatedWorker, num_rows_of

T = TypeVar("T")


class TracedWorker:
    """The tracing of one incarnation of a worker of `graph`.

    On emulated hardware a node lasts from what its call had charged before it until what it has charged after it.
    """

    def __init__(self, graph: Graph, ring: TraceRing, emulated: EmulatedWorker | None) -> None:
        self.ring = ring
        self._emulated = emulated
        self._edge_names: dict[int, str] = {}
        self._with_parts: set[int] = set()
        self._call_seconds = 0.0  # start of the call in progress
        self.use(graph)

    def use(self, graph: Graph) -> None:
        """Record messages on the edges of this graph, too."""
        self._edge_names |= {edge.id: edge.name for edge in graph.edges.values()}
        requests = {edge.request_id for edge in graph.edges.values()}
        self._with_parts |= {edge.id for edge in graph.edges.values() if edge.id in requests or edge.request_id is not None}

    def compute(self, compute: Compute) -> TracedCompute:
        """Record each call of this seam."""
        return TracedCompute(compute, self.ring, self._begin_call)

    def functions(self, functions: Mapping[str, NodeFunction]) -> dict[str, NodeFunction]:
        """Record each call of a node."""
        return {name: self._traced(name, function) for name, function in functions.items()}

    def post(self, post: Callable[[Edge, Message], None]) -> Callable[[Edge, Message], None]:
        """Record each message that is sent, but no returned credits."""
        now = self.ring.now

        def record_post(edge: Edge, message: Message) -> None:
            start = now()
            post(edge, message)
            self._add_message(RecordKind.SEND, start, message)

        return record_post

    def accept(self, accept: Callable[[str, Message], None]) -> Callable[[str, Message], None]:
        """Record each message that is received and not refused, but no returned credits."""
        now = self.ring.now

        def record_accept(peer: str, message: Message) -> None:
            start = now()
            accept(peer, message)
            self._add_message(RecordKind.RECEIVE, start, message)

        return record_accept

    def _begin_call(self) -> float:
        self._call_seconds = self.ring.now()
        return self._call_seconds

    def _node_seconds(self) -> float:
        return self.ring.now() if self._emulated is None else self._call_seconds + self._emulated.compute.charged_seconds

    def _traced(self, node: str, function: NodeFunction) -> NodeFunction:
        now, add = self._node_seconds, self.ring.add

        def run(firings: Sequence[Firing]) -> Sequence[Mapping[str, Payload]]:
            start = now()
            try:
                return function(firings)
            finally:
                num_rows = sum(max(map(num_rows_of, firing.inputs.values()), default=0) for firing in firings)
                add((RecordKind.NODE, start, now(), node, tuple([firing.tag for firing in firings]), None, num_rows, 0))

        return run

    def _add_message(self, kind: RecordKind, start: float, message: Message) -> None:
        if message.tag is None:
            return
        part = None
        if message.edge in self._with_parts:
            with suppress(msgspec.DecodeError):  # of a user's graph, or a failure
                part = message.decode_header(PartHeader).part
        tensors = message.tensors
        num_rows = tensors[0].spec.shape[0] if tensors and tensors[0].spec.shape else 0
        end, name = self.ring.now(), self._edge_names[message.edge]
        self.ring.add((kind, start, end, name, (message.tag,), part, num_rows, message.payload_bytes))


class TracedCompute:
    """Runs calls in `inner` and records them. `begin` returns the start of a call."""

    def __init__(self, inner: Compute, ring: TraceRing, begin: Callable[[], float]) -> None:
        self._inner, self._ring, self._begin = inner, ring, begin
        self.beside_loop = getattr(inner, "beside_loop", False)
        self.at_modelled_time = getattr(inner, "at_modelled_time", None)
        self.is_short, self.aclose = inner.is_short, inner.aclose

    @property
    def running(self) -> Running | None:
        return self._inner.running

    @property
    def slowness(self) -> float:
        return self._inner.slowness

    def run_inline(self, label: str, call: Callable[[], T]) -> T:
        start = self._begin()
        try:
            return self._inner.run_inline(label, call)
        finally:
            self._add(label, start)

    async def run(self, label: str, call: Callable[[], T], bound_seconds: float | None = None) -> T:
        start: float | None = self._begin()
        try:
            return await self._inner.run(label, call, bound_seconds)
        except asyncio.CancelledError:  # the worker ends
            start = None
            raise
        finally:
            if start is not None:
                self._add(label, start)

    def _add(self, label: str, start: float) -> None:
        self._ring.add((RecordKind.CALL, start, self._ring.now(), label, (), None, 0, 0))
