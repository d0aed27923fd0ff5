"""A server whose clients end and come back in any order: each request of a living incarnation gets one response, and all credits return."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest
import torch
from dataflow.inline_compute import InlineCompute
from dataflow.owners import OwnerOf
from hypothesis import given, settings
from hypothesis import strategies as st

from flowrt.dataflow.matching import Firing
from flowrt.dataflow.parts import FailedHeader, PartHeader
from flowrt.dataflow.payload import Payload, to_message
from flowrt.dataflow.runner import Runner
from flowrt.errors import OperatorError
from flowrt.graph.model import Edge, Graph, ModelPart, Node, PortSpec
from flowrt.graph.settings import Batching
from flowrt.seams import RealClock
from flowrt.transports.wire.message import Message, Tag

CREDITS = 3
CLIENTS = ("0", "1")


def service(batching: Batching | None) -> Graph:
    nodes = [Node("serve", "m:f", "server", {"rows": PortSpec("rows")}, {"results": PortSpec("results")}, batches=batching)]
    edges = []
    for client in CLIENTS:
        nodes.append(Node(f"cut{client}", "m:f", f"client{client}", {}, {"rows": PortSpec("rows")}))
        nodes.append(Node(f"add{client}", "m:f", f"client{client}", {"part": PortSpec("part")}, {}))
        edges.append(Edge(f"cut{client}", "rows", "serve", "rows", credits=CREDITS))
        edges.append(Edge("serve", "results", f"add{client}", "part", response_to=edges[-1].name))
    return Graph.of(nodes, edges, model=ModelPart("", "float32"))


class HeldCompute(InlineCompute):
    """Calls are short or long in turn, as drawn; a long one ends when the gate is open."""

    def __init__(self, shorts: list[bool]) -> None:
        self._shorts, self._num_calls, self.gate = shorts, 0, asyncio.Event()

    def is_short(self, label: str) -> bool:
        return self._shorts[self._num_calls % len(self._shorts)]

    def run_inline(self, label: str, call: Any) -> Any:
        self._num_calls += 1
        return call()

    async def run(self, label: str, call: Any, bound_seconds: float | None = 60.0) -> Any:
        if not self.is_short(label):
            await self.gate.wait()
        return self.run_inline(label, call)


class Server:
    """The runner of a server, and its clients."""

    def __init__(self, batching: Batching | None, shorts: list[bool], compiled: bool) -> None:
        self.graph, self.compute = service(batching), HeldCompute(shorts)
        self.wanted: dict[tuple[str, Tag], bool] = {}  # requests of living incarnations without a response -> whether they fail
        self.free = dict.fromkeys(CLIENTS, CREDITS)
        self.step = 0
        owner = OwnerOf(self.on_post)
        self.runner = Runner(self.graph, "server", {"serve": self.serve}, self.compute, RealClock(), owner, compiled=compiled)

    def serve(self, firings: list[Firing]) -> list[dict[str, Payload]]:
        if any(firing.inputs["rows"].tensors[0].item() < 0 for firing in firings):
            raise OperatorError("no")
        return [{"results": Payload(each.inputs["rows"].tensors, each.inputs["rows"].header_as(PartHeader))} for each in firings]

    def on_post(self, edge: Edge, message: Message) -> None:
        if message.kind == "credit":
            self.free[edge.source[-1]] += message.header.count
            return
        assert message.tag is not None
        client = edge.target[-1]
        fails = self.wanted.pop((client, message.tag))  # KeyError: a second response, or one to an incarnation that has ended
        assert isinstance(message.header, FailedHeader if fails else PartHeader)
        self.free[client] += 1

    def request(self, client: str, layer: int, fails: bool) -> None:
        if not self.free[client]:
            return
        self.free[client] -= 1
        self.step += 1
        tag = Tag("group@1", 0, 0, self.step, layer)  # of a group whose requests come by another process
        self.wanted[client, tag] = fails
        rows = Payload((torch.tensor([-1.0 if fails else 1.0]),), PartHeader(0))
        self.runner.accept(f"client{client}", to_message(rows, self.graph.edges[f"cut{client}.rows -> serve.rows"].id, tag))

    def come_back(self, client: str) -> None:
        self.runner.end_peer(f"client{client}")
        self.runner.join_peer(f"client{client}")
        self.wanted = {key: fails for key, fails in self.wanted.items() if key[0] != client}
        self.free[client] = CREDITS


REQUESTS = st.lists(st.booleans(), min_size=1, max_size=CREDITS)  # whether each fails
OPERATIONS = st.one_of(
    st.tuples(st.just("requests"), st.sampled_from(CLIENTS), st.integers(0, 1), REQUESTS, st.sampled_from(("settle", "turns", "wait"))),
    st.tuples(st.just("comes back"), st.sampled_from(CLIENTS)),
    st.tuples(st.sampled_from(("settle", "turns", "open"))),
)


@pytest.mark.parametrize("compiled", [False, True])
@settings(max_examples=300)
@given(
    batches=st.booleans(), shorts=st.lists(st.booleans(), min_size=1, max_size=5), operations=st.lists(OPERATIONS, min_size=3, max_size=25)
)
async def test_every_request_of_a_living_incarnation_gets_one_response(
    compiled: bool, batches: bool, shorts: list[bool], operations: list[tuple[Any, ...]]
) -> None:
    server = Server(Batching() if batches else None, shorts, compiled)
    running = asyncio.get_running_loop().create_task(server.runner.run())
    for operation in operations:
        match operation:
            case ("requests", client, layer, requests, _):
                for fails in requests:
                    server.request(client, layer, fails)
            case ("comes back", client):
                server.come_back(client)
        match operation[-1]:
            case "settle":
                server.runner.settle()
            case "turns":
                await turns()
            case "open":
                server.compute.gate.set()
                await turns()
                server.compute.gate = asyncio.Event()
        for _, (received, consumed) in server.runner.snapshot().consumed.items():
            assert received >= 0 <= consumed
    server.compute.gate.set()
    server.runner.settle()
    await turns()
    assert not running.done() or running.result()
    assert server.wanted == {}
    assert server.runner.leftovers() == []
    consumed_by = server.runner.snapshot().consumed
    for client in CLIENTS:  # of all credits some may be held back until the half of them has gathered
        assert server.free[client] + consumed_by[f"cut{client}.rows -> serve.rows"][0] == CREDITS
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running


async def turns() -> None:
    for _ in range(40):
        await asyncio.sleep(0)
