"""Clients that use HTTP in ways that no friendly client does, and prompts that cost more than they seem to."""

from __future__ import annotations

import asyncio
import gc
import json
from typing import Any

import pytest
from serving.served_app import MODEL, NAME, DirectProcess, served_app
from serving.test_http_api import CHAT, COMPLETE, HELLO, left, until

from flowrt.actors.front_end_messages import StateQuery, StateReport
from flowrt.errors import TokenizerError
from flowrt.serving import http_exchange, http_server
from flowrt.serving.api_errors import OVERLOADED, ApiError
from flowrt.serving.http_server import BoundedProtocol, EarlyRefusal
from flowrt.serving.json_body import TokenIds

CHUNKED = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"


async def test_client_that_sends_requests_ahead_and_leaves_cancels_them_all() -> None:
    async with served_app() as served:
        connection = await served.connect()
        for _ in range(3):
            connection.send("POST", CHAT, HELLO | {"stream": True})
        request = await served.submitted.get()
        await connection.close()
        await left(served)
        assert [each.request_id for each in served.cancelled] == [request.id]
        assert served.submitted.empty(), "the others had not begun"


async def test_a_stream_to_a_client_of_http_1_0_has_no_chunks_and_ends_with_the_connection() -> None:
    """As a proxy that speaks 1.0 to its server, such as nginx by default."""
    body = b'{"prompt": "hello", "stream": true}'
    async with served_app() as served:
        connection = await served.connect()
        fields = b"host: localhost\r\ncontent-type: application/json\r\ncontent-length: %d" % len(body)
        connection.writer.write(b"POST /v1/completions HTTP/1.0\r\n%s\r\n\r\n%s" % (fields, body))
        served.finish(await served.submitted.get())
        head, _, events = (await connection.reader.read()).partition(b"\r\n\r\n")
        assert b"connection: close" in head
        assert b"transfer-encoding" not in head
        *chunks, end, rest = events.split(b"\n\n")
        assert (end, rest) == (b"data: [DONE]", b"")
        assert [json.loads(chunk.removeprefix(b"data: "))["object"] for chunk in chunks] == ["text_completion"] * len(chunks)
        assert chunks


async def test_a_client_that_leaves_behind_a_request_sent_ahead_is_noticed() -> None:
    async with served_app() as served:
        connection, request = await served.begin(CHAT, HELLO)
        connection.send("GET", "/version")
        await connection.writer.drain()
        await connection.close()
        await left(served)
        assert [each.request_id for each in served.cancelled] == [request.id]


async def test_requests_sent_ahead_get_their_responses_in_order() -> None:
    async with served_app() as served:
        connection = await served.connect()
        connection.send("POST", CHAT, HELLO)
        connection.send("GET", "/version")
        request = await served.submitted.get()
        served.finish(request)
        assert (await connection.response()).json()["object"] == "chat.completion"
        assert (await connection.response()).json() == {"version": "1.2.3"}


@pytest.mark.parametrize(
    ("bad", "status"),
    [
        (b"no HTTP\r\n\r\n", 400),
        (b"GET /%s HTTP/1.1\r\n\r\n" % (b"a" * http_server.MAX_HEADER_BYTES), 431),
        (CHUNKED + b"2\r\n{}\r\n0\r\nx-request-id: of-another\r\n\r\n", 400),
        (b"GET /version HTTP/1.1\r\nhost: localhost\r\n\r\n" * (http_server.MAX_AHEAD + 1), 400),
    ],
)
@pytest.mark.parametrize("streams", [False, True])
async def test_requests_before_a_bad_one_get_their_responses_first(bad: bytes, status: int, streams: bool) -> None:
    async with served_app() as served:
        connection = await served.connect()
        connection.send("POST", CHAT, HELLO | {"stream": streams})
        connection.send("GET", "/version")
        request = await served.submitted.get()
        connection.writer.write(bad)
        await until(lambda: any(each._is_refused for each in served.server._state.connections))
        served.answer(request, " 1")
        if streams:
            assert (await connection.events_after_head())[-1]["choices"][0]["finish_reason"] == "stop"
        else:
            assert (await connection.response()).json()["choices"][0]["finish_reason"] == "stop"
        assert (await connection.response()).json() == {"version": "1.2.3"}
        while (response := await connection.response()).status == 200:
            assert response.json() == {"version": "1.2.3"}, "of those that were not too many"
        assert response.status == status
        assert (response.headers["connection"], await connection.reader.read()) == ("close", b"")


