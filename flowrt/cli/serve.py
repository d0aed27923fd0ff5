"""`flowrt serve`: opens the sockets, starts the graph with its front ends, and drains it when the command is stopped. `flowrt up` does the
same in the background (up.py)."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import ssl
import sys
from collections.abc import Callable
from contextlib import ExitStack, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import flowrt
from flowrt.api.opening import read_graph
from flowrt.api.running_graph import RunningGraph
from flowrt.bench.peers.child import new_event_loop
from flowrt.cli.loading_line import LoadingLine
from flowrt.cli.options import ServeCommandOptions, check_api_key
from flowrt.cli.resume import kept_options
from flowrt.cli.text import OutputStream, visible
from flowrt.errors import FAILURE, INTERRUPTED, SUCCESS, TokenizerError, UserError, WorkerDiedError, install_command, shown
from flowrt.graph.model import Graph
from flowrt.launcher import events
from flowrt.launcher.start_check_process import check_start
from flowrt.observe import print_line
from flowrt.processes.descriptors import check_front_end
from flowrt.processes.output_tail import write_line
from flowrt.seams import Seams
from flowrt.serving.cors import CorsRules, read_list, read_origins
from flowrt.serving.front_end_settings import ServeOptions
from flowrt.serving.listener import HttpListener, open_tcp_listener, open_unix_listener
from flowrt.serving.output_formats import AUTO_PARSER, NO_FORMATS, NO_PARSER, REASONING_FORMATS, TOOL_FORMATS, OutputFormats, find_formats
from flowrt.serving.run_folder import MAX_LOG_BYTES, VARIABLE, Description, RunFolder, claim, found_graphs
from flowrt.serving.template_files import read_template_files
from flowrt.system.signals import ending_signals, kept_signals

MAX_NAME_CHARACTERS = 200


def serve(path: Path, options: ServeCommandOptions) -> int:
    """Serve until a signal. Returns the exit code. Raises UserError before anything starts."""
    with ExitStack() as stack:
        return open_session(path, options, options.name, stack).run()


def open_session(path: Path, options: ServeCommandOptions, run_name: str | None, stack: ExitStack) -> ServeSession:
    """Check everything and open the sockets; `stack` closes them. Raises UserError. `run_name`: of its folder; None: it has none."""
    if find_spec("uvicorn") is None or find_spec("httptools") is None:
        raise UserError(f"flowrt serve needs uvicorn and httptools: {install_command('serve')}")
    graph = read_graph(path, options.overrides, options.model)
    check_start(graph)
    if graph.model is None:
        raise UserError(f"{path}: this graph serves no model; call it from Python: await graph(name=tensor)")
    if options.resume and not graph.reliability.request_log:
        raise UserError(f"{path} has no request log to resume from; set reliability.request_log, or leave out --resume")
    check_front_end()
    name = options.served_model_name or Path(graph.model.path).name
    _check(options, name)
    cors = _cors_of(options)
    folder = None
    if run_name is not None:
        folder = claim(run_name, resumes=options.resume)
        stack.callback(folder.remove)
    listener = _open_listener(options)
    stack.callback(listener.close)
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
        formats=_formats(options, Path(graph.model.path)),
        cors=cors,
        admin=None if folder is None else open_unix_listener(folder.socket, VARIABLE),
    )
    if serving.admin is not None:
        stack.callback(serving.admin.close)
    return ServeSession(graph, serving, options, folder, str(path.absolute()))


def _open_listener(options: ServeCommandOptions) -> HttpListener:
    if options.uds is not None:
        return open_unix_listener(options.uds)
    try:
        return open_tcp_listener(options.host, options.port, "http" if options.ssl_certfile is None else "https")
    except UserError as error:
        if not isinstance(error.__cause__, OSError) or error.__cause__.errno != errno.EADDRINUSE:
            raise
        alive = [each.description for each in found_graphs() if each.is_alive and each.description is not None]
        holder = next((each for each in alive if urlsplit(each.url).port == options.port), None)
        if holder is None:
            raise
        text = f"{holder.name} serves at {holder.url}; flowrt down {holder.name} stops it, or give another --port"
        raise UserError(text) from None


def _formats(options: ServeCommandOptions, directory: Path) -> OutputFormats:
    """The forms of the model's outputs. Raises UserError."""
    try:
        found = find_formats("\n".join(read_template_files(directory).templates.values()))
    except TokenizerError:  # requests with a chat get the reason
        found = NO_FORMATS
    chosen = []
    for option, name, in_template, known in (
        ("--tool-call-parser", options.tool_call_parser, found.tools, TOOL_FORMATS),
        ("--reasoning-parser", options.reasoning_parser, found.reasoning, REASONING_FORMATS),
    ):
        if name not in (AUTO_PARSER, NO_PARSER, *known):
            raise UserError(f"{option} is {shown(name)}, it must be {AUTO_PARSER}, {NO_PARSER}, or one of {', '.join(known)}")
        chosen.append(in_template if name == AUTO_PARSER else name)
    return OutputFormats(*chosen)


