"""While the gateway is full, a front end refuses requests by their headers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from serving.served_app import ServedApp, served_app
from serving.test_http_api import until

from flowrt.actors.control import Control, Request
from flowrt.actors.front_end_messages import Outputs, RequestOutput, Reserve, Reserved
from flowrt.actors.outputs import EndEvent
from flowrt.sampling_params import SamplingParams
from flowrt.serving import gateway_client, http_server
from flowrt.serving.api_errors import ApiError
from flowrt.serving.gateway_client import FULL_SECONDS, GatewayClient

COMPLETE = "/v1/completions"
BODY = {"prompt": [5]}
NOT_JSON = b"{" * 5  # a body that is read is refused with 400


@asynccontextmanager
async def full_server(monkeypatch: pytest.MonkeyPatch, **options: Any) -> AsyncIterator[tuple[ServedApp, Request]]:
    """A server that has its one request, and stays full until that ends."""
    monkeypatch.setattr(gateway_client, "FULL_SECONDS", 1e9)
    async with served_app(max_requests=1, **options) as served:
        headers = {"authorization": f"Bearer {options['api_key']}"} if "api_key" in options else {}
        connection, request = await served.begin(COMPLETE, BODY, **headers)
        try:
            yield served, request
        finally:
            if request.id in served.gateway._active:
                served.finish(request)
            assert (await connection.response()).status == 200


async def test_body_of_a_refused_request_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    async with full_server(monkeypatch) as (served, _):
        response = await served.call("POST", COMPLETE, NOT_JSON, x_request_id="job-1")
        assert response.error == (429, "rate_limit_exceeded", None)
        assert (response.headers["retry-after"], response.headers["x-request-id"]) == ("1", "job-1")
        assert "limit 1" in response.json()["error"]["message"]
        assert len((await served.call("POST", COMPLETE, NOT_JSON)).headers["x-request-id"]) > 10, "a new one"


async def test_connection_goes_on_after_a_refusal_and_is_served_once_there_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    async with full_server(monkeypatch) as (served, request):
        connection = await served.connect()
        for _ in range(3):
            connection.send("POST", COMPLETE, BODY)
            assert (await connection.response()).status == 429
        connection.send("POST", COMPLETE, NOT_JSON)
        connection.send("POST", COMPLETE, NOT_JSON)  # ahead of the response to the one before
        assert [(await connection.response()).status for _ in range(2)] == [429, 429]
        connection.send("GET", "/ready")
        assert (await connection.response()).status == 200
        served.finish(request)
        await until(lambda: not served.client.is_full)
        connection.send("POST", COMPLETE, BODY)
        served.finish(await served.submitted.get())
        assert (await connection.response()).status == 200


@pytest.mark.parametrize("headers", [{"connection": "close"}, {"content_length": "70000", "connection": "close"}])
async def test_connection_ends_where_the_client_wants_it(headers: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A body that is long takes the usual way, on which it is read and its request refused before it is tokenized."""
    async with full_server(monkeypatch) as (served, _):
        connection = await served.connect()
        connection.send(
            "POST", COMPLETE, b'{"prompt": "' + b"a" * (70_000 - 14) + b'"}' if "content_length" in headers else BODY, **headers
        )
        response = await connection.response()
        assert (response.status, response.headers["connection"]) == (429, "close")
        assert await connection.reader.read() == b""


async def test_chunked_body_and_one_that_waits_for_continue_take_the_usual_way(monkeypatch: pytest.MonkeyPatch) -> None:
    async with full_server(monkeypatch) as (served, _):
        connection = await served.connect()
        head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        connection.writer.write(head + b'transfer-encoding: chunked\r\n\r\ne\r\n{"prompt":[5]}\r\n0\r\n\r\n')
        assert (await connection.response()).status == 429
        connection.send("POST", COMPLETE, b"", content_length="14", expect="100-continue")
        assert (await connection.head()).status == 100
        connection.writer.write(b'{"prompt":[5]}')
        assert (await connection.response()).status == 429


