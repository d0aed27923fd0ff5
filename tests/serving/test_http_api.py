"""The HTTP API: responses, streams, errors, overload, clients that leave or read slowly. A test plays the attention group."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

import pytest
from serving.served_app import NAME, Connection, ServedApp, served_app

from flowrt.actors.front_end_messages import RequestOutput
from flowrt.actors.outputs import TokenEvent
from flowrt.serving import connection_table, gateway_client, http_exchange, http_server
from flowrt.serving.api_errors import SLOW_REQUEST, UNAVAILABLE, ApiError
from flowrt.serving.gateway_client import RESPONSE_SECONDS, GatewayClient

CHAT = "/v1/chat/completions"
COMPLETE = "/v1/completions"
HELLO = {"messages": [{"role": "user", "content": "hello"}]}


async def completed(served: ServedApp, path: str, body: dict[str, Any], text: str = " 12 and 3", reason: str = "stop") -> Any:
    """The response to a request whose one choice gets this text."""
    connection, request = await served.begin(path, body)
    served.emit(request, text)
    served.finish(request, reason)
    response = await connection.response()
    assert response.status == 200, response.body
    return response.json()


async def test_completion_has_text_reason_and_usage() -> None:
    async with served_app() as served:
        body = await completed(served, COMPLETE, {"prompt": "What is 1 + 2?", "model": "tiny", "max_tokens": 100}, reason="length")
        num_prompt, num_tokens = len(served.tokenizer.encode("What is 1 + 2?")), len(served.tokenizer.encode(" 12 and 3"))
        assert body["object"] == "text_completion"
        assert body["choices"] == [{"index": 0, "text": " 12 and 3", "logprobs": None, "finish_reason": "length"}]
        usage = {"prompt_tokens": num_prompt, "completion_tokens": num_tokens, "total_tokens": num_prompt + num_tokens}
        assert body["usage"] == usage | {"prompt_tokens_details": {"cached_tokens": 0}}
        assert served.requests.gateway.num_unfinished == served.client.num_open == 0


async def test_chat_stream_sends_each_token_then_the_reason_then_usage() -> None:
    async with served_app() as served:
        connection, request = await served.begin(
            CHAT, HELLO | {"stream": True, "stream_options": {"include_usage": True}}, x_request_id="mine-1"
        )
        response = await connection.head()
        assert (response.headers["x-request-id"], response.headers["content-type"]) == ("mine-1", "text/event-stream; charset=utf-8")
        assert '"role":"assistant"' in await connection.chunk()
        num = served.emit(request, " 12")
        shown = json.loads((await connection.chunk()).split("\n\n")[0].removeprefix("data: "))
        assert shown["choices"][0]["delta"] == {"content": " "}, "before the next tokens are computed"
        num = served.emit(request, " and 3", num)
        served.finish(request)
        *tokens, last, usage = await connection.events()
        assert all(each["choices"][0]["delta"]["content"] for each in tokens)
        assert last["choices"] == [{"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop"}]
        assert (usage["choices"], usage["usage"]["completion_tokens"]) == ([], num)
        assert {each["usage"] for each in (*tokens, last)} == {None}
        assert {each["id"] for each in (*tokens, last, usage)} == {"chatcmpl-mine-1"}


@pytest.mark.parametrize("path", [CHAT, COMPLETE])
async def test_each_chunk_has_the_usage_so_far_if_requested(path: str) -> None:
    async with served_app() as served:
        options = {"include_usage": True, "continuous_usage_stats": True}
        connection = await served.connect()
        body = HELLO if path == CHAT else {"prompt": "hello"}
        connection.send("POST", path, body | {"stream": True, "stream_options": options, "n": 2})
        request = await served.submitted.get()
        for choice in range(2):
            served.answer(request, " 1 and 2", choice=choice)
        *chunks, last = await connection.events_after_head()
        await connection.close()
        num_prompt, num_output = len(request.prompt_token_ids), len(served.tokenizer.encode(" 1 and 2"))
        assert {each["usage"]["prompt_tokens"] for each in (*chunks, last)} == {num_prompt}
        for choice in range(2):
            counts = [each["usage"]["completion_tokens"] for each in chunks if each["choices"][0]["index"] == choice]
            assert (counts[0], counts[-1]) == (0 if path == CHAT else 1, num_output)
            assert counts == sorted(counts)
        assert last["usage"]["completion_tokens"] == 2 * num_output


async def test_stop_string_ends_its_choice_and_is_not_shown() -> None:
    async with served_app() as served:
        connection, request = await served.begin(COMPLETE, {"prompt": "a", "stop": ["and"], "n": 2, "max_tokens": 50})
        assert request.params.stop == (), "the front end looks for it"
        served.emit(request, " 12 and 3 and 4", choice=1)
        served.answer(request, " 5", "length", choice=0)
        body = (await connection.response()).json()
        assert [(each["text"], each["finish_reason"]) for each in body["choices"]] == [(" 5", "length"), (" 12 ", "stop")]
        assert [each.choice for each in served.cancelled] == [1]
        assert body["usage"]["completion_tokens"] < len(served.tokenizer.encode(" 5 12 and 3 and 4"))
        assert served.requests.gateway.num_unfinished == served.client.num_open == 0


async def test_prompts_of_one_request_keep_their_order_and_are_repeated_with_echo() -> None:
    async with served_app() as served:
        prompts = ["one", served.tokenizer.encode(" two")]
        call = asyncio.create_task(served.call("POST", COMPLETE, {"prompt": prompts, "echo": True}))
        first, second = await served.submitted.get(), await served.submitted.get()
        for request, text in ((second, " 2"), (first, " 1")):
            served.answer(request, text)
        assert [each["text"] for each in (await call).json()["choices"]] == ["one 1", " two 2"]


async def test_echo_with_logprobs_has_those_of_the_prompt() -> None:
    async with served_app() as served:
        prompt = served.tokenizer.encode("one and two")
        call = asyncio.create_task(served.call("POST", COMPLETE, {"prompt": ["one and two", prompt], "n": 2, "echo": True, "logprobs": 1}))
        requests = [await served.submitted.get() for _ in range(2)]
        for request in requests:
            served.emit(request, " 1", choice=1)
            served.emit(request, " 1")
            for choice in range(2):
                served.finish(request, choice=choice)
        body = (await call).json()
        texts = [served.tokenizer.token_text(token_id) for token_id in (*prompt, *served.tokenizer.encode(" 1"))]
        for choice in body["choices"]:
            found = choice["logprobs"]
            assert (choice["text"], found["tokens"]) == ("one and two 1", texts)
            assert found["token_logprobs"] == [None, *(-float(at) for at in range(1, len(prompt))), *[-0.5] * (len(texts) - len(prompt))]
            assert found["top_logprobs"][:2] == [None, {texts[1]: -1.0, served.tokenizer.token_text(0): -1.0}]
            assert [choice["text"][at:][: len(text)] for at, text in zip(found["text_offset"], texts, strict=True)] == texts


async def test_stream_with_echo_and_logprobs_begins_with_the_prompt() -> None:
    async with served_app() as served:
        connection, request = await served.begin(COMPLETE, {"prompt": "one and two", "n": 2, "echo": True, "logprobs": 0, "stream": True})
        served.emit(request, " 2", choice=1)
        served.emit(request, " 1")
        for choice in range(2):
            served.finish(request, choice=choice)
        events = [each["choices"][0] for each in await connection.events_after_head()]
        await connection.close()
        first = [each["logprobs"]["token_logprobs"] for each in events[:2]]
        assert first == [[None, *(-float(at) for at in range(1, len(request.prompt_token_ids)))]] * 2
        assert ["".join(each["text"] for each in events if each["index"] == choice) for choice in (0, 1)] == [
            "one and two 1",
            "one and two 2",
        ]


@pytest.mark.parametrize("is_stream", [False, True])
async def test_max_tokens_0_gives_the_prompt_alone(is_stream: bool) -> None:
    async with served_app() as served:
        body = {"prompt": "one and two", "max_tokens": 0, "echo": True, "logprobs": 1, "stream": is_stream}
        connection, request = await served.begin(COMPLETE, body)
        assert request.max_tokens == 1
        served.answer(request, "1", "stop")
        events = await connection.events_after_head() if is_stream else [(await connection.response()).json()]
        await connection.close()
        choices = [each["choices"][0] for each in events]
        assert ("".join(each["text"] for each in choices), choices[-1]["finish_reason"]) == ("one and two", "length")
        assert len(choices[0]["logprobs"]["tokens"]) == len(request.prompt_token_ids)
        if not is_stream:
            assert events[0]["usage"]["completion_tokens"] == 0


async def test_offsets_of_a_prompt_that_spells_special_tokens() -> None:
    prompt = "<|endoftext|>a<|endoftext|>b"
    async with served_app() as served:
        connection, request = await served.begin(COMPLETE, {"prompt": prompt, "echo": True, "logprobs": 0, "max_tokens": 9})
        served.answer(request, " 1")
        choice = (await connection.response()).json()["choices"][0]
    assert choice["text"] == f"{prompt} 1"
    assert choice["logprobs"]["text_offset"][:5] == [0, 13, 14, 27, 28]


async def test_tokens_become_texts_and_back() -> None:
    async with served_app() as served:
        found = (await served.call("POST", "/tokenize", {"prompt": "12 and 3"})).json()
        assert found == {"tokens": served.tokenizer.encode("12 and 3"), "count": len(found["tokens"]), "max_model_len": 512}
        assert (await served.call("POST", "/detokenize", {"tokens": found["tokens"]})).json() == {"prompt": "12 and 3"}
        special = [0, *found["tokens"]]
        assert (await served.call("POST", "/detokenize", {"tokens": special})).json() == {"prompt": served.tokenizer.decode(special, False)}
        more = {"chat_template_kwargs": {"enable_thinking": False}, "add_generation_prompt": False, "tools": [], "add_special_tokens": True}
        for body in (HELLO, HELLO | more):
            assert (await served.call("POST", "/tokenize", body)).json()["tokens"] == served.tokenizer.encode("hello")
        long = {"prompt": "a " * 600}  # counted also where the model takes fewer
        assert (await served.call("POST", "/tokenize", long)).json()["count"] > 512
        assert (await served.call("POST", "/detokenize", {"tokens": [1] * 513})).status == 200
        for tokens in ([768], [1] * ((1 << 17) + 1), ["a"], 5):
            assert (await served.call("POST", "/detokenize", {"tokens": tokens})).error == (400, "invalid_value", "tokens")
        for body in ({}, HELLO | {"prompt": "a"}, {"prompt": [1]}, {"prompt": ["a", "b"]}):
            assert (await served.call("POST", "/tokenize", body)).error == (400, "invalid_value", "prompt")


async def test_state_models_and_version() -> None:
    async with served_app() as served:
        for path in ("/health", "/ready"):
            assert (await served.call("GET", path)).json() == {"status": "ok"}
        assert (await served.call("GET", "/version")).json() == {"version": "1.2.3"}
        (model,) = (await served.call("GET", "/v1/models")).json()["data"]
        assert (model["id"], model["max_model_len"], model["default_sampling_params"]) == ("tiny", 512, {})
        served.is_ok = False
        response = await served.call("GET", "/health")
        assert (response.status, response.json()) == (503, {"status": "unavailable", "problems": "no attention group is left"})


@pytest.mark.parametrize(
    ("path", "body", "expected"),
    [
        (COMPLETE, {"prompt": "a", "max_tokens": 129}, 128),
        (COMPLETE, {"prompt": "a", "max_tokens": None, "min_tokens": 200}, 128),
        (COMPLETE, {"prompt": [1] * 500}, 12),
        (COMPLETE, {"prompt": [1] * 512, "max_tokens": 4096}, 1),
        (CHAT, HELLO | {"max_completion_tokens": 4096}, 128),
        (CHAT, HELLO | {"max_tokens": 4096}, 128),
        (CHAT, HELLO, 128),
    ],
)
async def test_more_tokens_than_fit_are_shortened(path: str, body: Any, expected: int) -> None:
    async with served_app() as served:
        connection, request = await served.begin(path, body)
        assert request.max_tokens == expected
        served.answer(request, "1", "length")
        response = await connection.response()
        assert (response.status, response.json()["choices"][0]["finish_reason"]) == (200, "length")


async def test_request_that_cannot_be_served_leaves_nothing() -> None:
    async with served_app() as served:
        for body, code, param in (
            ({"prompt": "a", "min_tokens": 17}, "invalid_value", "min_tokens"),
            ({"prompt": "a", "stop_token_ids": [768]}, "invalid_value", "stop_token_ids"),
            ({"prompt": "a", "logit_bias": {"768": 1}}, "invalid_value", "logit_bias"),
            ({"prompt": [1, 768]}, "invalid_value", "prompt"),
            ({"prompt": [1, "a"]}, "invalid_value", "prompt"),
            ({"prompt": ""}, "invalid_value", "prompt"),
            ({"prompt": ["a", ""]}, "invalid_value", "prompt[1]"),
            ({"prompt": [[1], [768]]}, "invalid_value", "prompt[1]"),
            ({"prompt": ["a", "0 " * 600]}, "context_length_exceeded", "prompt[1]"),
            ({"prompt": [1] * 513 + ["not decoded"]}, "context_length_exceeded", "prompt"),
            ({"messages": [{"role": "user", "content": "0 " * 600}]}, "context_length_exceeded", "messages"),
        ):
            response = await served.call("POST", CHAT if "messages" in body else COMPLETE, body)
            assert response.error == (400, code, param)
        assert (await served.call("POST", COMPLETE, {"prompt": "a", "model": "other"})).error == (404, "model_not_found", "model")
        assert served.requests.gateway.num_unfinished == served.client.num_open == served.gateway.num_logs == 0


@pytest.mark.parametrize(
    ("method", "path", "body", "headers", "error"),
    [
        ("GET", "/v1/nothing", None, {}, (404, "unknown_url")),
        ("GET", "/v1/models/other", None, {}, (404, "model_not_found")),
        ("POST", "/v1/models/tiny", None, {}, (405, "method_not_allowed")),
        ("GET", "/v1/nothing/", None, {}, (404, "unknown_url")),
        ("GET", CHAT, None, {}, (405, "method_not_allowed")),
        ("DELETE", "/v1/models", None, {}, (405, "method_not_allowed")),
        ("POST", CHAT, b"{", {}, (400, "invalid_value")),
        ("POST", CHAT, b"[" * 100_000, {}, (400, "invalid_value")),
        ("POST", CHAT, HELLO, {"content_type": "text/plain"}, (415, "unsupported_media_type")),
        ("POST", CHAT, HELLO, {"content_encoding": "gzip"}, (415, "unsupported_media_type")),
        ("POST", CHAT, HELLO, {"host": "evil.example"}, (403, "unknown_host")),
    ],
)
async def test_wrong_requests_get_an_error_of_the_list(
    method: str, path: str, body: Any, headers: dict[str, str], error: tuple[int, str]
) -> None:
    async with served_app() as served:
        response = await served.call(method, path, body, **headers)
        assert response.error[:2] == error


@pytest.mark.parametrize("path", ["/v1/models", "/version", "/v1/nothing", "//v1/models", "/%68ealth", "/health/../v1/models"])
async def test_only_listed_paths_are_served_without_the_key(path: str) -> None:
    async with served_app(api_key="secret") as served:
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "Basic secret"}, {"authorization": "secret"}):
            assert (await served.call("GET", path, **headers)).status == 401
        assert (await served.call("GET", "/health")).status == 200
        assert (await served.call("GET", "/v1/models", authorization="Bearer secret", host="any.example")).status == 200


async def test_too_many_requests_are_refused_before_they_are_tokenized() -> None:
    async with served_app(max_requests=1) as served:
        connection, request = await served.begin(CHAT, HELLO)
        response = await served.call("POST", CHAT, HELLO)
        assert (response.error[:2], response.headers["retry-after"]) == ((429, "rate_limit_exceeded"), "1")
        served.finish(request)
        assert (await connection.response()).status == 200
        await completed(served, CHAT, HELLO)


async def test_too_long_prompts_together_are_refused() -> None:
    async with served_app(max_prompt_tokens=100) as served:
        connection, request = await served.begin(COMPLETE, {"prompt": [5] * 60})
        assert (await served.call("POST", COMPLETE, {"prompt": [5] * 60 + ["not decoded"]})).status == 429
        served.finish(request)
        await connection.response()
        await completed(served, COMPLETE, {"prompt": [5] * 60})


async def test_draining_server_refuses_new_requests_and_finishes_the_others() -> None:
    async with served_app() as served:
        connection, request = await served.begin(CHAT, HELLO)
        drain = asyncio.create_task(served.requests.drain())
        await asyncio.sleep(0)
        assert (await served.call("POST", CHAT, HELLO)).error[:2] == (503, "service_unavailable")
        served.finish(request)
        assert (await connection.response()).status == 200
        await drain


async def until(condition: Callable[[], object]) -> None:
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0.001)


async def left(served: ServedApp) -> None:
    """Wait until nothing is left of any request."""
    await until(lambda: not (served.gateway.num_unfinished or served.client.num_open or served.gateway.num_logs))


@pytest.mark.parametrize("is_stream", [False, True])
async def test_client_that_leaves_cancels_its_request_everywhere(is_stream: bool) -> None:
    async with served_app() as served:
        connection, request = await served.begin(CHAT, HELLO | {"stream": is_stream})
        served.emit(request, " 1")
        await connection.close()
        await left(served)
        assert [each.request_id for each in served.cancelled] == [request.id]
        assert (await served.call("GET", "/ready")).status == 200


async def test_slow_reader_stalls_only_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream that no client reads fills its own buffers; another one goes on. After a while it is cut off."""
    monkeypatch.setattr(http_exchange, "WRITE_SECONDS", 0.2)
    async with served_app() as served:
        slow = await served.connect(buffer_bytes=4096)
        slow.writer.transport.pause_reading()  # type: ignore[attr-defined]
        body = {"messages": HELLO["messages"], "n": 30, "stream": True, "logprobs": True, "top_logprobs": 20}
        slow.send("POST", CHAT, body | {"ignore_eos": True})
        request = await served.submitted.get()
        for choice in range(30):
            served.emit(request, " 1" * 60, 0, choice)
        while not served.cancelled:
            await completed(served, CHAT, HELLO)
        await left(served)
        slow.writer.transport.abort()


