"""OpenAI's Responses API over HTTP: a test plays the model."""

from __future__ import annotations

import json
from typing import Any

import pytest
from serving.served_app import Connection, ServedApp, served_app
from serving.test_tool_calls import CALL, NO_ARGUMENTS, THINKING, play

from flowrt.serving.api_errors import ApiError
from flowrt.serving.json_body import MAX_FIELD_BYTES
from flowrt.serving.responses_request import ResponsesReader

PATH = "/v1/responses"
TOOLS = [
    {"type": "function", "name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "string"}}}, "strict": True},
    {"type": "function", "name": "g", "parameters": None, "strict": None},
]
CALL_ITEM: dict[str, Any] = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
BODY: dict[str, Any] = {"model": "tiny", "input": "Hi", "tools": TOOLS}
ANSWER = f"<think>Hm.</think>\nYes.\n{CALL}\n{NO_ARGUMENTS}"


async def create(app: ServedApp, text: str, reason: str = "stop", **fields: Any) -> Any:
    connection = await app.connect()
    connection.send("POST", PATH, BODY | fields)
    await play(app, [text], reason)
    return await (named_events(connection) if fields.get("stream") else connection.response())


async def named_events(connection: Connection) -> list[Any]:
    assert (await connection.head()).status == 200
    return events_of("".join([chunk async for chunk in connection.chunks()]))


def events_of(stream: str) -> list[Any]:
    """Each event of a stream; the name before its data is its type."""
    *events, done = [event for event in stream.split("\n\n") if event]
    assert done == "data: [DONE]"
    read = []
    for event in events:
        name, data = event.split("\n")
        read.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {read[-1]['type']}"
    assert [each["sequence_number"] for each in read] == list(range(len(read)))
    return read


def without_ids(items: list[Any]) -> list[Any]:
    return [{name: value for name, value in item.items() if name not in ("id", "call_id")} for item in items]


def chat_of(**fields: Any) -> Any:
    """The chat that a request becomes, and its request."""
    request = ResponsesReader().read(json.dumps({"input": "Hi"} | fields).encode(), "tiny")
    return request.prompts[0], request


def error_of(**fields: Any) -> ApiError:
    reader = ResponsesReader()
    with pytest.raises(ApiError) as caught:
        reader.read(json.dumps({"input": "Hi"} | fields).encode(), "tiny")
    return reader.renamed(caught.value)


async def test_items_of_a_response() -> None:
    async with served_app(formats=THINKING) as app:
        response = (await create(app, ANSWER, metadata={"a": "b"}, temperature=0.5, instructions="Be brief.")).json()
        assert response["instructions"] == "Be brief."
        assert (response["object"], response["status"], response["incomplete_details"]) == ("response", "completed", None)
        assert (response["metadata"], response["temperature"], response["tools"]) == ({"a": "b"}, 0.5, TOOLS)
        text = {"type": "output_text", "text": "Yes.", "annotations": [], "logprobs": []}
        call = {"type": "function_call", "status": "completed", "name": "f", "arguments": '{"a": "<b>"}'}
        assert without_ids(response["output"]) == [
            {"type": "reasoning", "status": "completed", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
            {"type": "message", "status": "completed", "role": "assistant", "content": [text]},
            call,
            call | {"name": "g", "arguments": "{}"},
        ]
        assert response["output"][2]["call_id"].startswith("call_")
        usage = response["usage"]
        assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
        assert 0 < usage["output_tokens_details"]["reasoning_tokens"] < usage["output_tokens"]


@pytest.mark.parametrize("interval", [1, 2, 4, 7, 200])
@pytest.mark.parametrize("answer", [ANSWER, f"Yes {CALL}\nI wait {NO_ARGUMENTS} for it."])
async def test_events_add_up_to_the_response(answer: str, interval: int) -> None:
    async with served_app(formats=THINKING, stream_interval=interval) as app:
        whole = (await create(app, answer)).json()
        events = await create(app, answer, stream=True)
        assert [each["type"] for each in events[:2]] == ["response.created", "response.in_progress"]
        assert events[-1]["type"] == "response.completed"
        items: list[Any] = []
        for event in events:
            match event["type"].removeprefix("response."):
                case "output_item.added":
                    assert event["output_index"] == len(items)
                    items.append(event["item"] | {"text": ""})
                    parts = list[Any]()
                case "content_part.added":
                    parts.append(event["part"])
                    assert event["content_index"] == len(parts) - 1, "clients keep parts in a list"
                case "content_part.done":
                    assert event["part"] == parts[event["content_index"]] | {"text": items[-1]["text"]}
                case "output_text.delta" | "reasoning_text.delta" | "function_call_arguments.delta":
                    assert event["item_id"] == items[-1]["id"]
                    assert event["type"].startswith("response.function_call") or len(parts) == 1
                    items[-1]["text"] += event["delta"]
                case "output_text.done" | "reasoning_text.done":
                    assert event["text"] == items[-1]["text"]
                case "function_call_arguments.done":
                    assert event["arguments"] == items[-1]["text"]
                case "output_item.done":
                    assert event["item"]["id"] == items[-1]["id"]
                    assert event["item"].get("content", []) == [part | {"text": items[-1]["text"]} for part in parts]
        last = events[-1]["response"]
        assert without_ids(last["output"]) == without_ids(whole["output"])
        assert [each["id"] for each in last["output"]] == [each["id"] for each in items]
        assert last["usage"]["output_tokens"] == whole["usage"]["output_tokens"]


async def test_a_response_that_is_cut_off_is_incomplete() -> None:
    async with served_app(formats=THINKING) as app:
        response = (await create(app, CALL[:-20], "length")).json()
        assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
        assert response["output"][0]["status"] == "incomplete"
        assert (await create(app, "Yes", "length", stream=True))[-1]["type"] == "response.incomplete"


async def test_what_is_large_is_not_repeated() -> None:
    """The response is kept while its tokens come, and the body is in no budget then."""
    async with served_app(formats=THINKING) as app:
        response = (await create(app, "Yes", metadata={"a": "b" * MAX_FIELD_BYTES}, instructions="Be brief. " * MAX_FIELD_BYTES)).json()
        assert (response["metadata"], response["instructions"]) == ({}, None)


async def test_a_stop_string_within_a_call_leaves_the_response_incomplete() -> None:
    async with served_app(formats=THINKING) as app:
        response = (await create(app, CALL, stop="<b")).json()
        assert (response["status"], response["output"][-1]["status"]) == ("incomplete", "incomplete")
        assert response["incomplete_details"] is None, "a larger max_output_tokens would not help"


async def test_stream_that_fails_ends_with_events_of_this_api() -> None:
    async with served_app(formats=THINKING) as app:
        connection, request = await app.begin(PATH, BODY | {"stream": True})
        app.emit(request, "Yes")
        stream = ""
        assert (await connection.head()).status == 200
        while "output_text.delta" not in stream:
            stream += await connection.chunk()
        app.finish(request, "error", error="the experts are gone")
        *_, done, error, failed = events_of(stream + "".join([chunk async for chunk in connection.chunks()]))
        assert (done["type"], done["item"]["status"]) == ("response.output_item.done", "incomplete")
        assert (error["type"], error["code"], error["param"]) == ("error", "internal_error", None)
        assert (failed["type"], failed["response"]["status"]) == ("response.failed", "failed")
        assert failed["response"]["error"] == {"code": "server_error", "message": error["message"]}
        assert failed["response"]["output"] == [done["item"]]


def test_advice_has_the_form_of_this_api() -> None:
    for fields, advice in (
        ({"text": {"format": {"type": "json_schema", "name": "n"}}}, '{"type": "json_schema", "name": "...", "schema": {...}}'),
        ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "is {'type': 'function'}, "),
        ({"tools": TOOLS, "tool_choice": "always"}, "a function such as {'type': 'function', 'name': 'f'}"),
    ):
        assert advice in error_of(**fields).message


async def test_no_state_is_kept() -> None:
    async with served_app(formats=THINKING) as app:
        response = (await create(app, "4", store=True)).json()
        assert (await app.call("GET", f"{PATH}/{response['id']}")).status == 404
        assert (await app.call("POST", PATH, BODY | {"previous_response_id": "resp_1"})).error == (
            400,
            "unsupported_parameter",
            "previous_response_id",
        )


async def test_errors_have_the_names_of_this_api() -> None:
    async with served_app(formats=THINKING) as app:
        assert (await app.call("POST", PATH, BODY | {"max_output_tokens": -1})).error[2] == "max_output_tokens"
        assert (await app.call("POST", PATH, BODY | {"input": "a " * 3000})).error[1:] == ("context_length_exceeded", "input")
        assert (await app.call("POST", PATH, b"[" * 100000)).status == 400
        assert (await app.call("POST", PATH, b'{"input": ' + b"[" * 100000)).status == 400


def test_fields_that_no_table_has_are_not_decoded() -> None:
    """JSON that is wrong at its end shows it."""
    with pytest.raises(ApiError) as caught:
        ResponsesReader().read(b'{"input": "a", "abc": [%s{}]}' % (b"0," * 300_000), "")
    assert (caught.value.kind.code, caught.value.param) == ("unsupported_parameter", "abc")


def test_items_become_messages() -> None:
    call = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}
    chat, _ = chat_of(
        instructions="Be kind.",
        input=[
            {"role": "developer", "content": "b"},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "c"}]},
            {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "d"}]},
            {"type": "message", "id": "m", "role": "assistant", "status": "completed", "content": [{"type": "output_text", "text": "e"}]},
            call,
            call | {"call_id": "c2"},
            {"type": "function_call_output", "call_id": "c1", "output": "f"},
            {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "g"}]},
        ],
    )
    assert [message["role"] for message in chat.messages] == ["system", "developer", "user", "assistant", "tool", "tool"]
    assistant = chat.messages[3]
    assert (assistant["reasoning_content"], [each["id"] for each in assistant["tool_calls"]]) == ("d", ["c1", "c2"])
    assert (chat.messages[4]["tool_call_id"], chat.messages[4]["content"]) == ("c1", "f")