async def test_client_that_does_not_read_gets_no_early_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their responses would fill the memory of the front end."""
    async with full_server(monkeypatch) as (served, _):
        connection = await served.connect()
        connection.send("GET", "/version")
        await connection.response()
        (protocol,) = [each for each in served.server._state.connections if each.cycle.scope["path"] == "/version"]
        protocol.pause_writing()
        connection.send("POST", COMPLETE, NOT_JSON)
        response = asyncio.create_task(connection.response())
        await until(lambda: response.done() or protocol.cycle.scope["path"] == COMPLETE)
        protocol.resume_writing()
        assert (await response).status == 400
        connection.send("POST", COMPLETE, NOT_JSON)
        assert (await connection.response()).status == 429


async def test_request_right_behind_a_refused_one_is_not_taken_for_an_idle_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    async with full_server(monkeypatch) as (served, _):
        connection = await served.connect()
        connection.send("POST", COMPLETE, NOT_JSON)
        connection.send("POST", COMPLETE, b'{"prompt": "', content_length="70000")
        assert (await connection.response()).status == 429
        await until(lambda: any(each.cycle and each.cycle.more_body for each in served.server._state.connections))
        assert all(each.timeout_keep_alive_task is None for each in served.server._state.connections)
        connection.writer.write(b"a" * (70_000 - 14) + b'"}')
        assert (await connection.response()).status == 429


async def test_key_and_host_are_checked_before_room(monkeypatch: pytest.MonkeyPatch) -> None:
    async with full_server(monkeypatch, api_key="secret") as (served, _):
        assert (await served.call("POST", COMPLETE, BODY, authorization="Bearer wrong")).status == 401
        assert (await served.call("POST", COMPLETE, BODY, authorization="Bearer secret")).status == 429
        assert (await served.call("POST", "/tokenize", {"prompt": "a"}, authorization="Bearer secret")).status == 200, "needs no room"
    async with full_server(monkeypatch) as (served, _):
        assert (await served.call("POST", COMPLETE, BODY, host="evil.example")).status == 403


async def test_client_that_does_not_send_its_body_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "HEADER_SECONDS", 0.05)
    async with full_server(monkeypatch) as (served, _):
        connection = await served.connect()
        connection.send("POST", COMPLETE, b"{", content_length="100")
        response = await connection.response()
        assert (response.status, response.headers["connection"]) == (429, "close")
        assert await connection.reader.read() == b""


async def test_each_refusal_is_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async with full_server(monkeypatch) as (served, request):
        for _ in range(5):
            assert (await served.call("POST", COMPLETE, BODY)).status == 429
        assert served.metrics.refused["overloaded"] == 0, "no message has gone to the gateway"
        assert (await served.call("GET", "/metrics")).status == 200
        assert served.metrics.refused["overloaded"] == 5
        assert (await served.call("POST", COMPLETE, BODY)).status == 429
        served.finish(request)
        await until(lambda: not served.client.is_full)
        connection, request = await served.begin(COMPLETE, BODY)
        served.finish(request)
        await connection.response()
        assert served.metrics.refused["overloaded"] == 6


async def test_next_request_goes_to_the_gateway_after_a_while_and_when_one_has_ended() -> None:
    """A request of another front end may have ended."""
    now, sent = 0.0, list[Control]()
    client = GatewayClient(sent.append, lambda: now)

    async def reserve(overload: str) -> int:
        with client.inbox() as inbox:
            reserving = asyncio.ensure_future(client.reserve(SamplingParams(), 1, inbox, 0))
            await asyncio.sleep(0)
            sent_last = sent[-1]
            assert isinstance(sent_last, Reserve)
            client.on_control(Reserved(sent_last.number, None, overload))
            return (await reserving).number

    number = await reserve("full")
    assert [str(client.refuse_now()) for _ in range(2)] == ["full"] * 2
    with client.inbox() as inbox, pytest.raises(ApiError, match="full"):
        await client.reserve(SamplingParams(), 1, inbox, 0)
    assert len(sent) == 1
    now += FULL_SECONDS
    assert client.refuse_now() is None
    await reserve("full")
    assert isinstance(sent[-1], Reserve)
    assert sent[-1].num_refused == 3
    assert client.refuse_now() is not None
    client.on_control(Outputs((RequestOutput(number, (EndEvent(0, "stop"),)),)))
    assert client.refuse_now() is None
    await reserve("")
    assert client.refuse_now() is None
