"""The entry of a front end: serves HTTP on the sockets that all front ends share.

flowrt/serving/front_end.py has what it is for the launcher.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from collections.abc import Callable
from pathlib import Path

import msgspec

from flowrt.actors.control import Start
from flowrt.actors.control_link import run_controlled
from flowrt.graph.model import Graph
from flowrt.processes.descriptors import allow_connections, too_few_descriptors
from flowrt.seams import Seams
from flowrt.serving.completions import Completions, PromptEncoder
from flowrt.serving.front_end import FrontEnd
from flowrt.serving.front_end_settings import ADMIN_LISTENER, LISTENER, FrontEndSettings
from flowrt.serving.gateway_client import GatewayClient
from flowrt.serving.http_app import HttpApp
from flowrt.serving.http_server import HttpServer
from flowrt.serving.tokenizer import Tokenizer
from flowrt.serving.tokenizer_process import TokenizerProcesses
from flowrt.system.signals import end_with_parent
from flowrt.transports.contract import Channel

log = logging.getLogger("flowrt.front_end")


async def run_front_end(control: Channel, seams: Seams) -> None:
    """Serve until Stop, or until the control connection ends."""

    def new(start: Start) -> FrontEnd:
        front_end = FrontEnd(start, control, seams, HttpClientServer)
        _end_gently_with_launcher(front_end.on_launcher_end)
        return front_end

    await run_controlled(control, new)


class HttpClientServer:
    """See front_end.ClientServer."""

    def __init__(self, graph: Graph, settings: bytes, client: GatewayClient, seams: Seams) -> None:
        read = msgspec.json.decode(settings, type=FrontEndSettings)
        directory = Path(read.model_dir)
        self._descriptors = seams.descriptors
        self._processes, tokenizer = TokenizerProcesses(directory, read.vocab_size, read.eos_token_ids), Tokenizer(directory)
        self._processes.start()  # it loads meanwhile
        encoder = PromptEncoder(self._processes, graph.group_limits(), read.max_model_len)
        has_log = bool(graph.reliability.request_log)
        completions = Completions(client, encoder, tokenizer, read.eos_token_ids, graph.serving.stream_interval, has_log, read.formats)
        application = HttpApp(read, client, completions, encoder, tokenizer, seams)
        most = graph.serving.max_connections
        connections, leaving = allow_connections(most)
        if connections < most:
            reason = too_few_descriptors(2 * most)
            log.warning("at most %d connections at once, not serving.max_connections (%d): %s", connections, most, reason)
        self._server = HttpServer(application, connections, read.certificate, read.private_key, application.refuse_early, leaving)

    async def accept(self) -> None:
        for name, number in self._descriptors.items():
            if name in (LISTENER, ADMIN_LISTENER):
                await self._server.start(socket.socket(fileno=number), is_admin=name == ADMIN_LISTENER)

    async def close(self, seconds: float) -> None:
        await self._server.close(seconds)

    def end(self) -> None:
        self._processes.close()


def _end_gently_with_launcher(on_end: Callable[[], None]) -> None:
    """Get SIGTERM instead of SIGKILL when the launcher dies, so that every stream gets its last event."""
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, on_end)
    end_with_parent(signal.SIGTERM)
