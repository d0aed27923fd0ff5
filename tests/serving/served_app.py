"""The HTTP API of a front end and the gateway in one loop, on a real socket; a test plays the attention group. Not a test itself."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from gateway.gateways import gateway_of
from group_tokens import group_tokens

from flowrt.actors.control import Cancel, Control, Ended, Request, Submit, Tokens, as_message, from_message
from flowrt.actors.front_end_messages import StateQuery, StateReport
from flowrt.actors.outputs import Logprobs
from flowrt.engine.constraint_builder import ConstraintBuilder
from flowrt.engine.grammar import GrammarError
from flowrt.errors import TokenizerError
from flowrt.gateway.front_ends import FrontEnds
from flowrt.gateway.log_writer import LogWriter, open_log
from flowrt.gateway.request_metrics import RequestMetrics
from flowrt.gateway.requests import Requests
from flowrt.graph.settings import GraphLimits
from flowrt.reliability.health import RequestProgress
from flowrt.sampling_params import SamplingParams
from flowrt.seams import Seams
from flowrt.serving.completions import Completions, PromptEncoder
from flowrt.serving.cors import CorsRules
from flowrt.serving.front_end_settings import FrontEndSettings
from flowrt.serving.gateway_client import GatewayClient
from flowrt.serving.http_app import HttpApp
from flowrt.serving.http_server import HttpServer
from flowrt.serving.listener import HttpListener, open_tcp_listener
from flowrt.serving.output_formats import NO_FORMATS, OutputFormats
from flowrt.serving.tokenizer import Tokenizer
from flowrt.serving.tokenizer_process import TokenizerProcesses
from flowrt.system.log_files import open_log_folder
from flowrt.transports.wire.message import Message

MODEL = Path(__file__).resolve().parents[2] / "examples" / "tiny-moe"
NAME, GROUP = "front_end.0", "attention.0"


class DirectProcess(TokenizerProcesses):
    """Tokenizes and compiles grammars in this process: the tests' texts are harmless."""

    async def encode(self, prompt: Any, *, max_tokens: int, add_special_tokens: bool | None = None) -> list[int]:
        tokenizer = Tokenizer(self.directory)
        return tokenizer.encode(prompt) if isinstance(prompt, str) else tokenizer.encode_chat(prompt, bool(add_special_tokens))

    async def check(self, params: SamplingParams) -> None:
        try:
            ConstraintBuilder(self.directory, self.vocab_size, self.eos_token_ids).constraint(params)
        except GrammarError as error:
            raise TokenizerError(error.text, param=error.param) from None


@dataclass
class Response:
    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> tuple[int, str, str | None]:
        error = self.json()["error"]
        return self.status, error["code"], error["param"]


