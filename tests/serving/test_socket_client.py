"""The client of a graph's own socket, against responses that are written by hand."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from flowrt.errors import NotRunningError
from flowrt.serving.run_folder import FoundGraph
from flowrt.serving.socket_client import SocketClient


@asynccontextmanager
async def client_of(body: bytes) -> AsyncIterator[SocketClient]:
    """A client of a graph that answers with this body, in one chunk."""

    async def respond(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n" % (len(body), body))
        await writer.drain()
        writer.close()

    with tempfile.TemporaryDirectory() as folder:
        found = FoundGraph("g", Path(folder), None, True)
        async with await asyncio.start_unix_server(respond, found.socket):
            yield SocketClient(found)


async def test_events_may_have_ids() -> None:
    """Those of a graph with a request log do."""
    for body in (b'data: {"a": 1}\n\ndata: [DONE]\n\n', b'id: 3.1\ndata: {"a": 1}\n\ndata: [DONE]\n\n'):
        async with client_of(body) as client, client.open("POST", "/v1/completions") as response:
            assert [event async for event in response.events()] == [{"a": 1}]


async def test_what_is_no_event_ends_the_call() -> None:
    async with client_of(b"data: {\n\n") as client:
        with pytest.raises(NotRunningError, match="g has closed the connection"):
            async with client.open("POST", "/v1/completions") as response:
                _ = [event async for event in response.events()]


async def test_an_error_of_the_caller_is_its_own() -> None:
    async with client_of(b"data: [DONE]\n\n") as client:
        with pytest.raises(ValueError, match="mine"):
            async with client.open("POST", "/v1/completions"):
                raise ValueError("mine")
