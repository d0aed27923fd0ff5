"""One HTTP request and its response: a bounded body in, a whole body or a stream of events out, each with a time limit."""

from __future__ import annotations

import asyncio
import re
from codecs import BOM_UTF8
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any

from uvicorn.protocols.http.flow_control import FlowControl

from flowrt.serving.api_errors import LARGE_BODY, OVERLOADED, SLOW_REQUEST, WRONG_TYPE, ApiError
from flowrt.serving.api_response import DONE
from flowrt.serving.listener import WRITE_SECONDS

MAX_BODY_BYTES = 16 << 20
MAX_BUFFERED_BYTES = 64 << 20  # of all bodies that a front end holds at once
BODY_SECONDS = 30.0  # for the whole body
REQUEST_ID = re.compile(rb"[A-Za-z0-9._-]{1,128}")

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


def without_slash(path: bytes) -> bytes:
    """The path without a slash at its end."""
    return path[:-1] if len(path) > 1 and path.endswith(b"/") else path


def given_id(headers: Mapping[bytes, bytes]) -> str | None:
    """The request id that the client has given; None without one that is valid."""
    given = headers.get(b"x-request-id", b"")
    return given.decode() if REQUEST_ID.fullmatch(given) else None


class ClientLeftError(Exception):
    """The client has closed its connection, or has read nothing for WRITE_SECONDS."""


class BodyBudget:
    """The bytes of bodies that a front end holds."""

    def __init__(self) -> None:
        self.num_bytes = 0

    def add(self, num_bytes: int) -> None:
        if num_bytes > 0 and self.num_bytes + num_bytes > MAX_BUFFERED_BYTES:
            raise ApiError(OVERLOADED, "too many large requests at once")
        self.num_bytes += num_bytes


def is_large(headers: Mapping[bytes, bytes]) -> bool:
    """Whether the headers announce a body that is too long."""
    length = headers.get(b"content-length", b"")
    return length.isdigit() and int(length) > MAX_BODY_BYTES


def large_body() -> ApiError:
    return ApiError(LARGE_BODY, f"the body is longer than {MAX_BODY_BYTES >> 20} MiB")


class HttpExchange:
    """`new_id` draws a request id for a client that sends none."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, budget: BodyBudget, new_id: Callable[[], str]) -> None:
        self._receive, self._send, self._budget = receive, send, budget
        self._abort: Callable[[], None] = scope["state"]["abort"]
        self._flow: FlowControl = scope["state"]["flow"]
        self._has_chunks: bool = scope["http_version"] != "1.0"
        self._leave_out_chunks: Callable[[], None] = scope["state"]["leave_out_chunks"]
        self.is_admin: bool = scope["state"]["is_admin"]
        self.headers: dict[bytes, bytes] = dict(scope["headers"])
        self.path = without_slash(scope.get("raw_path") or scope["path"].encode())
        self.method: str = scope["method"]
        self.query: bytes = scope.get("query_string", b"")
        given = given_id(self.headers)
        self.is_named, self.id = given is not None, given or new_id()  # is_named: the client has given the id
        self.nonce = new_id() if self.is_named else ""  # another request may have this id
        self.cors_headers: dict[str, str] = {}  # of every response
        self.has_begun = False  # the status has been sent
        self.error_events: Callable[[ApiError], bytes] = lambda error: b"data: " + error.body + b"\n\n"  # that end a stream
        self._num_body_bytes = 0  # in the budget

    async def read_body(self) -> bytes:
        """The body of a JSON request, which counts in the budget until `release_body`. Raises ApiError; ClientLeftError when the client
        leaves."""
        kind = self.headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
        if kind != b"application/json":  # a page of another origin can send other types without asking
            raise ApiError(WRONG_TYPE, "send the header Content-Type: application/json")
        if self.headers.get(b"content-encoding", b"identity").strip().lower() not in (b"", b"identity"):
            raise ApiError(WRONG_TYPE, "send the body as it is, without the header Content-Encoding; it may not be compressed")
        body = bytearray()
        try:
            async with asyncio.timeout(BODY_SECONDS):
                while True:
                    message = await self._receive()
                    if message["type"] == "http.disconnect":
                        raise ClientLeftError
                    piece = message.get("body", b"")
                    if len(body) + len(piece) > MAX_BODY_BYTES:
                        raise large_body()
                    self._budget.add(len(piece))
                    self._num_body_bytes += len(piece)
                    body += piece
                    if not message.get("more_body", False):
                        return bytes(body.removeprefix(BOM_UTF8))
        except TimeoutError:
            raise ApiError(SLOW_REQUEST, f"the body did not arrive within {BODY_SECONDS:g} s") from None

    def release_body(self) -> None:
        """Nothing keeps the body any more. Idempotent."""
        self._budget.add(-self._num_body_bytes)
        self._num_body_bytes = 0

    async def wait_left(self) -> None:
        """Wait until the client has left. Raises ClientLeftError."""
        while (await self._receive())["type"] != "http.disconnect":
            pass
        raise ClientLeftError

    async def respond(self, status: int, body: bytes, kind: str = "application/json", **headers: str) -> None:
        """Send a whole response."""
        await self._begin(status, kind, {"content-length": str(len(body)), **headers})
        await self._write(body, more=False)

    async def respond_error(self, error: ApiError) -> None:
        """Send an error: as the response, or as the last event of a stream that has begun."""
        if self.has_begun:
            await self.end_events(self.error_events(error))
            return
        headers = {} if error.kind.retry_seconds is None else {"retry-after": str(error.kind.retry_seconds)}
        if error.kind.status == 401:
            headers["www-authenticate"] = "Bearer"
        if error.allow:
            headers["allow"] = error.allow
        if error.kind in (LARGE_BODY, SLOW_REQUEST, WRONG_TYPE):
            headers["connection"] = "close"  # the rest of the body is not read
        await self.respond(error.kind.status, error.body, **headers)

    async def begin_events(self) -> None:
        """A client of HTTP/1.0, as many proxies are, reads no chunks: its stream ends with the connection."""
        if not self._has_chunks:
            self._leave_out_chunks()
        await self._begin(200, "text/event-stream; charset=utf-8", {"cache-control": "no-cache", "x-accel-buffering": "no"})

    async def send_events(self, events: bytes) -> None:
        """Waits while the client reads slowly."""
        await self._write(events, more=True)

    async def end_events(self, events: bytes) -> None:
        await self._write(events + DONE, more=False)

    async def _begin(self, status: int, kind: str, headers: dict[str, str]) -> None:
        self.has_begun = True
        fields = {"content-type": kind, "x-request-id": self.id, "x-content-type-options": "nosniff", **self.cors_headers, **headers}
        listed = [(name.encode(), value.encode()) for name, value in fields.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": listed})

    async def _write(self, body: bytes, more: bool) -> None:
        message = {"type": "http.response.body", "body": body, "more_body": more}
        if not self._flow.write_paused:  # it does not wait
            await self._send(message)
            return
        try:
            async with asyncio.timeout(WRITE_SECONDS):
                await self._send(message)
        except TimeoutError:
            self._abort()
            raise ClientLeftError from None
