"""A small HTTP/1.1 client that hands on a body as it comes in: as little time as possible between a socket and its time stamp."""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import cast
from urllib.parse import urlsplit

import httptools

from flowrt.errors import UserError

CONNECT_SECONDS = 30.0
MAX_IDLE = 4096  # connections kept for later requests
BodyReader = Callable[[int, bytes], None]  # given the status and a piece of the body


class ConnectionFailedError(Exception):
    """The connection broke, or the server sent something that is not HTTP. `is_unused`: before the first byte of a response."""

    def __init__(self, text: str, is_unused: bool = False) -> None:
        super().__init__(text)
        self.is_unused = is_unused


@dataclass(frozen=True)
class ServerAddress:
    host: str
    port: int
    is_tls: bool
    prefix: str  # of every path
    socket: str = ""  # the path of a unix socket, of the server that `host` names; "": a TCP port

    @classmethod
    def of(cls, url: str, option: str = "--base-url") -> ServerAddress:
        """`option`: where the URL comes from. Raises UserError."""
        with suppress(ValueError):
            parts = urlsplit(url)
            port = parts.port or (443 if parts.scheme == "https" else 80)
            if parts.scheme in ("http", "https") and parts.hostname and not parts.query and url.isascii() and url.isprintable():
                return cls(parts.hostname, port, parts.scheme == "https", parts.path.rstrip("/"))
        raise UserError(f"{option} {url!r} is not a URL; give http://HOST:PORT")

    @property
    def authority(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.socket else f"{host}:{self.port}"


class _HttpConnection(asyncio.Protocol):
    """One connection; one request at a time."""

    transport: asyncio.Transport  # the loop sets it before it returns the connection

    def __init__(self) -> None:
        self.num_requests = 0
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._done: asyncio.Future[int] | None = None
        self._on_body: BodyReader | None = None
        self._reset()

    def request(self, data: bytes, on_body: BodyReader) -> asyncio.Future[int]:
        self._reset()
        self._on_body = on_body
        self._done = asyncio.get_running_loop().create_future()
        self.num_requests += 1
        if self.transport.is_closing():
            self._fail("the server closed the connection")
        self.transport.write(data)
        return self._done

    @property
    def is_reusable(self) -> bool:
        return self._keeps_alive and not self.transport.is_closing()

    def close(self) -> None:
        self.transport.abort()

    # Called by the loop.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._has_received = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            cause = error.__context__  # of a callback of ours
            self._fail(f"the response is not valid: {cause or error}")
            self.close()

    def connection_lost(self, error: Exception | None) -> None:
        self.closed.set_result(None)
        if self._done is None or self._done.done():
            return
        if error is None and self._in_body and not self._has_length:
            self._done.set_result(self._parser.get_status_code())  # the end of the connection is the end of such a body
        else:
            self._fail(f"the connection ended: {error}" if error else "the connection ended")

    # Called by the parser.

    def on_message_begin(self) -> None:
        self._has_length = self._in_body = False

    def on_header(self, name: bytes, value: bytes) -> None:
        self._has_length = self._has_length or name.lower() in (b"content-length", b"transfer-encoding")

    def on_headers_complete(self) -> None:
        self._in_body = True

    def on_body(self, body: bytes) -> None:
        if self._on_body is not None and self._done is not None and not self._done.done():
            self._on_body(self._parser.get_status_code(), body)

    def on_message_complete(self) -> None:
        self._keeps_alive = self._parser.should_keep_alive()
        if self._done is not None and not self._done.done():
            self._done.set_result(self._parser.get_status_code())

    def _reset(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._has_received = self._has_length = self._in_body = self._keeps_alive = False

    def _fail(self, text: str) -> None:
        self._keeps_alive = False
        if self._done is not None and not self._done.done():
            self._done.set_exception(ConnectionFailedError(text, is_unused=not self._has_received))


@dataclass
class HttpClient:
    """Connections to one server, which later requests use again. Leaving the context closes them."""

    address: ServerAddress
    headers: Mapping[str, str]
    is_insecure: bool = False
    _idle: list[_HttpConnection] = field(default_factory=list)
    _opened: set[_HttpConnection] = field(default_factory=set)  # those that are not closed yet

    async def __aenter__(self) -> HttpClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        for connection in self._idle:
            connection.close()
        if self._opened:
            await asyncio.wait([connection.closed for connection in self._opened])

    async def request(self, method: str, path: str, body: bytes, on_body: BodyReader, headers: Mapping[str, str] | None = None) -> int:
        """Returns the status, once the whole body was given to `on_body`. Raises ConnectionFailedError."""
        own = {"host": self.address.authority, "content-type": "application/json", "content-length": str(len(body))}
        fields = {**own, **self.headers, **(headers or {})}
        head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
        data = f"{method} {self.address.prefix}{path} HTTP/1.1\r\n{head}\r\n".encode("latin-1") + body
        while True:
            connection = self._idle.pop() if self._idle else await self._connect()
            try:
                status = await connection.request(data, on_body)
            except ConnectionFailedError as error:
                if error.is_unused and connection.num_requests > 1:
                    continue  # the server had closed it while it was idle
                raise
            except asyncio.CancelledError:
                connection.close()
                raise
            if connection.is_reusable and len(self._idle) < MAX_IDLE:
                self._idle.append(connection)
            else:
                connection.close()
            return status

    async def _connect(self) -> _HttpConnection:
        context: ssl.SSLContext | None = None
        if self.address.is_tls:
            context = ssl.create_default_context()
            if self.is_insecure:
                context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                loop, address = asyncio.get_running_loop(), self.address
                if address.socket:
                    _, connection = await loop.create_unix_connection(_HttpConnection, address.socket)
                else:
                    _, connection = await loop.create_connection(_HttpConnection, address.host, address.port, ssl=context)
        except TimeoutError:
            raise ConnectionFailedError(f"{self.address.authority} does not accept connections", is_unused=True) from None
        except OSError as error:
            why = os.strerror(error.errno) if error.errno is not None and error.errno > 0 else error  # asyncio repeats the address
            raise ConnectionFailedError(f"{self.address.authority} cannot be reached: {why}", is_unused=True) from None
        self._opened.add(connection)
        connection.closed.add_done_callback(lambda _: self._opened.discard(connection))
        return connection
