"""A whole graph in virtual time: the real workers, each a node of its own, and a gateway that submits requests and reads tokens.

Here: `serve`, which starts the workers, introduces them to each other over simulated control lines, places the requests, waits for
every end and stops all. Not here: faults (to come), checks of what came out (the caller's). The launcher's own part of the protocol is
short and tied to processes, so it is said again here; what is decided about requests is the real gateway's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import cast

from flowrt.actors.control import (
    Connected,
    Control,
    Ended,
    Failed,
    LinkLost,
    Listening,
    Peers,
    Progress,
    Start,
    Statistics,
    Stop,
    Submit,
    Tokens,
    as_message,
    from_message,
)
from flowrt.cluster.choose import choose_transports
from flowrt.cluster.gateway import ClientEvent, Gateway, Parameters, Placed, SendCancel
from flowrt.graph.builtin import SOURCE
from flowrt.graph.json_form import to_json
from flowrt.graph.model import GATEWAY, Graph
from flowrt.seams import Seams
from flowrt.simulation.errors import SimulationError
from flowrt.simulation.transport import SimulatedChannel
from flowrt.simulation.waitables import current_node
from flowrt.simulation.world import World
from operators.model_config import read_model_config
from transports.contract import Channel, Identity, Limits
from transports.errors import EndOfChannel
from transports.registry import known_schemes

WorkerMain = Callable[[Channel, Seams], Awaitable[None]]
WORKER = "flowrt.workers.process:run_worker"
LINE_LIMITS = Limits(max_header_bytes=1 << 24, capacity_messages=1 << 10)  # one header holds the whole graph
ARRIVAL_SECONDS = 20e-3  # requests arrive within this time of each other


class WorkerFailedError(SimulationError):
    """A worker said Failed, lost a peer, or ended without being told to."""


@dataclass(frozen=True)
class SimulatedRequest:
    """What a client asks, as token ids."""

    prompt_token_ids: tuple[int, ...]
    parameters: Parameters = Parameters()


@dataclass(frozen=True)
class Served:
    """What clients saw: per request its tokens, how it ended and with which error; and each worker's last statistics."""

    token_ids: tuple[tuple[int, ...], ...]
    finish_reasons: tuple[str, ...]
    errors: tuple[str | None, ...]
    statistics: dict[str, Statistics]


@dataclass
class _Worker:
    name: str
    incarnation: str
    line: Channel
    listening: asyncio.Future[Listening]
    connected: asyncio.Future[None]
    statistics: Statistics = field(default_factory=Statistics)


async def serve(world: World, graph: Graph, requests: Sequence[SimulatedRequest], worker: WorkerMain | None = None) -> Served:
    """Run `graph` (expanded, with a model) until every request has ended. For `world.run`.

    Raises what a worker raises, and WorkerFailedError.
    """
    async with AsyncExitStack() as lines:
        cluster = _Cluster(world, graph, worker or _load_worker())
        async with asyncio.TaskGroup() as tasks:
            await cluster.start(tasks, lines)
            await cluster.submit(requests)
            await cluster.all_ended.wait()
            await cluster.stop()
        return cluster.served()