def _check(options: ServeCommandOptions, name: str) -> None:
    if not name.isprintable() or len(name) > MAX_NAME_CHARACTERS:
        raise UserError(f"--served-model-name must be one line of at most {MAX_NAME_CHARACTERS} characters")
    check_api_key(options.api_key)
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


def _cors_of(options: ServeCommandOptions) -> CorsRules:
    """Raises UserError."""
    methods, headers = read_list("--allowed-methods", options.allowed_methods), read_list("--allowed-headers", options.allowed_headers)
    if options.allowed_origins is None:
        if options.allow_credentials or (methods, headers) != (("*",), ("*",)):
            raise UserError("--allowed-methods, --allowed-headers and --allow-credentials need --allowed-origins")
        return CorsRules()
    origins = read_origins("--allowed-origins", options.allowed_origins)
    return CorsRules(origins=origins, methods=methods, headers=headers, allows_credentials=options.allow_credentials)


class ServeSession:
    """One run of the command. `folder`: of the graph; None without a name. `path`: of the graph file. `has_log`: standard error is the log
    in the folder. `on_loading` is called while it loads, `on_ready` once it serves."""

    def __init__(self, graph: Graph, serving: ServeOptions, options: ServeCommandOptions, folder: RunFolder | None, path: str) -> None:
        self._serving, self._options, self.folder, self._path = serving, options, folder, path
        self._seams = Seams()
        callbacks = self._on_event, self._on_line
        self._graph = RunningGraph(
            graph,
            self._seams,
            options.log_level,
            *callbacks,
            serving=serving,
            resumes=options.resume,
            generation_config=options.generation_config,
        )
        self.has_log, self._num_logged, self._is_ready = False, 0, False
        self.on_loading: Callable[[events.WeightsLoading], None] = lambda loading: None
        self.on_ready: Callable[[], None] = lambda: None
        self._loading_line = LoadingLine(_print)
        self._graph.require_tokenizer()
        self._body: asyncio.Task[Any] | None = None
        self._stop: asyncio.Future[None] | None = None  # once it serves
        self._ends_at_once = False  # since a signal
        self._may_finish = False  # requests in progress, since the first signal
        self._time_left: asyncio.Timeout | None = None  # for these

    @property
    def url(self) -> str:
        return self._serving.listener.url

    def leave(self) -> None:
        """Close the sockets here, and the lock of the folder: another process serves. When that one dies, no connection waits for this."""
        for listener in (self._serving.listener, self._serving.admin):
            if listener is not None:
                listener.socket.close()
        if self.folder is not None:
            self.folder.leave()

    @property
    def sentence(self) -> str:
        return f"serving {self._serving.model_name} at {self.url}"

    def run(self) -> int:
        """Serve until a signal. Returns the exit code. Raises UserError."""
        self._describe()
        self._loading_line = LoadingLine(_print, OutputStream(sys.stderr))
        _print(f"starting {len(self._graph.graph.process_names())} workers for {self._serving.model_name}")
        formats = self._serving.formats
        if formats != NO_FORMATS:
            _print(f"tool calls: {formats.tools or NO_PARSER}; reasoning: {formats.reasoning or NO_PARSER}")
        with kept_signals(), asyncio.Runner(loop_factory=new_event_loop) as runner:
            return runner.run(self._run())

    async def _run(self) -> int:
        self._body = asyncio.current_task()
        with ending_signals(self._on_signal):
            try:
                await self._serve()
            except asyncio.CancelledError:
                return INTERRUPTED
            except UserError as error:
                if not self._is_ready:
                    raise
                _print(f"error: {visible(str(error))}")
                return FAILURE
            except WorkerDiedError as error:
                _print(f"error: {visible(str(error))}")
                for line in error.output_tail:
                    print_line(f"  {visible(line)}")
                return error.exit_code
        _print("stopped")
        return SUCCESS

    async def _serve(self) -> None:
        async with self._graph as graph:
            if self._ends_at_once:  # the signal came as the start ended
                raise asyncio.CancelledError
            host_of = graph.launcher.graph.host_of
            processes = ", ".join(f"{name} {pid or f'on {host_of(name)}'}" for name, pid in graph.pids.items())
            _print(f"{self.sentence} ({processes})")
            if self._options.resume:
                _print(f"resumed requests: {len(graph.resumed)}")
            self._describe(is_ready=True)
            self._keep_folder(bool(graph.graph.reliability.request_log))
            self.on_ready()
            _notify("READY=1")
            self._stop = asyncio.get_running_loop().create_future()
            await asyncio.wait({self._stop, graph.launcher.opened_task()}, return_when=asyncio.FIRST_COMPLETED)
            if self._stop.done():
                await self._drain(graph)
                self._keep_folder(False)

    async def _drain(self, graph: RunningGraph) -> None:
        """Let requests in progress finish. After a second signal each stream gets its error event; then raises CancelledError."""
        try:
            async with asyncio.timeout(None if self._may_finish else 0) as self._time_left:
                await graph.end_serving(self._options.drain_seconds)
                self._may_finish = False
        except TimeoutError:
            await graph.end_serving(0)
            raise asyncio.CancelledError from None

    def _keep_folder(self, is_kept: bool) -> None:
        """Whether the folder outlives this process: what is in it can be resumed."""
        if self.folder is not None:
            self.folder.is_kept = is_kept

    def _describe(self, is_ready: bool = False) -> None:
        if self.folder is not None:
            listener, name = self._serving.listener, self._serving.model_name
            self.folder.describe(
                Description(
                    name=self.folder.name,
                    pid=os.getpid(),
                    graph=self._path,
                    model=name,
                    url=listener.url,
                    started=self._seams.wall_now(),
                    drain_seconds=self._options.drain_seconds,
                    max_requests=self._graph.max_requests,
                    is_ready=is_ready,
                    has_log=self.has_log,
                    options=kept_options(self._options, urlsplit(listener.url).port or self._options.port),
                    has_api_key=bool(self._options.api_key),
                    run_id=self._graph.launcher.run_id,
                    sampling_defaults=dict(self._graph.sampling_defaults),
                )
            )

    def _on_line(self, process: str, line: str) -> None:
        self._loading_line.clear()
        write_line(process, line)
        if self.folder is not None and self.has_log:
            self._num_logged += len(line)
            if self._num_logged > MAX_LOG_BYTES:
                self._num_logged = 0
                self.folder.begin_log(sys.stdout.fileno(), sys.stderr.fileno())

    def _on_event(self, event: events.Event) -> None:
        if isinstance(event, events.WeightsLoading):
            self._loading_line.show(event)
            self.on_loading(event)
            return
        self._loading_line.clear()
        match event:
            case events.ModelNotice(text, is_warning=False):
                _print(text)
            case events.WorkerListening(name=name) if not self._is_ready:
                _print(f"{name} loaded")
            case events.Ready(seconds):
                self._is_ready = True
                _print(f"ready in {seconds:.1f} s")
            case _:
                events.print_news(event)

    def _on_signal(self, number: int) -> None:
        """The first signal drains the server; the second one ends requests in progress with an error, and then the server. A further
        one, or one while no requests are served, ends it at once."""
        if self.folder is not None:
            self.folder.mark_stopping()
        if self._stop is not None and not self._stop.done():
            _print(f"stopping: requests in progress finish within {self._options.drain_seconds:g} s; once more to end at once")
            self._stop.set_result(None)
            self._may_finish = True
            _notify("STOPPING=1")
            return
        self._loading_line.clear()
        _print("ending at once")
        self._keep_folder(False)
        self._ends_at_once = True
        if self._may_finish:
            self._may_finish = False
            if self._time_left is not None:
                self._time_left.reschedule(asyncio.get_running_loop().time())
        elif self._body is not None:
            self._body.cancel()


def _notify(state: str) -> None:
    """Report a state to systemd, for units of Type=notify. No-op elsewhere."""
    if address := os.environ.get("NOTIFY_SOCKET"):
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notices:
            notices.connect(f"\0{address[1:]}" if address.startswith("@") else address)
            notices.send(state.encode())


def _print(text: str) -> None:
    print_line(f"flowrt: {text}")
