"""`flowrt serve`: opens the socket, starts the graph with its front ends, and drains it when the command is stopped."""

from __future__ import annotations

import asyncio
import ssl
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import flowrt
from flowrt.api.opening import read_graph
from flowrt.api.running_graph import RunningGraph
from flowrt.bench.peers.child import new_event_loop
from flowrt.cli.options import ServeCommandOptions
from flowrt.cli.text import visible
from flowrt.errors import UserError, WorkerDiedError
from flowrt.exit_codes import INTERRUPTED, SUCCESS
from flowrt.graph.model import Graph
from flowrt.launcher import events
from flowrt.processes.output_tail import write_line
from flowrt.seams import Seams
from flowrt.serving.front_end_settings import ServeOptions
from flowrt.serving.listener import HttpListener, open_tcp_listener, open_unix_listener
from flowrt.signals import ending_signals

MAX_NAME_CHARACTERS, MAX_KEY_CHARACTERS = 200, 1000


def serve(path: Path, options: ServeCommandOptions) -> int:
    """Serve until a signal. Returns the exit code. Raises UserError before anything starts."""
    if find_spec("uvicorn") is None or find_spec("httptools") is None:
        raise UserError('flowrt serve needs uvicorn and httptools: pip install "flowrt[serve]"')
    graph = read_graph(path, options.overrides, options.model)
    if graph.model is None:
        raise UserError(f"{path}: this graph serves no model; call it from Python: await graph(name=tensor)")
    name = options.served_model_name or Path(graph.model.path).name
    _check(options, name)
    listener = _open_listener(options)
    try:
        if listener.is_public and not options.api_key:
            raise UserError(f"others may reach {listener.url}; give --api-key KEY, or --host 127.0.0.1 for this machine only")
        serving = ServeOptions(
            listener=listener,
            model_name=name,
            version=flowrt.__version__,
            api_key=options.api_key or "",
            max_model_len=options.max_model_len,
            certificate=str(options.ssl_certfile or ""),
            private_key=str(options.ssl_keyfile or ""),
        )
        session = ServeSession(graph, serving, options)
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            return runner.run(session.run())
    finally:
        listener.close()


def _open_listener(options: ServeCommandOptions) -> HttpListener:
    if options.uds is not None:
        return open_unix_listener(options.uds)
    return open_tcp_listener(options.host, options.port, "http" if options.ssl_certfile is None else "https")


def _check(options: ServeCommandOptions, name: str) -> None:
    if not name.isprintable() or len(name) > MAX_NAME_CHARACTERS:
        raise UserError(f"--served-model-name must be one line of at most {MAX_NAME_CHARACTERS} characters")
    if options.api_key is not None and not (options.api_key.isascii() and options.api_key.isprintable() and options.api_key.strip()):
        raise UserError("--api-key must be printable ASCII; give a key of letters and digits")
    if options.api_key is not None and len(options.api_key) > MAX_KEY_CHARACTERS:
        raise UserError(f"--api-key is longer than {MAX_KEY_CHARACTERS} characters")
    if not 0 <= options.port < 1 << 16:
        raise UserError(f"--port is {options.port}, it must be from 0 to 65535")
    if options.max_model_len is not None and options.max_model_len < 1:
        raise UserError(f"--max-model-len is {options.max_model_len}, it must be at least 1")
    if not 0 <= options.drain_seconds <= 86400:
        raise UserError(f"--drain-seconds is {options.drain_seconds:g}, it must be from 0 to 86400")
    if options.ssl_keyfile is not None and options.ssl_certfile is None:
        raise UserError("--ssl-keyfile needs --ssl-certfile")
    if options.ssl_certfile is not None:
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(options.ssl_certfile, options.ssl_keyfile, password="")
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise UserError(f"--ssl-certfile {options.ssl_certfile} or its key cannot be used: {reason}") from None


class ServeSession:
    """One run of the command."""

    def __init__(self, graph: Graph, serving: ServeOptions, options: ServeCommandOptions) -> None:
        self._serving, self._options = serving, options
        self._graph = RunningGraph(graph, Seams(), options.log_level, self._on_event, write_line, serving=serving)
        self._graph.require_tokenizer()
        self._body: asyncio.Task[Any] | None = None
        self._stop: asyncio.Future[None] | None = None  # once it serves

    async def run(self) -> int:
        """Returns the exit code. Raises UserError and WorkerDiedError."""
        self._body = asyncio.current_task()
        with ending_signals(self._on_signal):
            try:
                await self._serve()
            except asyncio.CancelledError:
                return INTERRUPTED
            except WorkerDiedError as error:
                _print(f"error: {visible(str(error))}")
                for line in error.output_tail:
                    print(f"  {visible(line)}", file=sys.stderr)
                return error.exit_code
        _print("stopped")
        return SUCCESS

    async def _serve(self) -> None:
        async with self._graph as graph:
            processes = ", ".join(f"{name} {pid}" for name, pid in graph.pids.items())
            _print(f"serving {self._serving.model_name} at {self._serving.listener.url} ({processes})")
            self._stop = asyncio.get_running_loop().create_future()
            await asyncio.wait({self._stop, graph.launcher.opened_task()}, return_when=asyncio.FIRST_COMPLETED)
            if self._stop.done():
                await graph.end_serving(self._options.drain_seconds)

    def _on_event(self, event: events.Event) -> None:
        if isinstance(event, events.Ready):
            _print(f"ready in {event.seconds:.1f} s")
        else:
            events.print_news(event)

    def _on_signal(self, number: int) -> None:
        """The first signal drains the server; the second one, or one before it serves, ends it at once."""
        if self._stop is not None and not self._stop.done():
            _print(f"stopping: requests in progress finish within {self._options.drain_seconds:g} s; once more to end at once")
            self._stop.set_result(None)
        elif self._body is not None:
            _print("ending at once")
            self._body.cancel()


def _print(text: str) -> None:
    print(f"flowrt: {text}", file=sys.stderr, flush=True)
