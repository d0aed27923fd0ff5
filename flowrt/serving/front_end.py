"""A front end as the launcher sees it: starts, sends heartbeats, drains and stops; its clients' requests go to the gateway.

The launcher starts it as a service (launcher/worker_pool.py) and watches it like any worker. When it dies, its connections close and the
gateway cancels its requests. When the launcher ends or fails, each stream gets a last error event. Not here: HTTP (http_front_end.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from flowrt.actors.control import (
    Connected,
    Drain,
    Drained,
    Listening,
    Peers,
    Start,
    Statistics,
    StatisticsRequest,
    Stop,
    from_message,
)
from flowrt.actors.control_link import ControlLink
from flowrt.actors.heartbeats import send_heartbeats
from flowrt.graph.model import Graph, from_json
from flowrt.graph.recovery import is_watched
from flowrt.seams import Seams
from flowrt.serving.gateway_client import GatewayClient
from flowrt.transports.contract import Channel
from flowrt.transports.wire.message import Message

MAX_MESSAGES = 1 << 16  # that the launcher may be behind
END_SECONDS = 1.0  # for the last events of all streams


class ClientServer(Protocol):
    """Serves the clients of one front end. `close` takes no more, and lets those in progress end within `seconds`. `end` follows."""

    async def accept(self) -> None: ...

    async def close(self, seconds: float) -> None: ...

    def end(self) -> None: ...


class FrontEnd:
    """One incarnation of a front end. `new_server` makes what serves its clients, of the graph and the settings in Start."""

    def __init__(
        self, start: Start, control: Channel, seams: Seams, new_server: Callable[[Graph, bytes, GatewayClient, Seams], ClientServer]
    ) -> None:
        self._start, self._seams, self._new_server = start, seams, new_server
        self._graph: Graph = from_json(start.graph)
        self._stopped, self._has_peers, self._is_draining = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.control = ControlLink(start.name, control, MAX_MESSAGES, self._on_message, self.on_launcher_end)
        self.client = GatewayClient(self.control.send, seams.clock.now)

    async def run(self) -> None:
        server = self._new_server(self._graph, self._start.settings, self.client, self._seams)
        try:
            self.control.send(Listening({}, self._seams.resident_bytes()))
            await self._has_peers.wait()
            if self._stopped.is_set():
                return
            async with asyncio.TaskGroup() as tasks:
                beating = tasks.create_task(self._send_heartbeats(), name=f"heartbeats of {self._start.name}")
                await server.accept()
                self.control.send(Connected())
                await self._is_draining.wait()
                await server.close(END_SECONDS)
                self.control.send(Drained())
                await self._stopped.wait()
                beating.cancel()
            self.control.send(Statistics(resident_bytes=self._seams.resident_bytes()))
            await self.control.flush()
        finally:
            server.end()

    async def _send_heartbeats(self) -> None:
        if is_watched(self._graph):
            await send_heartbeats(self._start.incarnation, lambda: (0, None), self._seams.clock, self.control.send)

    def _on_message(self, message: Message) -> None:
        match control := from_message(message):
            case Peers():
                self._has_peers.set()
            case StatisticsRequest():
                self.control.send(Statistics(resident_bytes=self._seams.resident_bytes()))
            case Drain():
                self._is_draining.set()
            case Stop():
                self._end()
            case _:
                self.client.on_control(control)

    def on_launcher_end(self) -> None:
        self.client.end("the server has ended")
        self._end()

    def _end(self) -> None:
        for event in (self._stopped, self._has_peers, self._is_draining):
            event.set()
