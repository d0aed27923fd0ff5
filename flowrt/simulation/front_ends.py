"""Front ends in a simulated run: processes that run the real FrontEnd and GatewayClient, and the clients that connect to them.

HTTP, tokenizing and decoding are not simulated: a client's task in a front end sends its prompt and records the tokens that come. Where the
run has a request log, clients name their requests, and most of those whose front end dies read on at another one.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from contextvars import ContextVar
from dataclasses import dataclass, field

from msgspec.structs import replace

from flowrt.actors.control import Control
from flowrt.actors.control_link import run_controlled
from flowrt.actors.front_end_messages import Attach, CancelRequest, Origin, Reserve, StateQuery, StateReport
from flowrt.actors.outputs import ClientEvent, EndEvent
from flowrt.gateway.requests import Requests
from flowrt.graph.model import Graph, front_end_names
from flowrt.launcher import events
from flowrt.launcher.launcher import Launcher
from flowrt.launcher.run import Run
from flowrt.launcher.worker_pool import Service
from flowrt.seams import Seams
from flowrt.serving.api_errors import INVALID, NO_REQUEST, ApiError
from flowrt.serving.front_end import FrontEnd
from flowrt.serving.gateway_client import GatewayClient
from flowrt.simulation.clients import POLL_SECONDS, tokenize_slowly
from flowrt.simulation.errors import InvariantError
from flowrt.simulation.served import CONNECTION_TEXT, UNREADABLE_TEXT, ClientRecord
from flowrt.simulation.waitables import OUTSIDE, current_node, set_result
from flowrt.simulation.world import World
from flowrt.transports.contract import Channel

ENTRY = "flowrt.simulation.front_ends:run_front_end"
WAY_SECONDS = 10e-6, 10e-3  # between a client and a front end
CONNECT_SECONDS = 30.0  # that a client waits while no front end accepts it
RETURN_SHARE = 0.8  # of the clients whose front end dies


class FrontEndClients:
    """The clients, on the node of the launcher; as DirectClients. The front ends share one listening socket, so any may get a client.
    `has_log`: the run has a request log."""

    def __init__(self, world: World, graph: Graph, has_log: bool) -> None:
        self.world, self._has_log = world, has_log
        self.services = dict.fromkeys(front_end_names(graph), Service(ENTRY))
        self._num_named = 0
        self._random = world.random_of("front ends")
        self.accepting: dict[str, _SimulatedServer] = {}  # by node
        _latest.set(self)
        self._ids: dict[str, dict[tuple[str, int], str]] = {name: {} for name in self.services}  # (node, its number) -> Request.id

    def watch(self, run: Run, on_open: Callable[[str], None]) -> None:
        """`on_open`: called with the id of each request."""
        assert run.served is not None
        self._run, self._requests, self._on_open = run, run.require_requests(), on_open
        self._queues = run.served.front_ends.queues

    async def run(self, client: ClientRecord) -> None:
        """Run one client, from its connection to its end."""
        name = ""
        if self._has_log:
            self._num_named += 1
            name = f"named-{self._num_named}"
        is_accepted = await self._run_connection(client, name, None)
        while is_accepted and name and client.failure == CONNECTION_TEXT and client.request_id and self._random.random() < RETURN_SHARE:
            before = client.front_end, client.choices
            self.world.num_faults["client came back"] += 1
            client.failure, client.events = None, []
            is_accepted = await self._run_connection(client, name, before)

    async def _run_connection(self, client: ClientRecord, name: str, before: tuple[str, tuple[tuple[int, ...], ...]] | None) -> bool:
        """`name`: of its request. `before`: the front end that it has lost, and the tokens that it had of each choice. Returns whether a
        front end accepted it."""
        if (found := await self._connect()) is None:
            client.failure = CONNECTION_TEXT
            return False
        client.front_end = found.process.name
        done = self.world.loop.create_future()
        connection = _Connection(client, done, name, client.events, is_back=before is not None)
        self._call(found.process.node, connection, found.begin)
        try:
            async with asyncio.timeout(client.request.cancel_seconds):
                await asyncio.wait([done, found.process.exit], return_when=asyncio.FIRST_COMPLETED)
        except TimeoutError:
            client.has_left = True
            self._call(found.process.node, connection, found.leave)
        if client.end is None and client.failure is None and not client.has_left:
            client.failure = CONNECTION_TEXT
        if connection.number is not None and (known := self._ids[client.front_end].get((found.process.node, connection.number))):
            client.request_id = known
        if before is not None:
            self._check_return(client, connection, *before)
        return True

    def _check_return(self, client: ClientRecord, connection: _Connection, front_end: str, tokens: tuple[tuple[int, ...], ...]) -> None:
        """A client that comes back gets what it had got, and what follows. Its request may be unknown if it had got nothing: the front end
        may have died before it sent the prompt."""
        if connection.is_unknown:
            if any(tokens):
                raise InvariantError("I1", f"{client.request_id} is unknown when its client comes back, which has {tokens} of it")
            client.failure, client.front_end = CONNECTION_TEXT, front_end
        for got, once_more in zip(tokens, client.choices, strict=True):
            if once_more[: len(got)] != got[: len(once_more)] or (client.end is not None and len(once_more) < len(got)):
                raise InvariantError("I1", f"{client.request_id} gave {tokens} before the death of {front_end}, and then {client.choices}")

    async def _connect(self) -> _SimulatedServer | None:
        """A front end that accepts connections; None when there is none for too long."""
        for _ in range(int(CONNECT_SECONDS / POLL_SECONDS)):
            alive = self._accepting()
            if alive or self._has_failed:
                return self._random.choice(alive) if alive else None
            await asyncio.sleep(POLL_SECONDS)
        return None

    def _accepting(self) -> list[_SimulatedServer]:
        return [each for _, each in sorted(self.accepting.items()) if self.world.is_alive(each.process)]

    def on_control(self, name: str, control: Control) -> None:
        if isinstance(control, Reserve | Attach) and (request := self._queues[name].requests.get(control.number)) is not None:
            request_id = self._requests.gateway.log(request.index).id
            self._ids[name][self.world.processes[name].node, control.number] = request_id
            self._on_open(request_id)
        if isinstance(control, CancelRequest) and control.number in self._queues[name].requests:
            raise InvariantError("I8", f"the gateway keeps request {control.number} of {name}, whose client has left")

    def on_event(self, event: events.Event) -> None:
        """The requests of a front end end with it, unless their clients may come back (I8)."""
        if isinstance(event, events.WorkerLost) and event.name in self._queues:
            gateway = self._requests.gateway
            for request_id in self._ids[event.name].values():
                if gateway.is_open(request_id) and (not self._has_log or gateway.log(_index_of(request_id)).origin is None):
                    raise InvariantError("I8", f"{request_id} goes on without its front end {event.name}")

    def leftovers(self) -> list[str]:
        """What is left in the front ends when all clients have left."""
        return [f"{each.process.node} has {each.num_open} open requests" for each in self._accepting() if each.num_open]

    @property
    def _has_failed(self) -> bool:
        return self._run.launcher.failure is not None

    async def report(self, launcher: Launcher, requests: Requests, query: StateQuery) -> StateReport:
        await asyncio.sleep(self._random.uniform(*WAY_SECONDS))
        return StateReport(query.number, not self._has_failed, "")

    def _call(self, node: str, connection: _Connection, call: Callable[[_Connection], None]) -> None:
        loop, way_seconds = self.world.loop, self._random.uniform(*WAY_SECONDS)
        connection.on_the_way.append(call)
        loop.call_at_node(loop.time() + way_seconds, node, connection.arrive_next, context=self.world.context(node))


_latest: ContextVar[FrontEndClients] = ContextVar("_latest")


@dataclass(eq=False)
class _Connection:
    """`done`: the client has got its end. `name`: of its request; "" without a request log. `events`: what it gets. `is_back`: it reads its
    request once more. `number`: of the request, in the front end. `is_unknown`: there is no request of this name. `on_the_way`: what the
    client does, and the front end does not know yet."""

    client: ClientRecord
    done: asyncio.Future[None]
    name: str
    events: list[ClientEvent] = field(repr=False)
    is_back: bool
    number: int | None = None
    is_unknown: bool = False
    on_the_way: deque[Callable[[_Connection], None]] = field(default_factory=deque, repr=False)

    def arrive_next(self) -> None:
        """Delivers what comes next, in order, as the bytes of one connection."""
        self.on_the_way.popleft()(self)


class _SimulatedServer:
    """The clients of one incarnation of a front end; see front_end.ClientServer."""

    def __init__(self, gateway: GatewayClient, seams: Seams) -> None:
        self._clients, self._gateway, self._seams = _latest.get(), gateway, seams
        self._world, node = self._clients.world, current_node.get()
        self.process = next(each for each in self._world.processes.values() if each.node == node)
        self._tasks: dict[_Connection, asyncio.Task[None]] = {}

    @property
    def num_open(self) -> int:
        return self._gateway.num_open

    async def accept(self) -> None:
        self._clients.accepting[self.process.node] = self

    async def close(self, seconds: float) -> None:
        self._clients.accepting.pop(self.process.node, None)
        if self._tasks:
            await asyncio.wait(self._tasks.values(), timeout=seconds)

    def end(self) -> None:
        self._clients.accepting.pop(self.process.node, None)
        for task in self._tasks.values():
            task.cancel()

    def begin(self, connection: _Connection) -> None:
        self._tasks[connection] = asyncio.get_running_loop().create_task(self._serve(connection), name="client of a front end")

    def leave(self, connection: _Connection) -> None:
        if (task := self._tasks.get(connection)) is not None:
            task.cancel()

    async def _serve(self, connection: _Connection) -> None:
        client, loop = connection.client, self._world.loop
        try:
            await self._respond(connection)
        except ApiError as error:
            connection.is_unknown = connection.is_back and error.kind is NO_REQUEST
            if connection.events is client.events and not client.has_left:  # else it has left, perhaps a dead process, whose tasks end late
                client.failure = client.failure or error.message
        finally:
            del self._tasks[connection]
            when = loop.time() + self._seams.random.uniform(*WAY_SECONDS)
            loop.call_at_node(when, OUTSIDE, set_result, connection.done, None, context=self._world.context(OUTSIDE))

    async def _respond(self, connection: _Connection) -> None:
        """Serves the client as completions.py does."""
        client, request = connection.client, connection.client.request
        with ExitStack() as stack:
            inbox = stack.enter_context(self._gateway.inbox())
            if self._seams.random.random() < 0.2:
                await self._gateway.query("ready")
            if connection.is_back:
                opened, *_ = await self._gateway.attach(connection.name, 0, inbox)
            else:
                opened = await self._gateway.reserve(replace(request.params, stop=()), len(request.prompt_token_ids), inbox, 0)
            stack.callback(opened.close)
            connection.number = opened.number
            if not connection.is_back:
                await tokenize_slowly(self._seams)
                if request.is_unreadable:
                    raise ApiError(INVALID, UNREADABLE_TEXT)
                opened.place(request.prompt_token_ids, Origin(connection.name, 0, 1, b"", is_named=True) if connection.name else None)
            while client.end is None:
                if request.reads_late:
                    await self._seams.clock.sleep(POLL_SECONDS)
                for _, output in await inbox.take():
                    for event in output.events:
                        if client.has_left:
                            return
                        if isinstance(event, EndEvent) and event.finish_reason == "abort":
                            raise ApiError(INVALID, CONNECTION_TEXT)
                        connection.events.append(event)
                        client.has_left = client.end is None and len(client.events) == request.leaves_after
                        await self._seams.clock.sleep(request.pause_seconds)


def _index_of(request_id: str) -> int:
    return int(request_id.removeprefix("request-"))


async def run_front_end(control: Channel, seams: Seams) -> None:
    """The entry of a front end."""
    await run_controlled(
        control, lambda start: FrontEnd(start, control, seams, lambda graph, settings, client, seams: _SimulatedServer(client, seams))
    )
