"""Responses that are read again by the id of their request, after a broken connection and from another launcher. Tests play the group."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
from serving.served_app import NAME, Connection, ServedApp, served_app

from flowrt.gateway import requests

CHAT, COMPLETE = "/v1/chat/completions", "/v1/completions"
BODIES = {
    CHAT: {"messages": [{"role": "user", "content": "hello"}], "n": 2, "logprobs": True, "max_tokens": 40, "stop": ["never"]},
    COMPLETE: {"prompt": ["What is 1 + 2?", "b"], "n": 2, "logprobs": 1, "echo": True, "max_tokens": 40},
}
TEXTS = (" 12 and 3 are", " 5 and 6 and 7")


class Stream:
    """The events of a stream so far: (id, event)."""

    def __init__(self, connection: Connection) -> None:
        self.connection, self.events, self._text = connection, list[tuple[str, Any]](), ""

    async def read(self, num_events: int | None = None) -> list[tuple[str, Any]]:
        """Read until so many events have come; None: to the end."""
        while num_events is None or len(self.events) < num_events:
            if not (chunk := await self.connection.chunk()):
                assert num_events is None, "the stream has ended"
                await self.connection.close()
                break
            self._text += chunk
            *whole, self._text = self._text.split("\n\n")
            for event in whole:
                fields = dict(line.split(": ", 1) for line in event.splitlines())
                if fields["data"] != "[DONE]":
                    self.events.append((fields.get("id", ""), json.loads(fields["data"])))
        return self.events


async def begin(served: ServedApp, path: str, name: str = "mine", **more: Any) -> tuple[Stream, list[Any]]:
    """A stream, and the requests that the group has got for it."""
    connection = await served.connect()
    connection.send("POST", path, BODIES[path] | {"stream": True} | more, x_request_id=name)
    submitted = [await served.submitted.get() for _ in range(2 if path == COMPLETE else 1)]
    assert (await connection.head()).status == 200
    return Stream(connection), submitted


def emit_all(served: ServedApp, submitted: list[Any], first: int, last: int | None) -> None:
    """The tokens `first` to `last` of each choice; to the end for None."""
    for request in submitted:
        for choice, text in enumerate(TEXTS):
            token_ids = served.tokenizer.encode(text)
            for index in range(first, len(token_ids) if last is None else last):
                served.emit_token(request, token_ids[index], index, choice)
            if last is None:
                served.finish(request, "length", choice=choice)


async def reread(served: ServedApp, position: str = "", name: str = "mine") -> Stream:
    connection = await served.connect()
    headers = {"last_event_id": position} if position else {}
    connection.send("GET", f"/v1/requests/{name}?stream=true", **headers)
    assert (await connection.head()).status == 200
    return Stream(connection)


def text_of(events: list[tuple[str, Any]]) -> dict[int, list[Any]]:
    """What a client makes of a stream: by choice, its text, logprobs and reason."""
    found: dict[int, list[Any]] = {}
    for _, event in events:
        for choice in event["choices"]:
            text, logprobs, reasons = found.setdefault(choice["index"], ["", [], []])
            text += choice["text"] if "text" in choice else choice["delta"].get("content", "")
            some = choice.get("logprobs") or {}
            logprobs += some.get("content") or list(zip(some.get("tokens", ()), some.get("text_offset", ()), strict=True))
            found[choice["index"]] = [text, logprobs, reasons + [choice["finish_reason"]] * bool(choice["finish_reason"])]
    return found


async def undisturbed(path: str, tmp_path: Path) -> dict[int, list[Any]]:
    async with served_app(log=tmp_path / "undisturbed") as served:
        stream, submitted = await begin(served, path)
        emit_all(served, submitted, 0, None)
        return text_of(await stream.read())


@pytest.mark.parametrize("path", [CHAT, COMPLETE])
async def test_a_client_whose_connection_broke_goes_on_behind_its_last_event(path: str, tmp_path: Path) -> None:
    whole = await undisturbed(path, tmp_path)
    async with served_app(log=tmp_path / "log") as served:
        stream, submitted = await begin(served, path)
        emit_all(served, submitted, 0, 2)
        before = list(await stream.read(6 if path == CHAT else 12))
        await stream.connection.close()
        while served.front_ends.queues[NAME].requests:  # noqa: ASYNC110
            await asyncio.sleep(0)
        assert not served.cancelled, "it waits for the client"
        emit_all(served, submitted, 2, 3)
        after = await reread(served, before[-1][0])
        emit_all(served, submitted, 3, None)
        await after.read()
        assert text_of(before + after.events) == whole
        assert text_of(await (await reread(served)).read()) == whole, "from the first event on, when it has ended"
        assert {event["id"] for _, event in after.events} == {before[0][1]["id"]}


async def test_events_of_responses_that_are_read_again_have_the_same_numbers(tmp_path: Path) -> None:
    """Also where several tokens are in an event."""
    async with served_app(log=tmp_path / "log", stream_interval=3) as served:
        connection, request = await served.begin("/v1/responses", {"input": "hello", "stream": True}, x_request_id="mine")
        for index, token_id in enumerate(served.tokenizer.encode(TEXTS[0] + TEXTS[1])):
            served.emit_token(request, token_id, index, 0)
        served.finish(request, "stop", choice=0)
        assert (await connection.head()).status == 200
        whole = await Stream(connection).read()
        for number, (position, event) in enumerate(whole[2:-1], 2):
            if position and event["type"] == "response.output_text.delta":
                rest = await (await reread(served, position)).read()
                assert [each["sequence_number"] for _, each in rest] == [each["sequence_number"] for _, each in whole[number + 1 :]]


async def test_a_whole_response_is_read_again_as_a_stream(tmp_path: Path) -> None:
    async with served_app(log=tmp_path / "log") as served:
        connection, request = await served.begin("/v1/responses", {"input": "hello"}, x_request_id="mine")
        for index, token_id in enumerate(served.tokenizer.encode(TEXTS[0])):
            served.emit_token(request, token_id, index, 0)
        served.finish(request, "stop", choice=0)
        whole = (await connection.response()).json()
        (*_, (_, last)) = await (await reread(served)).read()
        assert (last["type"], last["response"]["output"]) == ("response.completed", whole["output"])


async def test_a_position_behind_the_last_event_is_an_error(tmp_path: Path) -> None:
    """Whoever mistakes an id would take the answer for an empty one."""
    async with served_app(log=tmp_path / "log") as served:
        call = asyncio.create_task(served.call("POST", CHAT, BODIES[CHAT], x_request_id="mine"))
        emit_all(served, [await served.submitted.get()], 0, None)
        assert (await call).status == 200
        whole = await (await reread(served)).read()
        last = [position for position, _ in whole if position][-1]
        assert not [event for _, event in await (await reread(served, last)).read() if "error" in event]
        for position in ("99999.1", "1.99999"):
            ((_, event),) = await (await reread(served, position)).read()
            assert event["error"]["message"] == "the header Last-Event-ID is not the id of an event of this response"


@pytest.mark.parametrize("path", [CHAT, COMPLETE])
async def test_another_launcher_goes_on_with_the_responses_of_a_dead_one(path: str, tmp_path: Path) -> None:
    whole = await undisturbed(path, tmp_path)
    async with served_app(log=tmp_path / "log") as served:
        stream, submitted = await begin(served, path)
        emit_all(served, submitted, 0, 3)
        before = list(await stream.read(8 if path == CHAT else 12))
        await served.requests.wait_written()
        copytree(tmp_path / "log", tmp_path / "left")
        await stream.connection.close()
    async with served_app(log=tmp_path / "left") as served:
        submitted = [await served.submitted.get() for _ in submitted]
        after = await reread(served, before[-1][0])
        emit_all(served, submitted, 3, None)
        await after.read()
        assert text_of(before + after.events) == whole
        response = await served.call("GET", "/v1/requests/mine")
        assert response.status == 200
        texts = {each["index"]: each["text"] if "text" in each else each["message"]["content"] for each in response.json()["choices"]}
        assert texts == {choice: text for choice, (text, _, _) in whole.items()}


async def test_a_client_that_does_not_come_back_or_gave_no_id_has_its_request_cancelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requests, "UNATTENDED_SECONDS", 0.0)
    async with served_app(log=tmp_path / "log") as served:
        stream, _ = await begin(served, CHAT)
        await stream.connection.close()
        nameless = await served.connect()
        nameless.send("POST", CHAT, BODIES[CHAT])
        await served.submitted.get()
        await nameless.close()
        while served.requests.gateway.num_unfinished:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        assert (await served.call("GET", "/v1/requests/mine")).error == (404, "request_not_found", None)


async def test_wrong_ids_positions_and_keys_are_refused(tmp_path: Path) -> None:
    async with served_app(log=tmp_path / "log", api_key="secret") as served:
        assert (await served.call("GET", "/v1/requests/mine")).status == 401
        key = {"authorization": "Bearer secret"}
        for name in ("mine", "a%20b", "x" * 129):
            assert (await served.call("GET", f"/v1/requests/{name}", **key)).error == (404, "request_not_found", None)
        assert (await served.call("POST", "/v1/requests/mine", {}, **key)).status == 405
        assert (await served.call("GET", "/v1/requests/mine?after=3", **key)).status == 400
        connection, request = await served.begin(CHAT, BODIES[CHAT], x_request_id="mine", **key)
        emit_all(served, [request], 0, None)
        assert (await connection.response()).status == 200
        for position in ("x", "1", "1.2.3", "-1.2", "1." + "9" * 9000, "1." + "9" * 5000):
            refused = await served.call("GET", "/v1/requests/mine?stream=true", last_event_id=position, **key)
            assert refused.error == (400, "invalid_value", None), position
    async with served_app() as served:
        assert (await served.call("GET", "/v1/requests/mine")).status == 404
