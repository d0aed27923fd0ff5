"""The field `prompt_logprobs` of a request, which is vLLM's: where its response has them, and their bounds. A test plays the group."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from serving.served_app import ServedApp, served_app

from flowrt.serving import completions
from flowrt.serving.api_response import ResponseBuilder

CHAT, COMPLETE = "/v1/chat/completions", "/v1/completions"
TEXT = "one and two"


async def events_of(served: ServedApp, path: str, body: dict[str, Any]) -> tuple[list[Any], tuple[int, ...]]:
    """The events of a stream, or the one body, of a request whose choices are " 1"; and the token ids of its prompt."""
    connection, request = await served.begin(path, body)
    for choice in range(request.params.n):
        served.answer(request, " 1", choice=choice)
    events = await connection.events_after_head() if body.get("stream") else [(await connection.response()).json()]
    await connection.close()
    return events, request.prompt_token_ids


def expected(served: ServedApp, token_ids: tuple[int, ...], number: int) -> list[Any]:
    """What `ServedApp.emit` gives: minus the position for a token, and for token id i, which is the one of rank i + 1, minus 1 + i."""
    top = {
        str(each): {"logprob": -1.0 - each, "rank": each + 1, "decoded_token": served.tokenizer.token_text(each)} for each in range(number)
    }
    own = [
        {str(each): {"logprob": -float(at), "rank": None, "decoded_token": served.tokenizer.token_text(each)}}
        for at, each in enumerate(token_ids[1:], 1)
    ]
    return [None, *(each | top for each in own)]


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("number", [0, 2])
async def test_first_choice_of_a_text_has_those_of_its_prompt(is_stream: bool, number: int) -> None:
    async with served_app() as served:
        body = {"prompt": TEXT, "n": 2, "prompt_logprobs": number, "stream": is_stream}
        events, token_ids = await events_of(served, COMPLETE, body)
        choices = [choice for each in events for choice in each["choices"]]
        assert [each["prompt_logprobs"] for each in choices if "prompt_logprobs" in each] == [expected(served, token_ids, number)]
        assert "prompt_logprobs" in next(each for each in choices if each["index"] == 0), "its first event"
        assert {each["logprobs"] for each in choices if each["text"]} == {None}
        assert "".join(each["text"] for each in choices) == " 1 1", "the prompt is not repeated"


@pytest.mark.parametrize("is_stream", [False, True])
async def test_response_to_a_chat_has_those_of_its_prompt(is_stream: bool) -> None:
    async with served_app() as served:
        body = {"messages": [{"role": "user", "content": TEXT}], "n": 2, "prompt_logprobs": 1, "stream": is_stream}
        events, token_ids = await events_of(served, CHAT, body)
        assert [each["prompt_logprobs"] for each in events if "prompt_logprobs" in each] == [expected(served, token_ids, 1)]
        assert "prompt_logprobs" in events[0]


async def test_token_that_is_among_the_most_likely_has_its_rank() -> None:
    async with served_app() as served:
        call = asyncio.create_task(
            served.call("POST", COMPLETE, {"prompt": [5, 1], "prompt_logprobs": 2, "return_tokens_as_token_ids": True})
        )
        request = await served.submitted.get()
        served.answer(request, "1")
        (found,) = (await call).json()["choices"][0]["prompt_logprobs"][1:]
        assert found == {
            "1": {"logprob": -2.0, "rank": 2, "decoded_token": "token_id:1"},
            "0": {"logprob": -1.0, "rank": 1, "decoded_token": "token_id:0"},
        }


async def test_echo_may_go_with_it() -> None:
    async with served_app() as served:
        events, token_ids = await events_of(served, COMPLETE, {"prompt": TEXT, "echo": True, "prompt_logprobs": 1})
        (choice,) = events[0]["choices"]
        assert (choice["text"], choice["logprobs"]) == (TEXT + " 1", None)
        assert choice["prompt_logprobs"] == expected(served, token_ids, 1)
        response = await served.call("POST", COMPLETE, {"prompt": TEXT, "echo": True, "prompt_logprobs": 1, "logprobs": 2})
        assert response.error == (400, "invalid_value", "prompt_logprobs")


async def test_those_of_all_choices_together_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each repeated prompt counts, and what is refused leaves nothing."""
    async with served_app() as served:
        number = len(served.tokenizer.encode(TEXT))
        monkeypatch.setattr(completions, "MAX_PROMPT_LOGPROBS", 4 * number)
        refused: tuple[tuple[dict[str, Any], str], ...] = (
            ({"prompt": TEXT, "n": 5, "echo": True, "logprobs": 0}, "logprobs"),
            ({"prompt": [TEXT] * 5, "echo": True, "logprobs": 0}, "logprobs"),
            ({"prompt": [TEXT] * 3, "prompt_logprobs": 1}, "prompt_logprobs"),
        )
        for body, param in refused:
            assert (await served.call("POST", COMPLETE, body)).error == (400, "invalid_value", param)
        monkeypatch.setattr(completions, "MAX_REPEATED_TOKENS", 4 * number)
        for body, param in (({"n": 5, "echo": True}, "echo"), ({"n": 5, "return_token_ids": True}, "return_token_ids")):
            assert (await served.call("POST", COMPLETE, {"prompt": TEXT, **body})).error == (400, "invalid_value", param)
        assert served.client.num_open == served.gateway.num_unfinished == 0
        while not served.submitted.empty():
            served.submitted.get_nowait()
        await events_of(served, COMPLETE, {"prompt": TEXT, "n": 5, "prompt_logprobs": 1})


@pytest.mark.parametrize("is_stream", [False, True])
async def test_responses_with_logprobs_are_written_in_turns(is_stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each may take a third of a second: several in one turn of the loop would keep a front end silent for too long."""
    name = "first_chunk" if is_stream else "whole"
    num_in_turn, most, write = 0, 0, getattr(ResponseBuilder, name)

    def end_turn() -> None:
        nonlocal num_in_turn
        num_in_turn = 0

    def count(*arguments: Any) -> Any:
        nonlocal num_in_turn, most
        asyncio.get_running_loop().call_soon(end_turn)
        num_in_turn += 1
        most = max(most, num_in_turn)
        return write(*arguments)

    monkeypatch.setattr(ResponseBuilder, name, count)
    async with served_app() as served:
        connections = [await served.connect() for _ in range(4)]
        for connection in connections:
            connection.send("POST", COMPLETE, {"prompt": TEXT, "prompt_logprobs": 2, "stream": is_stream})
        for request in [await served.submitted.get() for _ in connections]:
            served.answer(request, " 1")
        for connection in connections:
            assert await (connection.events_after_head() if is_stream else connection.response())
        assert most == 1
        for connection in connections:
            await connection.close()
