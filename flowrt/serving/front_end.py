"""A front end: a process that serves HTTP, tokenizes prompts and decodes tokens, so that the launcher's loop sees token ids only.

The launcher starts it as a service (launcher/service.py) and watches it like any worker. All front ends share one listening socket. When
one dies, its connections close and the gateway cancels its requests. When the launcher ends or fails, each stream gets a last error event.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec

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
from flowrt.actors.control_link import ControlLink, run_controlled
from flowrt.actors.heartbeats import send_heartbeats
from flowrt.graph.model import Graph, from_json
from flowrt.graph.recovery import is_watched
from flowrt.processes.descriptors import allow_connections
from flowrt.seams import Seams
from flowrt.serving.completions import Completions, PromptEncoder
from flowrt.serving.front_end_settings import ADMIN_LISTENER, LISTENER, FrontEndSettings
from flowrt.serving.gateway_client import GatewayClient
from flowrt.serving.http_app import HttpApp
from flowrt.serving.http_server import HttpServer
from flowrt.serving.tokenizer import Tokenizer
from flowrt.serving.tokenizer_process import TokenizerProcess
from flowrt.transports.contract import Channel
from flowrt.transports.wire.message import Message

log = logging.getLogger("flowrt.front_end")

MAX_MESSAGES = 1 << 16  # that the launcher may be behind
END_SECONDS = 1.0  # for the last events of all streams
_PR_SET_PDEATHSIG = 1


async def run_front_end(control: Channel, seams: Seams) -> None:
    """Serve until Stop, or until the control connection ends."""
    await run_controlled(control, lambda start: FrontEnd(start, control, seams))


class FrontEnd:
    """One incarnation of a front end. Created by `run_front_end`."""

    def __init__(self, start: Start, control: Channel, seams: Seams) -> None:
        self._start, self._seams = start, seams
        self._graph: Graph = from_json(start.graph)
        self._settings = msgspec.json.decode(start.settings, type=FrontEndSettings)
        self._stopped, self._has_peers, self._is_draining = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.control = ControlLink(start.name, control, MAX_MESSAGES, self._on_message, self._on_launcher_end)
        self.client = GatewayClient(self.control.send)

    async def run(self) -> None:
        settings = self._settings
        _end_gently_with_launcher(self._on_launcher_end)
        directory = Path(settings.model_dir)
        tokenizer, process = Tokenizer(directory), TokenizerProcess(directory)
        process.start()  # it loads meanwhile
        encoder = PromptEncoder(process, self._graph.group_limits(), settings.max_model_len, settings.vocab_size)
        completions = Completions(self.client, encoder, tokenizer, settings.eos_token_ids, self._graph.serving.stream_interval)
        application = HttpApp(settings, self.client, completions, encoder, tokenizer, self._seams)
        max_connections = allow_connections(self._graph.serving.max_connections)
        server = HttpServer(application, max_connections, settings.certificate, settings.private_key)
        try:
            self.control.send(Listening({}, self._seams.resident_bytes()))
            await self._has_peers.wait()
            if self._stopped.is_set():
                return
            async with asyncio.TaskGroup() as tasks:
                beating = tasks.create_task(self._send_heartbeats(), name=f"heartbeats of {self._start.name}")
                for name, number in self._seams.descriptors.items():
                    if name in (LISTENER, ADMIN_LISTENER):
                        await server.start(socket.socket(fileno=number), is_admin=name == ADMIN_LISTENER)
                self.control.send(Connected())
                await self._is_draining.wait()
                await server.close(END_SECONDS)
                self.control.send(Drained())
                await self._stopped.wait()
                beating.cancel()
            self.control.send(Statistics(resident_bytes=self._seams.resident_bytes()))
            await self.control.flush()
        finally:
            process.close()

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

    def _on_launcher_end(self) -> None:
        self.client.end("the server has ended")
        self._end()

    def _end(self) -> None:
        for event in (self._stopped, self._has_peers, self._is_draining):
            event.set()


def _end_gently_with_launcher(on_end: Callable[[], None]) -> None:
    """Get SIGTERM instead of SIGKILL when the launcher dies, so that every stream gets its last event."""
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, on_end)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
