"""Tool calls and reasoning in chats, over HTTP: whole, streamed, read again; a test plays the model."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from serving.served_app import MODEL, ServedApp, served_app

from flowrt.engine.grammar import Grammars
from flowrt.serving.api_request import read_chat_request
from flowrt.serving.output_formats import OutputFormats
from flowrt.serving.tokenizer import Tokenizer
from flowrt.serving.tool_choice import argument_schema

HERMES, THINKING = OutputFormats("hermes"), OutputFormats("hermes", "qwen3")
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "string"}}}}}
OTHER = {"type": "function", "function": {"name": "g"}}
BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "tools": [TOOL, OTHER]}
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "<b>"}}\n</tool_call>'
NO_ARGUMENTS = '<tool_call>{"name": "g", "arguments": {}}</tool_call>'
PATH = "/v1/chat/completions"


async def answer(app: ServedApp, texts: list[str], reason: str = "stop", **fields: Any) -> Any:
    """The response to a chat, whose choices have these texts."""
    connection = await app.connect()
    connection.send("POST", PATH, BODY | fields | ({"n": len(texts)} if len(texts) > 1 else {}))
    await play(app, texts, reason)
    return await (connection.events_after_head() if fields.get("stream") else connection.response())


async def play(app: ServedApp, texts: list[str], reason: str = "stop") -> None:
    async with asyncio.timeout(60):  # none comes when the request is refused
        request = await app.submitted.get()
    for choice, text in enumerate(texts):
        app.emit(request, text, choice=choice)
        app.finish(request, reason, choice=choice)


def joined(events: list[Any]) -> dict[int, dict[str, Any]]:
    """The messages that the chunks of a stream add up to, with their finish reasons."""
    messages: dict[int, dict[str, Any]] = {}
    for choice in [choice for event in events for choice in event["choices"]]:
        message = messages.setdefault(choice["index"], {"role": "", "content": ""})
        for name, value in choice["delta"].items():
            if name != "tool_calls":
                message[name] = message.get(name, "") + value
        for call in choice["delta"].get("tool_calls", []):
            calls = message.setdefault("tool_calls", [])
            if call["index"] == len(calls):
                calls.append({"function": {"arguments": ""}})
            made = calls[call["index"]]
            made |= {name: value for name, value in call.items() if name in ("id", "type")}
            function = call["function"]
            made["function"] |= {"name": function.get("name", made["function"].get("name"))}
            made["function"]["arguments"] += function["arguments"]
        message["finish_reason"] = choice["finish_reason"]
    return messages


async def test_calls_of_a_whole_answer() -> None:
    async with served_app(formats=HERMES) as app:
        choice = (await answer(app, [f"Yes.\n{CALL}\n{NO_ARGUMENTS}"])).json()["choices"][0]
        assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", "Yes.")
        first, second = choice["message"]["tool_calls"]
        assert first["function"] == {"name": "f", "arguments": '{"a": "<b>"}'}
        assert second["function"] == {"name": "g", "arguments": "{}"}
        assert first["id"].startswith("call_")
        assert first["id"] != second["id"]
        only_calls = (await answer(app, [CALL])).json()["choices"][0]["message"]
        assert only_calls["content"] is None
        text = (await answer(app, ["a <tool_call> b"])).json()["choices"][0]
        assert (text["finish_reason"], text["message"]) == ("stop", {"role": "assistant", "content": "a <tool_call> b"})


@pytest.mark.parametrize("interval", [1, 2, 3, 7, 50])
async def test_a_stream_is_the_whole_answer(interval: int) -> None:
    texts = [f"<think>Hm.</think>\nYes.\n{CALL}\n{NO_ARGUMENTS}", f"{CALL[:-20]}", "plain < text"]
    async with served_app(formats=THINKING, stream_interval=interval) as app:
        whole = (await answer(app, texts, seed=1)).json()["choices"]
        streamed = joined(await answer(app, texts, stream=True))
        for choice, message in streamed.items():
            assert message.pop("finish_reason") == whole[choice]["finish_reason"]
            expected = whole[choice]["message"]
            assert message["content"] == (expected["content"] or "")
            assert message.get("reasoning_content", "") == message.get("reasoning", "") == expected.get("reasoning_content", "")
            functions = [[call["function"] for call in each.get("tool_calls", [])] for each in (message, expected)]
            assert functions[0] == functions[1]
        assert whole[0]["message"]["reasoning_content"] == "Hm."
        assert [choice["finish_reason"] for choice in whole] == ["tool_calls", "stop", "stop"], "the second call is cut"


async def test_a_call_cut_off_ends_by_length() -> None:
    async with served_app(formats=HERMES) as app:
        choice = (await answer(app, [CALL[:-20]], "length")).json()["choices"][0]
        assert choice["finish_reason"] == "length"
        with pytest.raises(json.JSONDecodeError):
            json.loads(choice["message"]["tool_calls"][0]["function"]["arguments"])


@pytest.mark.parametrize(("choice", "names"), [("required", []), ({"type": "function", "function": {"name": "g"}}, ["g"])])
async def test_a_required_call_cut_off_is_not_content(choice: Any, names: list[str]) -> None:
    pytest.importorskip("llguidance")
    async with served_app(formats=THINKING) as app:
        text = '[{"name" : "g" , "p'
        for length, expected in ((1, names), (6, names), (len(text), ["g"])):
            whole = (await answer(app, [text[:length]], "length", tool_choice=choice)).json()["choices"][0]
            assert (whole["finish_reason"], whole["message"]["content"] or "") == ("length", "")
            calls = [call["function"] for call in whole["message"].get("tool_calls", [])]
            assert calls == [{"name": name, "arguments": ""} for name in expected]
            streamed = joined(await answer(app, [text[:length]], "length", tool_choice=choice, stream=True))[0]
            assert (streamed["finish_reason"], streamed["content"]) == ("length", "")
            assert [call["function"] for call in streamed.get("tool_calls", [])] == calls


async def test_stop_strings_and_logprobs_go_with_calls() -> None:
    async with served_app(formats=HERMES) as app:
        choice = (await answer(app, [f"{CALL} END more"], stop="END", logprobs=True, top_logprobs=1)).json()["choices"][0]
        assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", None)
        assert len(choice["logprobs"]["content"]) > 10
        events = await answer(app, [CALL], stream=True, logprobs=True)
        assert sum(len(each["choices"][0]["logprobs"]["content"]) for each in events[1:] if each["choices"][0].get("logprobs")) > 10


async def test_tool_choice_none_and_no_parallel_calls() -> None:
    async with served_app(formats=HERMES) as app:
        message = (await answer(app, [CALL], tool_choice="none")).json()["choices"][0]["message"]
        assert message == {"role": "assistant", "content": CALL}
        message = (await answer(app, [CALL + NO_ARGUMENTS], parallel_tool_calls=False)).json()["choices"][0]["message"]
        assert [call["function"]["name"] for call in message["tool_calls"]] == ["f"]


async def test_usage_counts_reasoning() -> None:
    async with served_app(formats=THINKING) as app:
        usage = (await answer(app, ["<think>Hm, hm.</think>4"])).json()["usage"]
        assert 0 < usage["completion_tokens_details"]["reasoning_tokens"] < usage["completion_tokens"]
        assert "completion_tokens_details" not in (await answer(app, ["4"])).json()["usage"]


async def test_reasoning_that_the_prompt_has_begun() -> None:
    """The template of this model writes the last message of the user alone."""
    async with served_app(formats=THINKING) as app:
        for prompt, continues, text, content, reasoning in (
            ("Hi <think>\n", False, " still.</think> 4", "4", "still."),
            ("Hi <think>\n\n</think>", False, " 4", " 4", None),
            ("Hi <think>Hm,", True, " still.</think> 4", "4", "still."),
            ("Hi <think>Hm,</think>", True, " 4", " 4", None),
            ("Hi <think> is a tag", False, " 4", " 4", None),
        ):
            messages = [{"role": "user", "content": prompt}]
            response = await answer(app, [text], messages=messages, continue_final_message=continues)
            message = response.json()["choices"][0]["message"]
            assert (message["content"], message.get("reasoning_content")) == (content, reasoning), prompt


async def test_a_response_that_is_read_again_has_the_same_calls(tmp_path: Path) -> None:
    async with served_app(formats=THINKING, log=tmp_path / "log") as app:
        connection = await app.connect()
        connection.send("POST", PATH, BODY | {"stream": True}, x_request_id="known")
        await play(app, [f"<think>Hm.</think>Yes. {CALL}"])
        first = joined(await connection.events_after_head())
        whole = (await app.call("GET", "/v1/requests/known")).json()["choices"][0]["message"]
        assert whole["tool_calls"] == first[0]["tool_calls"]
        assert (whole["content"], whole["reasoning_content"]) == ("Yes.", "Hm.")
        rest = []
        for position in range(1, 60, 5):
            connection = await app.connect()
            connection.send("GET", "/v1/requests/known?stream=true", last_event_id=str(position))
            rest.append(joined(await connection.events_after_head())[0])
        assert [each["finish_reason"] for each in rest] == ["tool_calls"] * len(rest)
        assert all(first[0]["reasoning_content"].endswith(each.get("reasoning_content", "")) for each in rest)
        assert all(first[0]["content"].endswith(each["content"]) for each in rest)


async def test_calls_of_a_conversation_have_ids_of_their_own() -> None:
    """Also where an agent sends the same X-Request-Id with each of its requests."""
    ids = set()
    async with served_app(formats=HERMES) as app:
        for _ in range(3):
            call = asyncio.create_task(app.call("POST", PATH, BODY, x_request_id="agent"))
            await play(app, [CALL + NO_ARGUMENTS])
            ids |= {each["id"] for each in (await call).json()["choices"][0]["message"]["tool_calls"]}
    assert len(ids) == 6


async def test_a_schema_may_have_numbers_of_any_size(tmp_path: Path) -> None:
    """They are kept with a request that may be read again."""
    large = tool_of({"properties": {"a": {"type": "integer", "maximum": 10**20}}})
    async with served_app(formats=HERMES, log=tmp_path / "log") as app:
        call = asyncio.create_task(app.call("POST", PATH, BODY | {"tools": [large]}, x_request_id="mine"))
        await play(app, ["no"])
        assert (await call).status == 200
        assert (await app.call("GET", "/v1/requests/mine")).json() == (await call).json()


async def test_requests_that_cannot_be_answered() -> None:
    named = {"type": "function", "function": {"name": "h"}}
    async with served_app(formats=HERMES) as app:
        for fields, param in (
            ({"tool_choice": "always"}, "tool_choice"),
            ({"tool_choice": named}, "tool_choice.function.name"),
            ({"tool_choice": "required", "tools": []}, "tool_choice"),
            ({"tools": [TOOL, TOOL]}, "tools[1].function.name"),
            ({"tools": [{"type": "function"}]}, "tools[0].function"),
            *(({"tools": [TOOL, named_tool(name)]}, "tools[1].function.name") for name in BAD_NAMES),
            ({"tools": [OTHER, tool_of({"type": "integer"})], "tool_choice": "required"}, "tools[1].function.parameters"),
            ({"tools": [OTHER, tool_of({"type": ["null"]})], "tool_choice": named_choice("h")}, "tools[1].function.parameters"),
            (
                {"tools": [tool_of({"$id": "a:b", "title": "c"}), named_tool("d", {"$id": "a:b"})], "tool_choice": "required"},
                "tools[1].function.parameters",
            ),
        ):
            assert (await app.call("POST", PATH, BODY | fields)).error == (400, "invalid_value", param), fields
        custom = {"tools": [TOOL, {"type": "web_search"}]}
        assert (await app.call("POST", PATH, BODY | custom)).error == (400, "unsupported_parameter", "tools[1].type")
        both = {"tool_choice": "required", "structured_outputs": {"regex": "a"}}
        assert (await app.call("POST", PATH, BODY | both)).error == (400, "invalid_value", "structured_outputs")
    async with served_app() as app:
        assert (await app.call("POST", PATH, BODY)).error == (400, "unsupported_parameter", "tools")
        assert (await answer(app, ["4"], tool_choice="none")).status == 200


BAD_NAMES = ("a b", 'a"b', "a\nb", "</tool_call>", "", "a" * 257)


def tool_of(parameters: Any) -> dict[str, Any]:
    return named_tool("h", parameters)


def named_tool(name: str, parameters: Any = None) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def named_choice(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


SUB = {"q": {"$anchor": "Q", "type": "integer"}}


@pytest.mark.parametrize(
    "parameters",
    [
        {"properties": {"a": {"$ref": "#/$defs/q"}}, "$defs": SUB},
        {"properties": {"a": {"$ref": "#Q"}}, "$defs": SUB},
        {"$id": "https://x/y", "properties": {"a": {"$ref": "https://x/y#/$defs/q"}}, "$defs": SUB},
        {"properties": {"a": {"$ref": "z"}}, "$defs": {"q": {"$id": "z", "type": "integer"}}},
        {"type": ["object", "null"], "properties": {"a": {"enum": [1, {"$ref": "#/a"}]}}},
    ],
)
def test_schemas_of_tools_hold_in_required_calls(parameters: Any) -> None:
    """The references of each schema stay within it; what looks like one in a value is left alone."""
    pytest.importorskip("llguidance")
    grammars = Grammars(MODEL, 768, ())
    other = {"properties": {"a": {"$ref": "#/$defs/q"}}, "$defs": {"q": {"type": "null"}}}
    tools = [named_tool("o", other), tool_of(parameters | {"required": ["a"], "additionalProperties": False})]
    request = read_chat_request(json.dumps(BODY | {"tools": tools, "tool_choice": "required"}).encode(), "tiny")
    assert request.params.structured_outputs is not None
    tokenizer = Tokenizer(MODEL)
    has_enum = "enum" in parameters["properties"]["a"]
    for value, fits in ((1, True), ("x", False), ({"$ref": "#/a"}, has_enum), ({"$ref": "#/$defs/1/a"}, False)):
        matcher = grammars.matcher(request.params.structured_outputs)
        for token_id in tokenizer.encode(json.dumps([{"name": "h", "parameters": {"a": value}}]), False):
            matcher.accept(token_id)
        assert matcher.is_complete() == fits, (parameters, value, matcher.error)


def test_a_function_without_parameters_has_no_arguments() -> None:
    """One whose schema is empty has any, as in OpenAI's API."""
    schemas = [argument_schema({"type": "function", "function": {"name": "f"} | more}) for more in ({}, {"parameters": {}})]
    assert schemas == [{"type": "object", "properties": {}, "additionalProperties": False}, {"type": "object"}]


