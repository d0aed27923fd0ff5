"""A client of a graph's own socket: HTTP/1.1 with one connection per request, responses whole or as a stream of events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec

from flowrt.errors import NotRunningError
from flowrt.serving.run_folder import FoundGraph

MAX_LINE_BYTES = 16 << 20  # of one event
MAX_BODY_BYTES = 64 << 20
RESPONSE_SECONDS = 5.0  # of the calls that do not generate
_END = b"[DONE]"


class SocketResponse:
    """A response whose head has come. Raises NotRunningError when the connection ends early."""

    def __init__(self, status: int, headers: dict[str, str], reader: asyncio.StreamReader) -> None:
        self.status, self._headers, self._reader = status, headers, reader

    async def body(self) -> bytes:
        length = _number(self._headers.get("content-length", "0"))
        if length > MAX_BODY_BYTES:
            raise NotRunningError(f"the graph sends a response of {length} bytes, which is too long")
        return await self._reader.readexactly(length)

    async def events(self) -> AsyncGenerator[dict[str, Any], None]:
        """The events of a stream, up to its end."""
        rest = b""
        while chunk := await self._chunk():
            *events, rest = (rest + chunk).split(b"\n\n")
            for event in events:  # those of a graph with a request log have an id, too
                data = next((line.removeprefix(b"data: ") for line in event.split(b"\n") if line.startswith(b"data: ")), _END)
                if data == _END:
                    return
                yield _decoded(data)

    async def _chunk(self) -> bytes:
        """The next chunk; b"" after the last one."""
        length = _number(await self._reader.readline() or b"0", 16)
        if length > MAX_BODY_BYTES:
            raise NotRunningError("the graph sends a chunk that is too long")
        data = await self._reader.readexactly(length + 2)
        return data[:-2]


class SocketClient:
    """Calls a graph that is up. Raises NotRunningError when it does not respond."""

    def __init__(self, graph: FoundGraph) -> None:
        self.name, self._socket = graph.name, graph.socket

    async def call(self, method: str, path: str) -> Any:
        """The value of a JSON response."""
        try:
            async with asyncio.timeout(RESPONSE_SECONDS), self.open(method, path) as response:
                value = _decoded(await response.body())
                if response.status != 200:
                    raise NotRunningError(f"{self.name}: {_error_of(value)}")
                return value
        except TimeoutError:
            raise NotRunningError(f"{self.name} does not respond; flowrt logs {self.name} may say why") from None

    @asynccontextmanager
    async def open(self, method: str, path: str, body: Any = None) -> AsyncIterator[SocketResponse]:
        try:
            reader, writer = await asyncio.open_unix_connection(self._socket, limit=MAX_LINE_BYTES)
        except OSError:
            raise NotRunningError(f"{self.name} does not respond; flowrt ps shows its state") from None
        try:
            writer.write(_request(method, path, b"" if body is None else msgspec.json.encode(body)))
            yield await _read_head(reader)
        except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError) as error:
            raise NotRunningError(f"{self.name} has closed the connection; flowrt logs {self.name} may say why") from error
        finally:
            writer.close()


def _request(method: str, path: str, body: bytes) -> bytes:
    fields = f"host: localhost\r\nconnection: close\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
    return f"{method} {path} HTTP/1.1\r\n{fields}\r\n\r\n".encode() + body


async def _read_head(reader: asyncio.StreamReader) -> SocketResponse:
    first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines if line)}
    return SocketResponse(_number(first.partition(" ")[2].partition(" ")[0]), headers, reader)


def _number(text: str | bytes, base: int = 10) -> int:
    try:
        return int(text, base)
    except ValueError:
        raise ConnectionError("the response is not HTTP") from None


def _decoded(data: bytes) -> Any:
    try:
        return msgspec.json.decode(data)
    except msgspec.DecodeError:
        raise ConnectionError("the response is not JSON") from None


def _error_of(value: Any) -> str:
    return str(value["error"]["message"]) if isinstance(value, dict) and "error" in value else "it is not available"


def new_client(found: FoundGraph) -> SocketClient:
    """Raises NotRunningError for a graph that is dead or not ready."""
    if not found.is_alive:
        raise NotRunningError(f"{found.name} is dead; flowrt up starts it again, flowrt logs {found.name} may say why it died")
    if found.description is None or not found.description.is_ready:
        raise NotRunningError(f"{found.name} is still starting; flowrt logs {found.name} shows its progress")
    return SocketClient(found)