class Connection:
    """A client's connection, read as far as the test wants."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    def send(self, method: str, path: str, body: Any = None, **headers: str) -> None:
        data = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        fields = {"host": "localhost", "content-type": "application/json", "content-length": str(len(data))}
        fields |= {name.replace("_", "-"): value for name, value in headers.items()}
        head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
        self.writer.write(f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode() + data)

    async def head(self) -> Response:
        head = (await self.reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = dict(line.split(": ", 1) for line in head[1:] if line)
        return Response(int(head[0].split()[1]), headers, b"")

    async def response(self) -> Response:
        response = await self.head()
        response.body = await self.reader.readexactly(int(response.headers["content-length"]))
        return response

    async def chunk(self) -> str:
        """The next chunk of a stream; "" at its end."""
        length = int(await self.reader.readline(), 16)
        data = await self.reader.readexactly(length)
        await self.reader.readexactly(2)
        return data.decode()

    async def events(self) -> list[Any]:
        """The rest of a stream, without its last event, which must be [DONE]."""
        text = "".join([chunk async for chunk in self.chunks()])
        events = [line.rpartition("data: ")[2] for line in text.split("\n\n") if line]
        assert events.pop() == "[DONE]"
        return [json.loads(event) for event in events]

    async def events_after_head(self) -> list[Any]:
        assert (await self.head()).status == 200
        return await self.events()

    async def chunks(self) -> AsyncIterator[str]:
        while chunk := await self.chunk():
            yield chunk

    async def close(self) -> None:
        self.writer.close()
        await self.writer.wait_closed()


class ServedApp:
    """Made by `served_app`. `submitted` and `cancelled`: what the group was sent."""

    def __init__(
        self,
        listener: HttpListener,
        settings: FrontEndSettings,
        max_requests: int,
        max_prompt_tokens: int,
        connections: int,
        log: Path | None,
        stream_interval: int,
        max_tokens: int,
    ) -> None:
        limits = GraphLimits(max_tokens=max_tokens)
        self.gateway = gateway_of(
            [GROUP],
            limits,
            settings.max_model_len,
            settings.vocab_size,
            draw_seed=lambda: 1,
            eos_token_ids=frozenset(settings.eos_token_ids),
            max_requests=max_requests,
            max_prompt_tokens=max_prompt_tokens,
        )
        seams = Seams()
        self.metrics = RequestMetrics(settings.max_model_len)
        self.requests = Requests(self.gateway, self._send_to_group, RequestProgress(), seams.clock, metrics=self.metrics)
        self.log: LogWriter | None = None
        if log is not None:
            self.log, contents = open_log(open_log_folder(log), {}, resumes=True)
            self.requests.begin_log(self.log, contents)
        self.front_ends = FrontEnds([NAME], self.requests, self._send, self._post, self._report_state)
        self.client = GatewayClient(lambda control: self.front_ends.on_control(NAME, over_the_wire(control)), seams.clock.now)
        directory = Path(settings.model_dir)
        self.tokenizer = Tokenizer(directory)
        encoder = PromptEncoder(DirectProcess(directory, settings.vocab_size, settings.eos_token_ids), limits, settings.max_model_len)
        completions = Completions(
            self.client, encoder, self.tokenizer, settings.eos_token_ids, stream_interval, log is not None, settings.formats
        )
        self.app = HttpApp(settings, self.client, completions, encoder, self.tokenizer, seams)
        self.server = HttpServer(self.app, connections, settings.certificate, settings.private_key, self.app.refuse_early)
        self.listener = listener
        self.connections: list[Connection] = []  # made by `connect`
        self.submitted: asyncio.Queue[Request] = asyncio.Queue()
        self.cancelled: list[Cancel] = []
        self.is_ok = True

    async def connect(self, buffer_bytes: int = 0) -> Connection:
        """A connection that ends with the app at the latest, also when a test fails. `buffer_bytes`: of the client's end, where it reads
        slowly."""
        client = socket.socket()
        if buffer_bytes:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
        client.setblocking(False)
        await asyncio.get_running_loop().sock_connect(client, self.listener.socket.getsockname())
        self.connections.append(Connection(*await asyncio.open_connection(sock=client)))
        return self.connections[-1]

    async def call(self, method: str, path: str, body: Any = None, **headers: str) -> Response:
        connection = await self.connect()
        connection.send(method, path, body, **headers)
        try:
            return await connection.response()
        finally:
            await connection.close()

    async def begin(self, path: str, body: Any, **headers: str) -> tuple[Connection, Request]:
        """The connection of a request, and what the group is sent of it."""
        connection = await self.connect()
        connection.send("POST", path, body, **headers)
        return connection, await self.submitted.get()

    def answer(self, request: Request, text: str, reason: Any = "stop", choice: int = 0) -> None:
        """The group sends the tokens of a text, which end the choice."""
        self.emit(request, text, choice=choice)
        self.finish(request, reason, choice=choice)

    def emit(self, request: Request, text: str, at: int = 0, choice: int = 0) -> int:
        """The group sends the tokens of a text; returns the number of tokens so far."""
        token_ids = tuple(self.tokenizer.encode(text))
        for index, token_id in enumerate(token_ids, at):
            self.emit_token(request, token_id, index, choice)
        return at + len(token_ids)

    def emit_token(self, request: Request, token_id: int, index: int, choice: int) -> None:
        """The logprob of each token of the prompt is minus its position."""
        logprobs = (
            () if request.params.logprobs is None else (Logprobs(-0.5, tuple((i, -0.5 - i) for i in range(request.params.logprobs))),)
        )
        token = group_tokens(request.id, request.attempt, index, (token_id,), choice, logprobs)
        if request.params.prompt_logprobs is not None and not index and not choice:
            top = tuple((i, -1.0 - i) for i in range(request.params.prompt_logprobs))
            of_prompt = tuple(Logprobs(-float(at), top) for at in range(1, len(request.prompt_token_ids)))
            token = msgspec.structs.replace(token, prompt_logprobs=of_prompt)
        self.requests.on_control(GROUP, Tokens((token,)))

    def finish(self, request: Request, reason: Any = "stop", error: str | None = None, choice: int = 0) -> None:
        self.requests.on_control(GROUP, Ended(request.id, request.attempt, reason, error, choice))

    async def _send_to_group(self, group: str, control: Control) -> None:
        if isinstance(control, Submit):
            self.submitted.put_nowait(control.request)
        elif isinstance(control, Cancel):
            self.cancelled.append(control)

    async def _send(self, name: str, control: Control) -> None:
        self.client.on_control(over_the_wire(control))
        await asyncio.sleep(0)

    def _post(self, name: str, control: Control) -> None:
        self.client.on_control(over_the_wire(control))

    async def _report_state(self, query: StateQuery) -> StateReport:
        return StateReport(query.number, self.is_ok, "" if self.is_ok else "no attention group is left")


def over_the_wire(control: Control) -> Control:
    message = as_message(control)
    return from_message(Message(kind=message.kind, header=msgspec.msgpack.encode(message.header)))


@asynccontextmanager
async def served_app(
    *,
    api_key: str = "",
    max_requests: int = 1024,
    max_prompt_tokens: int = 1 << 20,
    connections: int = 64,
    certificate: str = "",
    private_key: str = "",
    log: Path | None = None,
    stream_interval: int = 1,
    formats: OutputFormats = NO_FORMATS,
    model_dir: Path = MODEL,
    max_model_len: int = 512,
    max_tokens: int = 128,
    cors: CorsRules = CorsRules(),
    model_name: str = "tiny",
) -> AsyncIterator[ServedApp]:
    """`log`: the folder of a request log, which is resumed."""
    listener = open_tcp_listener("127.0.0.1", 0)
    settings = FrontEndSettings(
        model_dir=str(model_dir),
        model_name=model_name,
        cors=cors,
        max_model_len=max_model_len,
        vocab_size=768,
        eos_token_ids=(0,),
        version="1.2.3",
        api_key=api_key,
        hosts=listener.hosts,
        certificate=certificate,
        private_key=private_key,
        formats=formats,
    )
    served = ServedApp(listener, settings, max_requests, max_prompt_tokens, connections, log, stream_interval, max_tokens)
    served.requests.begin()
    served.front_ends.begin()
    await served.server.start(listener.socket)
    try:
        yield served
    finally:
        for connection in served.connections:
            connection.writer.transport.abort()
        await served.server.close(1.0)
        await served.front_ends.aclose()
        await served.requests.aclose()
        if served.log is not None:
            await served.log.aclose()
        listener.close()