@pytest.mark.parametrize(("choice", "most"), [("required", None), (named_choice("f"), 1)])
def test_named_function_is_called_once(choice: Any, most: int | None) -> None:
    for tools in ([TOOL], [OTHER, TOOL]):
        request = read_chat_request(json.dumps(BODY | {"tools": tools, "tool_choice": choice}).encode(), "tiny")
        assert request.params.structured_outputs is not None
        assert json.loads(request.params.structured_outputs.json or "").get("maxItems") == most
        assert request.has_parallel_calls == (most is None)


@pytest.mark.parametrize(("path", "name"), [(PATH, "tools[1].function.parameters"), ("/v1/responses", "tools[1].parameters")])
async def test_tool_whose_schema_cannot_be_compiled_is_named(path: str, name: str) -> None:
    pytest.importorskip("llguidance")
    tools: list[Any] = [TOOL, tool_of({"properties": {"a": {"$ref": "#/$defs/none"}}}), OTHER]
    body: dict[str, Any] = {"messages": BODY["messages"], "tools": tools}
    if path != PATH:
        body = {"input": "Hi", "tools": [{"type": "function"} | tool["function"] for tool in tools]}
    async with served_app(formats=HERMES) as app:
        for choice in ("required", named_choice("h") if path == PATH else {"type": "function", "name": "h"}):
            response = await app.call("POST", path, body | {"tool_choice": choice})
            assert response.error == (400, "invalid_value", name)
            message = response.json()["error"]["message"]
            assert message.startswith(f"{name} cannot be used: ")
            assert "structured_outputs" not in message