async def test_unread_outputs_are_bounded_in_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client that has left the most unread is ended; others go on."""
    monkeypatch.setattr(gateway_client, "MAX_UNREAD", 100)
    async with served_app() as served:
        slow, request = await served.begin(COMPLETE, {"prompt": "a", "max_tokens": 128})
        with served.client.inbox() as inbox:
            for number in range(60):
                inbox.put(0, RequestOutput(number, (TokenEvent(0, 0, (1, 2)),)))
            served.answer(request, " 1")
            assert (await slow.response()).status == 200
            with pytest.raises(ApiError, match="read too slowly") as raised:
                await inbox.take()
            assert raised.value.kind is SLOW_REQUEST


async def test_failed_stream_ends_with_an_error_event(caplog: pytest.LogCaptureFixture) -> None:
    async with served_app() as served:
        connection, request = await served.begin(CHAT, HELLO | {"stream": True})
        served.emit(request, " 1")
        served.finish(request, "error", "experts.0 <object at 0x7f> failed")
        *_, last = await connection.events_after_head()
        assert last["error"]["code"] == "internal_error"
        assert "0x7f" not in last["error"]["message"]
        assert "experts.0 <object at 0x7f> failed" in caplog.text, "the log has the reason"


async def test_front_end_that_dies_cancels_its_requests() -> None:
    async with served_app() as served:
        connection, request = await served.begin(CHAT, HELLO | {"stream": True})
        served.front_ends.lose(NAME)
        assert served.gateway.num_unfinished == served.gateway.num_logs == 0
        await until(lambda: served.cancelled)
        assert served.cancelled[0].request_id == request.id
        served.client.end("the server has ended")
        assert (await connection.events_after_head())[-1]["error"]["code"] == "service_unavailable"


async def test_requests_after_the_failure_of_the_run_are_refused() -> None:
    async with served_app() as served:
        connection = await served.connect()
        connection.send("POST", CHAT, HELLO)
        await served.submitted.get()
        served.front_ends.fail("experts.0 died")
        assert (await connection.response()).error == (500, "internal_error", None)
        assert (await served.call("POST", CHAT, HELLO)).error == (503, "service_unavailable", None)


async def test_query_ends_with_the_gateway() -> None:
    client = GatewayClient(lambda _: None, lambda: 0.0)
    queries = asyncio.gather(client.query("health"), client.query("metrics"), return_exceptions=True)
    await asyncio.sleep(0)
    client.end("the server has ended")
    async with asyncio.timeout(RESPONSE_SECONDS / 2):
        ended = await queries
    assert [isinstance(error, ApiError) and error.kind for error in ended] == [UNAVAILABLE] * 2


async def test_body_header_and_time_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_exchange, "MAX_BODY_BYTES", 10_000)
    async with served_app() as served:
        assert (await served.call("POST", CHAT, b" " * 10_001)).error[0] == 413
        connection = await served.connect()
        connection.send("POST", CHAT, b"", content_length="10001", expect="100-continue", x_request_id="large")  # the headers alone
        response = await connection.response()
        assert (response.error[:2], response.headers["x-request-id"]) == ((413, "request_too_large"), "large")
        await connection.close()
        connection = await served.connect()
        connection.writer.write(f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n".encode())
        connection.writer.write(b"transfer-encoding: chunked\r\n\r\n2711\r\n" + b" " * 10_001)
        assert (await connection.response()).error[:2] == (413, "request_too_large")
        await connection.close()
        monkeypatch.setattr(http_exchange, "MAX_BUFFERED_BYTES", 5_000)
        assert (await served.call("POST", CHAT, b" " * 9_000)).error[0] == 429
        monkeypatch.setattr(http_exchange, "BODY_SECONDS", 0.05)
        connection = await served.connect()
        connection.send("POST", CHAT, b"{", content_length="10")
        assert (await connection.response()).error[0] == 408
        await connection.close()
        assert (await served.call("GET", "/ready", x_long="a" * 31_000)).status == 200
        for headers in ({"x_long": "a" * 33_000}, {f"x{number}": "a" * 20 for number in range(2_000)}):
            connection = await served.connect()
            connection.send("GET", "/ready", **headers)
            assert (await connection.response()).error[:2] == (431, "headers_too_large")
            await connection.close()
        connection = await served.connect()
        connection.writer.write(b"GET /ready HTTP/1.1\r\nx: " + b"a" * 40_000)
        assert (await connection.head()).status == 431


async def test_slow_headers_and_idle_connections_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "HEADER_SECONDS", 0.05)
    async with served_app(connections=2) as served:
        silent, slow = await served.connect(), await served.connect()
        slow.writer.write(b"GET /ready HTTP/1.1\r\n")
        await until(lambda: served.server.num_connections == 2)
        assert (await silent.response()).error[:2] == (await slow.response()).error[:2] == (408, "request_timeout")
        for connection in (silent, slow):
            await connection.close()
        await until(lambda: not served.server.num_connections)
        assert (await served.call("GET", "/ready")).status == 200
        garbage = await served.connect()
        garbage.writer.write(b"\x16\x03\x01\r\n\r\n")
        assert (await garbage.response()).error[:2] == (400, "invalid_value")
        await garbage.close()


async def test_connection_without_a_request_gives_way_to_a_new_one() -> None:
    """The longest wait first: nothing was sent, a part of the headers, a part of the body, or the last response is complete."""
    async with served_app(connections=4) as served:
        _, headers, body, idle = waiting = [await served.connect() for _ in range(4)]
        headers.writer.write(b"GET /ready HTTP/1.1\r\n")
        body.send("POST", CHAT, b"{", content_length="10", expect="100-continue")
        assert (await body.head()).status == 100
        idle.send("GET", "/ready")
        assert (await idle.response()).status == 200
        await until(lambda: sum(each._num_header_bytes == 21 for each in served.server._table.waiting) == 1)
        refused = b"HTTP/1.1 503 Service Unavailable"
        seen, new = [], [await served.connect() for _ in waiting]
        for closed, connection in zip(waiting, new, strict=True):
            connection.send("GET", "/health")
            assert (await connection.response()).status == 200
            seen.append((await closed.reader.read()).split(b"\r\n")[0])
        assert seen == [refused, refused, refused, b""]
        for connection in (*waiting, *new):
            await connection.close()
        await until(lambda: not served.server.num_connections)
        assert not served.server._table.waiting


async def test_connections_with_requests_do_not_give_way() -> None:
    async with served_app(connections=2) as served:
        streams = [await served.connect() for _ in range(2)]
        for connection in streams:
            connection.send("POST", CHAT, HELLO | {"stream": True})
        requests = [await served.submitted.get() for _ in streams]
        assert (await served.call("GET", "/health")).error[:2] == (503, "service_unavailable")
        for request, connection in zip(requests, streams, strict=True):
            served.finish(request)
            await connection.events_after_head()
        assert (await served.call("GET", "/health")).status == 200, "their responses are complete"
        for connection in streams:
            await connection.close()


def run_on(kind: str, main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run on a loop that ends with the test: uvloop's keeps a descriptor for its connections."""
    with asyncio.Runner(
        loop_factory=asyncio.new_event_loop if kind == "asyncio" else pytest.importorskip("uvloop").new_event_loop
    ) as runner:
        runner.run(main())