class _Cluster:
    def __init__(self, world: World, graph: Graph, worker: WorkerMain) -> None:
        if graph.model is None:
            raise ValueError("only a graph with a model has requests to serve")
        self.all_ended = asyncio.Event()
        self._world = world
        self._graph = choose_transports(graph, dict.fromkeys(known_schemes()))
        self._worker = worker
        self._workers: dict[str, _Worker] = {}
        self._seams = world.seams(GATEWAY)
        self._stopping = False
        self._submitted = False
        config = read_model_config(Path(graph.model.path))
        self._gateway = Gateway(
            [node.process for node in graph.nodes.values() if node.operator == SOURCE],
            graph.limits,
            config.max_position_embeddings,
            draw_seed=self._seams.new_seed,
            eos_token_ids=config.eos_token_ids,
        )
        self._indices: list[int] = []

    async def start(self, tasks: asyncio.TaskGroup, lines: AsyncExitStack) -> None:
        world, loop, key = self._world, self._world.loop, self._world.new_key()
        for name in self._graph.process_names():
            incarnation = world.new_incarnation()
            ours, theirs = SimulatedChannel.pair(
                world.network, (Identity(GATEWAY), current_node.get()), (Identity(name, incarnation), name), LINE_LIMITS
            )
            lines.push_async_callback(ours.aclose)
            self._workers[name] = each = _Worker(name, incarnation, ours, loop.create_future(), loop.create_future())
            tasks.create_task(self._host(name, theirs), name=f"worker {name}", context=world.context(name))
            tasks.create_task(self._pump(each), name=f"pump {name}")  # one node with the submitting task
        graph = to_json(self._graph)
        for each in self._workers.values():
            await self._tell(each.name, Start(name=each.name, incarnation=each.incarnation, graph=graph, key=key))
        addresses = {name: (await each.listening).addresses for name, each in self._workers.items()}
        incarnations = {name: each.incarnation for name, each in self._workers.items()}
        for name in self._workers:
            await self._tell(name, Peers(addresses=addresses, incarnations=incarnations))
        for each in self._workers.values():
            await each.connected

    async def submit(self, requests: Sequence[SimulatedRequest]) -> None:
        for request in requests:
            await self._seams.clock.sleep(self._seams.random.uniform(0.0, ARRIVAL_SECONDS))
            placed = self._gateway.admit(request.prompt_token_ids, request.parameters)
            if isinstance(placed, Placed):
                self._indices.append(placed.index)
                await self._tell(placed.group, Submit(placed.request))
            else:
                self._indices.append(placed.request)
        self._submitted = True
        self._look_for_the_end()

    async def stop(self) -> None:
        self._stopping = True
        for name in self._workers:
            await self._tell(name, Stop())

    def served(self) -> Served:
        logs = [self._gateway.log(index) for index in self._indices]
        ends = [log.end for log in logs]
        return Served(
            tuple(tuple(log.token_ids) for log in logs),
            tuple(end.finish_reason if end is not None else "" for end in ends),
            tuple(end.error if end is not None else None for end in ends),
            {name: each.statistics for name, each in self._workers.items()},
        )

    async def _host(self, name: str, line: Channel) -> None:
        async with line:
            await self._worker(line, self._world.seams(name))

    async def _tell(self, name: str, control: Control) -> None:
        await self._workers[name].line.send(as_message(control))

    async def _pump(self, worker: _Worker) -> None:
        try:
            while True:
                for decision in self._hear(worker, from_message(await worker.line.recv())):
                    if isinstance(decision, SendCancel):
                        await self._tell(decision.group, decision.cancel)
                self._look_for_the_end()
        except EndOfChannel:
            if not self._stopping:
                raise WorkerFailedError(f"{worker.name} ended without being told to") from None

    def _hear(self, worker: _Worker, control: Control) -> Sequence[ClientEvent | SendCancel]:
        match control:
            case Listening():
                worker.listening.set_result(control)
            case Connected():
                worker.connected.set_result(None)
            case Tokens(tokens):
                return [decision for token in tokens for decision in self._gateway.on_token(token)]
            case Ended():
                return self._gateway.on_ended(control)
            case Statistics():
                worker.statistics = control
            case Progress():
                pass
            case Failed(error):
                raise WorkerFailedError(f"{worker.name}: {error}")
            case LinkLost(peer, reason) if not self._stopping:
                raise WorkerFailedError(f"{worker.name} lost {peer}: {reason}")
            case _ if not self._stopping:
                raise WorkerFailedError(f"{worker.name} said {control.kind} out of turn")
        return ()

    def _look_for_the_end(self) -> None:
        if self._submitted and not self._gateway.num_unfinished:
            self.all_ended.set()


def _load_worker() -> WorkerMain:
    """The real worker; imported here only, because it brings torch."""
    module, _, function = WORKER.partition(":")
    return cast("WorkerMain", getattr(import_module(module), function))