async def test_format_whose_schema_cannot_be_compiled_is_named() -> None:
    pytest.importorskip("llguidance")
    schema = {"name": "n", "schema": {"$ref": "#/$defs/none"}}
    async with served_app() as app:
        body = {"messages": BODY["messages"], "response_format": {"type": "json_schema", "json_schema": schema}}
        response = await app.call("POST", PATH, body)
        assert response.error == (400, "invalid_value", "response_format")
        assert response.json()["error"]["message"].startswith("response_format cannot be used: ")


async def test_without_a_parser_calls_are_text() -> None:
    async with served_app(formats=OutputFormats("none", "none")) as app:
        assert (await answer(app, [CALL])).json()["choices"][0]["message"]["content"] == CALL


async def test_a_client_may_ask_for_the_text_as_it_is() -> None:
    """Tools are in the prompt all the same."""
    async with served_app(formats=THINKING) as app:
        choice = (await answer(app, [f"<think>Hm.</think>{CALL}"], parse_output=False)).json()["choices"][0]
        assert (choice["finish_reason"], choice["message"]) == ("stop", {"role": "assistant", "content": f"<think>Hm.</think>{CALL}"})
    async with served_app() as app:
        assert (await answer(app, [CALL], parse_output=False)).json()["choices"][0]["message"]["content"] == CALL


async def test_mistral_has_short_ids() -> None:
    async with served_app(formats=OutputFormats("mistral")) as app:
        calls = (await answer(app, ['[TOOL_CALLS]f{"a": ""}'])).json()["choices"][0]["message"]["tool_calls"]
        assert calls[0]["id"].isalnum()
        assert len(calls[0]["id"]) == 9
