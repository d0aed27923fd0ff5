"""Front ends in a simulated run: processes that run the real FrontEnd and GatewayClient, and the clients that connect to them.

HTTP, tokenizing and decoding are not simulated: a client's task in a front end sends its prompt and records the tokens that come.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from contextvars import ContextVar
from dataclasses import dataclass

from msgspec.structs import replace

from flowrt.actors.control import Control
from flowrt.actors.control_link import run_controlled
from flowrt.actors.front_end_messages import CancelRequest, RequestOutput, Reserve, StateQuery, StateReport
from flowrt.gateway.request_log import ChoiceEvent, ClientEvent, EndEvent, TokenEvent
from flowrt.gateway.requests import Requests
from flowrt.graph.model import Graph, front_end_names
from flowrt.launcher import events
from flowrt.launcher.launcher import Launcher
from flowrt.launcher.served_requests import ServedRequests
from flowrt.launcher.service import Service
from flowrt.seams import Seams
from flowrt.serving.api_errors import INVALID, ApiError
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


def services_of(graph: Graph) -> dict[str, Service]:
    return dict.fromkeys(front_end_names(graph), Service(ENTRY))


class FrontEndClients:
    """The clients, on the node of the launcher; as DirectClients. The front ends share one listening socket, so any may get a client."""

    def __init__(
        self, world: World, launcher: Launcher, requests: Requests, has_failed: Callable[[], bool], on_open: Callable[[str], None]
    ) -> None:
        self.world, self._requests, self._has_failed, self._on_open = world, requests, has_failed, on_open
        self.served = ServedRequests(launcher, requests, self._report_state)
        self._queues = self.served._front_ends._front_ends
        self._random = world.random_of("front ends")
        self.accepting: dict[str, _SimulatedServer] = {}  # by node
        _latest.set(self)
        self._ids: dict[str, dict[tuple[str, int], str]] = {name: {} for name in self._queues}  # (node, its number) -> Request.id

    async def run(self, client: ClientRecord) -> None:
        """Run one client, from its connection to its end."""
        if (found := await self._connect()) is None:
            client.failure = CONNECTION_TEXT
            return
        client.front_end = found.process.name
        done = self.world.loop.create_future()
        connection = _Connection(client, done)
        self._call(found.process.node, found.begin, connection)
        try:
            async with asyncio.timeout(client.request.cancel_seconds):
                await asyncio.wait([done, found.process.exit], return_when=asyncio.FIRST_COMPLETED)
        except TimeoutError:
            client.has_left = True
            self._call(found.process.node, found.leave, connection)
        if client.end is None and client.failure is None and not client.has_left:
            client.failure = CONNECTION_TEXT
        if connection.number is not None:
            client.request_id = self._ids[client.front_end].get((found.process.node, connection.number), "")

    async def _connect(self) -> _SimulatedServer | None:
        """A front end that accepts connections; None when there is none for too long."""
        for _ in range(int(CONNECT_SECONDS / POLL_SECONDS)):
            alive = self._accepting()
            if alive or self._has_failed():
                return self._random.choice(alive) if alive else None
            await asyncio.sleep(POLL_SECONDS)
        return None

    def _accepting(self) -> list[_SimulatedServer]:
        return [each for _, each in sorted(self.accepting.items()) if self.world.is_alive(each.process)]

    def on_control(self, name: str, control: Control) -> None:
        self.served.on_control(name, control)
        if isinstance(control, Reserve) and (request := self._queues[name].requests.get(control.number)) is not None:
            request_id = self._requests.gateway.log(request.index).id
            self._ids[name][self.world.processes[name].node, control.number] = request_id
            self._on_open(request_id)
        if isinstance(control, CancelRequest) and control.number in self._queues[name].requests:
            raise InvariantError("I8", f"the gateway keeps request {control.number} of {name}, whose client has left")

    def note(self, event: events.Event) -> None:
        """The requests of a front end end with it (I8)."""
        self.served.note(event)
        if isinstance(event, events.WorkerLost) and event.name in self._queues:
            for request_id in self._ids[event.name].values():
                if self._requests.gateway.is_open(request_id):
                    raise InvariantError("I8", f"{request_id} goes on without its front end {event.name}")

    def check_ended(self) -> None:
        """All clients have gone: nothing is left of their requests (I8)."""
        kept = [f"{name} keeps {len(queue.requests)} requests" for name, queue in self._queues.items() if queue.requests or queue.changed]
        kept += [f"{each.process.node} has {each.num_open} open requests" for each in self._accepting() if each.num_open]
        if kept:
            raise InvariantError("I8", f"{'; '.join(kept)} when all clients have left")

    async def _report_state(self, query: StateQuery) -> StateReport:
        await asyncio.sleep(self._random.uniform(*WAY_SECONDS))
        return StateReport(query.number, not self._has_failed(), "")

    def _call(self, node: str, call: Callable[..., object], *arguments: object) -> None:
        loop = self.world.loop
        loop.call_at_node(loop.time() + self._random.uniform(*WAY_SECONDS), node, call, *arguments, context=self.world.context(node))


_latest: ContextVar[FrontEndClients] = ContextVar("_latest")


@dataclass(eq=False)
class _Connection:
    """`done`: the client has got its end. `number`: of its request, in the front end."""

    client: ClientRecord
    done: asyncio.Future[None]
    number: int | None = None


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
            client.failure = client.failure or error.message  # it has left a dead process, whose tasks end after the run
        finally:
            del self._tasks[connection]
            when = loop.time() + self._seams.random.uniform(*WAY_SECONDS)
            loop.call_at_node(when, OUTSIDE, set_result, connection.done, None, context=self._world.context(OUTSIDE))

    async def _respond(self, connection: _Connection) -> None:
        """As completions.py does."""
        client, request = connection.client, connection.client.request
        with ExitStack() as stack:
            inbox = stack.enter_context(self._gateway.inbox())
            if self._seams.random.random() < 0.2:
                await self._gateway.query("ready")
            opened = await self._gateway.reserve(replace(request.params, stop=()), len(request.prompt_token_ids), inbox, 0)
            stack.callback(opened.close)
            connection.number = opened.number
            await tokenize_slowly(self._seams)
            if request.is_unreadable:
                raise ApiError(INVALID, UNREADABLE_TEXT)
            opened.place(request.prompt_token_ids)
            while client.end is None:
                if request.reads_late:
                    await self._seams.clock.sleep(POLL_SECONDS)
                for _, output in await inbox.take():
                    for event in _events_of(output, client):
                        if client.has_left:
                            return
                        client.events.append(event)
                        client.has_left = client.end is None and len(client.events) == request.leaves_after
                        await self._seams.clock.sleep(request.pause_seconds)


def _events_of(output: RequestOutput, client: ClientRecord) -> Iterator[ClientEvent]:
    for choice in output.choices:
        first = len(client.tokens(choice.choice))
        for at, token_id in enumerate(choice.token_ids):
            event = TokenEvent(0, first + at, token_id, "", choice.choice, degraded=choice.is_degraded)
            if choice.logprobs:
                event = replace(event, logprob=choice.logprobs[at].token, top_logprobs=choice.logprobs[at].top)
            if not choice.choice and not event.index:
                event = replace(event, prompt_logprobs=output.prompt_logprobs)
            yield event
        if choice.finish_reason is not None:
            yield ChoiceEvent(0, choice.choice, choice.finish_reason)
    if output.end == "abort":
        raise ApiError(INVALID, CONNECTION_TEXT)
    if output.end is not None:
        yield EndEvent(0, output.end, "", output.error)


async def run_front_end(control: Channel, seams: Seams) -> None:
    """The entry of a front end."""
    await run_controlled(
        control, lambda start: FrontEnd(start, control, seams, lambda graph, settings, client, seams: _SimulatedServer(client, seams))
    )