def test_reasoning_belongs_to_the_answer_behind_it() -> None:
    thought = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "old"}]}
    chat, _ = chat_of(
        input=[{"role": "user", "content": "a"}, thought, {"role": "user", "content": "b"}, {"role": "assistant", "content": "c"}]
    )
    assert "reasoning_content" not in chat.messages[-1], "that of an answer which was cut off"
    call = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}
    chat, _ = chat_of(input=[{"role": "assistant", "content": "a"}, thought, call, {"role": "assistant", "content": "c"}])
    assert [message.get("reasoning_content") for message in chat.messages] == ["old", None]


def test_fields_become_those_of_a_chat() -> None:
    chat, request = chat_of(
        tools=TOOLS,
        tool_choice={"type": "function", "name": "f"},
        max_output_tokens=7,
        reasoning={"effort": "low", "summary": "auto"},
        parallel_tool_calls=True,
        include=["reasoning.encrypted_content"],
        store=False,
        truncation="disabled",
        text={"verbosity": "low"},
        prompt_cache_key="k",
        chat_template_kwargs={"enable_thinking": False},
        seed=3,
    )
    assert [tool["function"]["name"] for tool in chat.tools] == ["f", "g"]
    assert chat.kwargs == {"enable_thinking": False, "reasoning_effort": "low"}
    assert (request.tool_choice, [tool["function"]["name"] for tool in request.tools]) == ("required", ["f"])
    assert (request.params.max_tokens, request.params.seed, request.has_parallel_calls) == (7, 3, False)
    assert request.response_fields["parallel_tool_calls"], "as it was sent"
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    _, request = chat_of(text={"format": {"type": "json_schema", "name": "n", "schema": schema, "strict": True}})
    assert json.loads(request.params.structured_outputs.json) == schema
    assert chat_of(text={"format": {"type": "text"}})[1].params.structured_outputs is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": 1}, "input"),
        ({"input": []}, "input"),
        ({"input": [1]}, "input[0]"),
        ({"input": [{"type": "item_reference", "id": "m"}]}, "input[0].type"),
        ({"input": [{"type": "function_call", "call_id": "c"}]}, "input[0].name"),
        ({"input": [CALL_ITEM, CALL_ITEM | {"name": 3}]}, "input[1].name"),
        ({"input": [CALL_ITEM, CALL_ITEM | {"call_id": 3}]}, "input[1].call_id"),
        ({"input": [CALL_ITEM, {"type": "function_call_output", "call_id": "c", "output": 3}]}, "input[1].output"),
        ({"input": [{"type": "function_call_output", "call_id": "c", "output": [{"type": "input_image"}]}]}, "input[0].output[0]"),
        ({"input": [{"role": "user", "content": 3}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": "a"}, {"role": "user", "content": [{"type": "input_image"}]}]}, "input[1].content[0]"),
        ({"instructions": 1}, "instructions"),
        ({"truncation": "some"}, "truncation"),
        ({"reasoning": {"effort": 3}}, "reasoning.effort"),
        ({"tools": {"a": 1}}, "tools"),
        ({"input": [{"type": "function_call_output", "call_id": 1, "output": "a"}]}, "input[0].call_id"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "h"}}, "tool_choice.name"),
        ({"text": {"format": {"type": "xml"}}}, "text.format"),
        ({"text": 1}, "text"),
        ({"messages": []}, "messages"),
        ({"n": 2}, "n"),
        ({"background": True}, "background"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"max_output_tokens": -1}, "max_output_tokens"),
        ({"temprature": 1}, "temprature"),
    ],
)
def test_requests_that_cannot_be_answered(fields: dict[str, Any], param: str) -> None:
    error = error_of(**fields)
    assert error.param == param
    assert error.message.startswith(param) or param in error.message