async def test_part_of_a_next_request_does_not_end_a_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some clients send an empty line behind a body. It is no slow request while the response goes on."""
    num_times, on_slow_headers = 0, BoundedProtocol._on_slow_headers

    def count(protocol: BoundedProtocol) -> None:
        nonlocal num_times
        num_times += 1
        on_slow_headers(protocol)

    async with served_app() as served:
        monkeypatch.setattr(BoundedProtocol, "_on_slow_headers", count)
        connection, request = await served.begin(CHAT, HELLO | {"stream": True})
        monkeypatch.setattr(http_server, "HEADER_SECONDS", 0.001)  # the request, whose headers may be slow on a busy machine, is here
        connection.writer.write(b"\r\n")
        await until(lambda: num_times > 2)
        served.answer(request, " 1")
        assert (await connection.events_after_head())[-1]["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("body", "rest"),
    [
        (b"", b"2;x=" + b"a" * 40_000),
        (b"", b"1\r\n \r\n" * (3 * http_server.MAX_PIECES)),  # too many for one of two reads, too
        (b"2\r\n{}\r\n", b"2;x=" + b"a" * 40_000),
        (b"2\r\n{}\r\n", b"0\r\nx: " + b"a" * 40_000),
        (b"2\r\n{}\r\n", b"0\r\nx-request-id: of-another\r\n\r\n"),
    ],
)
async def test_what_is_between_the_pieces_of_a_body_is_bounded(body: bytes, rest: bytes) -> None:
    """No trailers at all: a proxy may have checked the headers only."""
    async with served_app() as served:
        connection = await served.connect()
        connection.writer.write(CHUNKED + body)
        await until(lambda: any(not each._in_headers for each in served.server._state.connections))
        await until(lambda: bool(served.app._budget.num_bytes) == bool(body))
        connection.writer.write(rest)
        response = await connection.response()
        assert (response.error[:2], response.headers["connection"]) == ((400, "invalid_value"), "close")


@pytest.mark.parametrize("is_split", [False, True])
async def test_offer_of_another_protocol_is_not_taken(is_split: bool) -> None:
    """Java's client offers HTTP/2 with its first request. Neither its body nor the next request is lost, or read as something else."""
    offer = {"connection": "Upgrade, HTTP2-Settings", "upgrade": "h2c", "http2_settings": "AAMAAABkAAQAAP__"}
    inner = b"GET /version HTTP/1.1\r\nhost: localhost\r\n\r\n"
    async with served_app() as served:
        connection = await served.connect()
        if is_split:
            connection.send("POST", CHAT, content_length=str(len(inner)), **offer)
            await until(lambda: any(not each._in_headers for each in served.server._state.connections))
            connection.writer.write(inner)
        else:
            connection.send("POST", CHAT, inner, **offer)
        for _ in range(2):
            connection.send("GET", "/health", **offer)
        assert (await connection.response()).error == (400, "invalid_value", None), "not JSON"
        assert [(await connection.response()).json() for _ in range(2)] == [{"status": "ok"}] * 2
        connection.send("POST", CHAT, HELLO, **offer)
        request = await served.submitted.get()
        served.finish(request)
        assert (await connection.response()).status == 200
        connection.writer.write(b"CONNECT localhost:80 HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert (await connection.response()).headers["connection"] == "close"


@pytest.mark.parametrize("first", ["stream", "refused early"])
async def test_number_of_requests_sent_ahead_is_bounded(first: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One read of the socket may bring ten thousand; they took a front end longer than it may be silent."""
    error = ApiError(OVERLOADED, "full")
    num_parsed, on_url = 0, BoundedProtocol.on_url

    def count(protocol: BoundedProtocol, url: bytes) -> None:
        nonlocal num_parsed
        num_parsed += 1
        on_url(protocol, url)

    async with served_app() as served:
        monkeypatch.setattr(BoundedProtocol, "on_url", count)
        connection = await served.connect()
        if first == "stream":
            connection.send("POST", CHAT, HELLO | {"stream": True})
            request = await served.submitted.get()
        else:
            monkeypatch.setattr(served.server, "_refuse_early", lambda *request: EarlyRefusal(error, {"x-request-id": "an-id"}))
            await connection.close()
            connection = await served.connect()
        connection.writer.write(b"GET / HTTP/1.1\r\ncontent-length: 0\r\n\r\n" * 1000)
        if first == "stream":
            await until(lambda: any(each._is_refused for each in served.server._state.connections))
            served.finish(request)
        text = await connection.reader.read()  # to the end of the connection
        assert text.count(b"HTTP/1.1 ") <= http_server.MAX_AHEAD + 2
        assert num_parsed <= 2 * http_server.MAX_AHEAD + 1


async def test_number_of_headers_is_bounded() -> None:
    """Thousands of short ones would take a megabyte for as long as their request."""
    async with served_app() as served:
        connection = await served.connect()
        for number, status in ((http_server.MAX_HEADERS - 1, 200), (http_server.MAX_HEADERS, 431)):
            connection.writer.write(b"GET /health HTTP/1.1\r\nhost: localhost\r\n%s\r\n" % (b"a:\r\n" * number))
            assert (await connection.response()).status == status


async def test_head_is_get_without_a_body_and_other_methods_are_named() -> None:
    async with served_app() as served:
        connection = await served.connect()
        connection.send("HEAD", "/health")
        head = await connection.head()
        assert (head.status, int(head.headers["content-length"])) == (200, len(b'{"status":"ok"}'))
        connection.send("POST", "/health")
        assert (await connection.response()).headers["allow"] == "GET, HEAD"
        connection.send("HEAD", CHAT)
        head = await connection.head()
        assert (head.status, head.headers["allow"]) == (405, "POST")


async def test_prompts_count_among_the_bodies_until_they_are_tokenized(monkeypatch: pytest.MonkeyPatch) -> None:
    may_encode = asyncio.Event()

    async def encode(process: DirectProcess, prompt: Any, **_: Any) -> list[int]:
        await may_encode.wait()
        return [5]

    monkeypatch.setattr(http_exchange, "MAX_BUFFERED_BYTES", 3_000)
    monkeypatch.setattr(DirectProcess, "encode", encode)
    async with served_app() as served:
        body = {"prompt": "a" * 2_000}
        calls = [asyncio.create_task(served.call("POST", COMPLETE, body))]
        await until(lambda: served.client.num_open)
        assert (await served.call("POST", COMPLETE, body)).error[:2] == (429, "rate_limit_exceeded")
        may_encode.set()
        requests = [await served.submitted.get()]
        calls.append(asyncio.create_task(served.call("POST", COMPLETE, body)))
        requests.append(await served.submitted.get())
        for request in requests:
            served.finish(request)
        assert [(await call).status for call in calls] == [200, 200]
        assert served.app._budget.num_bytes == 0


async def test_padding_of_a_prompt_is_not_kept_while_it_is_answered() -> None:
    async with served_app() as served:
        connection, request = await served.begin(COMPLETE, b'{"prompt": [1,' + b" " * 100_000 + b"2]}")
        assert request.prompt_token_ids == (1, 2)
        assert not [each for each in gc.get_objects() if isinstance(each, TokenIds)]
        served.finish(request)
        assert (await connection.response()).status == 200


async def test_errors_of_the_tokenizer_show_no_path_and_no_address(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    error = TokenizerError(f"the chat template of {MODEL} failed: <jinja2.Cycler object at 0x7f12> has no name")

    async def fail(process: DirectProcess, prompt: Any, **_: Any) -> list[int]:
        raise error

    monkeypatch.setattr(DirectProcess, "encode", fail)
    async with served_app() as served:
        response = await served.call("POST", CHAT, HELLO)
        assert response.error == (400, "invalid_value", "messages")
        assert response.json()["error"]["message"] == "the chat template of the model failed: <jinja2.Cycler object> has no name"
        error = TokenizerError(f"{MODEL} cannot be read", is_unavailable=True)
        response = await served.call("POST", CHAT, HELLO)
        assert response.error == (503, "service_unavailable", None)
        assert "cannot be read" not in response.body.decode()
        assert "cannot be read" in caplog.text
        await left(served)


async def test_state_that_cannot_be_read_once_can_be_read_again(caplog: pytest.LogCaptureFixture) -> None:
    async with served_app() as served:
        report_state = served.front_ends._report_state

        async def fail(query: StateQuery) -> StateReport:
            raise KeyError("an edge that has just gone")

        served.front_ends._report_state = fail
        for _ in range(2):
            assert (await served.call("GET", "/metrics")).error[:2] == (503, "service_unavailable")
        assert "an edge that has just gone" in caplog.text
        served.front_ends._report_state = report_state
        assert (await served.call("GET", "/metrics")).status == 200


async def test_query_of_a_lost_front_end_gets_no_response() -> None:
    """The next incarnation numbers its queries from 0, too."""
    async with served_app() as served:
        may_report, posted = asyncio.Event(), list[Any]()

        async def report_state(query: StateQuery) -> StateReport:
            await may_report.wait()
            return StateReport(query.number, True, query.topic)

        front_ends = served.front_ends
        front_ends._report_state, front_ends._post = report_state, lambda _, control: posted.append(control)
        front_ends.on_control(NAME, StateQuery(0, "metrics"))
        await asyncio.sleep(0)
        front_ends.lose(NAME)
        front_ends.on_control(NAME, StateQuery(0, "health"))
        may_report.set()
        await until(lambda: len(front_ends._tasks) == 1)  # what sends outputs
        assert posted == [StateReport(0, True, "health")]


async def test_texts_to_tokenize_wait_for_each_other_and_no_request_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of them at a time is before the prompts of requests. A client that leaves takes its text along."""
    may_encode, texts = asyncio.Event(), list[Any]()

    async def encode(process: DirectProcess, prompt: Any, **_: Any) -> list[int]:
        texts.append(prompt)
        await may_encode.wait()
        return [5]

    monkeypatch.setattr(DirectProcess, "encode", encode)
    async with served_app() as served:
        connections = [await served.connect() for _ in range(3)]
        for at, connection in enumerate(connections):
            connection.send("POST", "/tokenize", {"prompt": f"text {at}"})
            await until(lambda at=at: served.app._budget.num_bytes == (at + 1) * len('{"prompt": "text 0"}'))
        call = asyncio.create_task(served.call("POST", COMPLETE, {"prompt": "a request"}))
        await until(lambda: len(texts) == 2)
        assert texts == ["text 0", "a request"]
        await connections[1].close()
        await until(lambda: served.server.num_connections == 3)
        may_encode.set()
        served.finish(await served.submitted.get())
        assert (await call).status == 200
        for connection in (connections[0], connections[2]):
            assert (await connection.response()).json()["tokens"] == [5]
            await connection.close()
        assert texts == ["text 0", "a request", "text 2"]