both_loops = pytest.mark.parametrize("kind", ["asyncio", "uvloop"])


@both_loops
@pytest.mark.parametrize("max_leaving", [2, 256])
def test_each_connection_of_a_crowd_gets_a_response(
    max_leaving: int, kind: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Requests that arrive late, too: all clients connect before the first one sends. One line of the log says so."""
    monkeypatch.setattr(connection_table, "MIN_LEAVE_SECONDS", 3600.0)
    caplog.set_level("WARNING", "flowrt.front_end")
    run_on(kind, partial(meet_crowd, max_leaving))
    assert [each.getMessage() for each in caplog.records] == ["more than 4 connections: further ones get status 503"]


async def meet_crowd(max_leaving: int) -> None:
    async with served_app(connections=4) as served:
        served.server._table.max_leaving = max_leaving
        crowd = [await served.connect() for _ in range(40)]
        statuses: dict[int, int] = {}

        async def post_chat(connection: Connection) -> None:
            connection.send("POST", CHAT, HELLO)
            response = await connection.response()
            await connection.close()
            statuses[response.status] = statuses.get(response.status, 0) + 1
            assert response.status == 200 or (response.error[1], response.headers["retry-after"]) == ("service_unavailable", "1")

        async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
            for connection in crowd:
                tasks.create_task(post_chat(connection))
            await until(lambda: statuses.get(503) == 36)
            for _ in range(4):
                served.finish(await served.submitted.get())
        assert statuses == {200: 4, 503: 36}
        await until(lambda: not served.server.num_connections)
        assert (await served.call("GET", "/health")).status == 200


@both_loops
def test_a_refused_client_that_is_still_sending_gets_its_response(kind: str) -> None:
    """A socket that is closed with input that nothing has read is reset, and the response lost."""
    run_on(kind, refuse_senders)


async def refuse_senders() -> None:
    async with served_app(connections=1) as served:
        stream = await served.connect()
        stream.send("POST", CHAT, HELLO | {"stream": True})
        request = await served.submitted.get()
        refused = [await served.connect() for _ in range(2)]
        refused[0].send("POST", CHAT, b"x" * 500_000)
        refused[1].writer.write(b"GET / HTTP/1.1\r\n")
        for connection in refused:
            assert (await connection.response()).status == 503
            connection.writer.write(b"x" * 1000)
            assert await connection.reader.read() == b""
        served.finish(request)
        await stream.events_after_head()


async def test_silent_refused_connections_do_not_keep_others_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_table, "MIN_LEAVE_SECONDS", 0.01)
    monkeypatch.setattr(http_server, "LEAVE_SECONDS", 3600.0)
    async with served_app(connections=1) as served:
        served.server._table.max_leaving = 2
        silent = [await served.connect() for _ in range(20)]
        assert (await served.call("GET", "/health")).status == 200
        assert [(await each.response()).status for each in silent] == [503] * 20


async def test_aborted_connections_leave_nothing() -> None:
    async with served_app() as served:
        for number in range(100):
            connection = await served.connect()
            connection.send("POST", CHAT, HELLO | {"stream": bool(number % 2)})
            connection.writer.transport.abort()
        await left(served)
        await until(lambda: not served.server.num_connections)
        while not served.submitted.empty():
            served.submitted.get_nowait()
        await completed(served, CHAT, HELLO)
