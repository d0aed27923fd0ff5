"""Bodies of requests: what is read, and which error names the field that is wrong."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowrt.sampling_params import SamplingParams
from flowrt.serving import json_body
from flowrt.serving.api_errors import ApiError
from flowrt.serving.api_request import CompletionRequest, read_chat_request, read_completion_request
from flowrt.serving.chat import Chat
from flowrt.serving.json_body import TokenIds, estimated_tokens
from flowrt.structured_outputs import StructuredOutputs

USER = {"role": "user", "content": "hello"}


def chat(**fields: Any) -> CompletionRequest:
    return read_chat_request(json.dumps({"messages": [USER]} | fields).encode(), "tiny")


def complete(**fields: Any) -> CompletionRequest:
    return read_completion_request(json.dumps({"prompt": "hello"} | fields).encode(), "tiny")


def prompts_of(**fields: Any) -> list[Any]:
    return [prompt.read() if isinstance(prompt, TokenIds) else prompt for prompt in complete(**fields).prompts]


def test_sampling_parameters_are_read_with_the_defaults_of_the_api() -> None:
    assert complete().params == SamplingParams(temperature=1.0, max_tokens=16)
    assert chat().params == SamplingParams(temperature=1.0)
    given = {"temperature": 0, "top_p": 0.5, "top_k": -1, "seed": 7, "n": 2, "min_tokens": 3, "ignore_eos": True, "stop": "x"}
    given |= {"presence_penalty": 1, "frequency_penalty": -1, "repetition_penalty": 1.5, "stop_token_ids": [3], "max_completion_tokens": 9}
    assert chat(**given).params == SamplingParams(
        temperature=0.0,
        top_p=0.5,
        seed=7,
        n=2,
        min_tokens=3,
        ignore_eos=True,
        stop=("x",),
        presence_penalty=1.0,
        frequency_penalty=-1.0,
        repetition_penalty=1.5,
        stop_token_ids=(3,),
        max_tokens=9,
    )
    assert chat(max_tokens=9, max_completion_tokens=9).params.max_tokens == 9
    assert complete(logit_bias={"30": -100, "5": 1.5}).params.logit_bias == ((5, 1.5), (30, -100.0))
    assert chat(logprobs=True).params.logprobs == 0
    assert chat(logprobs=True, top_logprobs=5).params.logprobs == complete(logprobs=5).params.logprobs == 5


def test_defaults_of_the_model_hold_for_fields_that_are_not_given() -> None:
    defaults = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "max_tokens": 99}
    body = json.dumps({"messages": [USER], "top_k": -1}).encode()
    assert read_chat_request(body, "tiny", defaults).params == SamplingParams(temperature=0.6, top_p=0.95, max_tokens=99)
    body = json.dumps({"messages": [USER], "max_tokens": None, "temperature": None, "top_p": 1}).encode()
    assert read_chat_request(body, "tiny", defaults).params == SamplingParams(temperature=0.6, top_k=20, max_tokens=99)
    body = json.dumps({"prompt": "hello", "temperature": 0}).encode()
    assert read_completion_request(body, "tiny", defaults).params == SamplingParams(top_p=0.95, top_k=20, max_tokens=16)
    for given_tokens, limited in ((200, 99), (50, 50)):  # a bound of all requests, as in vLLM
        body = json.dumps({"prompt": "hello", "max_tokens": given_tokens}).encode()
        assert read_completion_request(body, "tiny", defaults).params.max_tokens == limited


def test_what_vllm_adds_is_read() -> None:
    assert complete(max_tokens=None).params.max_tokens is None, "as many as fit"
    request = complete(return_token_ids=True, return_tokens_as_token_ids=True)
    assert request.has_token_ids
    assert request.names_token_ids


def test_messages_are_passed_on_as_they_are() -> None:
    """What agents send back: the template decides about keys that OpenAI's API does not have."""
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"city": "Bonn"}'}}
    messages = [
        {"role": "system", "content": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}, "b"], "name": "x"},
        USER | {"id": "m1", "cache_control": None, "provider_specific_fields": {"a": [1.5]}},
        {"role": "assistant", "content": None, "tool_calls": [call], "refusal": "", "annotations": [{}], "reasoning": "hm"},
        {"role": "tool", "tool_call_id": "c1", "content": "4 degrees"},
        {"role": "function", "name": "f", "content": "4"},
        {"role": "assistant", "tool_calls": [call | {"function": {"name": "f"}}]},
        {"role": "critic", "content": [{"type": "input_text", "text": "x"}, {"type": "refusal", "refusal": "no"}]},
    ]
    assert chat(messages=messages).prompts == (Chat(messages),)


def test_what_the_template_sees_beside_the_messages() -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    request = chat(tools=tools, documents=[{"title": "a"}], reasoning_effort="low", chat_template_kwargs={"enable_thinking": False})
    assert request.prompts == (Chat([USER], tools, [{"title": "a"}], kwargs={"reasoning_effort": "low", "enable_thinking": False}),)
    assert (request.tools, request.add_special_tokens) == (tools, False)
    continued = [USER, {"role": "assistant", "content": "It is"}]
    assert chat(messages=continued, continue_final_message=True).prompts == (Chat(continued, None, None, False, True),)
    assert chat(add_generation_prompt=False).prompts == (Chat([USER], None, None, False),)
    assert chat(add_special_tokens=True).add_special_tokens
    assert complete().add_special_tokens
    assert not complete(add_special_tokens=False).add_special_tokens


def test_usage_is_requested_at_the_end_or_in_each_chunk() -> None:
    def usage(**options: Any) -> tuple[bool, bool]:
        request = chat(stream=True, stream_options=options)
        return request.includes_usage, request.has_continuous_usage

    assert usage(include_usage=True, continuous_usage_stats=True) == (True, True)
    assert usage(include_usage=True, continuous_usage_stats=False, include_obfuscation=False) == (True, False)
    assert usage(include_usage=None, continuous_usage_stats=True) == usage(x=[1]) == usage() == (False, False)
    assert not chat(stream_options={"include_usage": False}).includes_usage


def test_prompts_may_be_texts_and_token_ids() -> None:
    assert prompts_of(prompt=["a", [1, 2]]) == ["a", (1, 2)]
    assert prompts_of(prompt=[1, 2]) == [(1, 2)]
    assert prompts_of(prompt=[]) == prompts_of(prompt=[[]]) == [()]
    assert prompts_of(prompt="") == [""]
    with pytest.raises(ApiError, match="prompt holds bytes that are not UTF-8"):
        read_completion_request(b'{"prompt": "\xff"}', "tiny")
    ids, none, two = complete(prompt=[[1, 2, 3], [], [1, 2]]).prompts
    assert [estimated_tokens(prompt) for prompt in ("abcd", Chat([USER]), ids, none, two)] == [2, 11, 3, 0, 2]


def test_what_is_too_long_is_not_decoded() -> None:
    """JSON that is wrong at its end shows it: the error is about the length."""
    user, ids = b'"messages":[{"role":"user","content":""}]', b"0," * 150_000
    many = b'"messages":[{"role":"user","content":"%s"},{"a":[%s{}]}]' % (b'x\\"' * 100_000, b"0," * 300_000)
    for field, body, text in (
        ("prompt", b'"prompt":["",%s5]' % (b"[5]," * 129), "more than 128"),
        ("messages", b'"messages":[%s5]' % (b'{"role":"user","content":""},' * 4097), "at most 4096 messages"),
        ("messages", many, "have more than 512 KiB besides their texts"),
        ("abc", user + b',"abc":[%s{}]' % ids, "there is no field"),
        *((name, user + b',"%s":[%s{}]' % (name.encode(), ids), "more than 256 KiB besides") for name in ("tools", "stop", "logit_bias")),
    ):
        read = read_completion_request if field == "prompt" else read_chat_request
        with pytest.raises(ApiError, match=text) as caught:
            read(b"{%s}" % body, "")
        assert caught.value.param == field


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [], "documents": [], "tool_choice": "auto", "functions": []},
        {"response_format": {"type": "text"}, "modalities": ["text"], "n": 1.0},
        {"logit_bias": {}, "user": "me", "metadata": {"a": "b"}, "model": "tiny", "request_id": "r"},
        {"prompt_cache_key": "k", "prompt_cache_retention": "24h", "store": True, "service_tier": "priority", "verbosity": "low"},
        {"bad_words": [], "length_penalty": 1.0, "early_stopping": False, "echo": False, "spaces_between_special_tokens": False},
        {"logprobs": False, "top_logprobs": 0, "seed": -1, "top_k": -1, "chat_template_kwargs": {}, "parallel_tool_calls": False},
        dict.fromkeys(["seed", "tools", "stream_options", "thinking", "guided_json", "response_format", "xyz"]),
    ],
)
def test_fields_that_ask_for_nothing_are_taken(fields: dict[str, Any]) -> None:
    assert chat(**fields) == chat()


def test_structured_outputs_of_each_form() -> None:
    schema = {"type": "object", "properties": {"b": {}, "a": {}}}
    expected = StructuredOutputs(json='{"type":"object","properties":{"b":{},"a":{}}}')
    named = {"type": "json_schema", "json_schema": {"name": "x", "description": "y", "strict": True, "schema": schema}}
    assert chat(response_format=named).params.structured_outputs == expected
    for value in ({"json": schema}, {"json": json.dumps(schema)}, {"json": schema, "regex": None, "disable_any_whitespace": False}):
        assert complete(structured_outputs=value).params.structured_outputs == expected
    assert chat(response_format={"type": "json_object"}).params.structured_outputs == StructuredOutputs(json_object=True)
    assert chat(response_format={"type": "text"}) == chat(response_format=None) == chat(structured_outputs=None) == chat()
    assert chat(structured_outputs={"choice": ["a", "b"]}).params.structured_outputs == StructuredOutputs(choice=("a", "b"))


def test_unsupported_fields_are_named_together() -> None:
    with pytest.raises(ApiError) as caught:
        chat(guided_json={"type": "object"}, use_beam_search=True, min_pp=0.1, **{f"x{number}": 1 for number in range(100)})
    assert 'guided_json is not supported; write structured_outputs: {"json": ...}' in caught.value.message
    assert "use_beam_search is not supported" in caught.value.message
    assert len(caught.value.message) < 1000
    fields = {"use_beam_search": True, "length_penalty": 2.0, "early_stopping": True, "truncate_prompt_tokens": 5}
    fields |= {"logits_processors": ["a"], "vllm_xargs": {"a": 1}, "detokenize": False, "structural_tag": "{}"}
    with pytest.raises(ApiError) as caught:
        complete(**fields)
    assert all(f"{name} is not supported" in caught.value.message for name in fields)


TEXT_MESSAGE = {"role": "user", "content": [{"type": "text", "text": "hello"}]}
CALLS = [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
TOOLS = [{"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}, "strict": False}}]
STREAMED = {"stream": True, "stream_options": {"include_usage": True}}


@pytest.mark.parametrize(
    "fields",
    [
        {"max_tokens": 4096, "temperature": 0.5, "stop": ["x"], **STREAMED, "tools": TOOLS, "parallel_tool_calls": False},  # Continue
        {"messages": [{"role": "system", "content": "x"}, TEXT_MESSAGE], "temperature": 0, **STREAMED},  # Cline
        {"messages": [USER | {"cache_control": {"type": "ephemeral"}}], "stream": True, "temperature": 0, "metadata": {"a": 1}},  # aider
        {"messages": [USER | {"type": "text"}], "max_tokens": 256, "temperature": 0, "seed": 1234, "stop": ["<|im_end|>"]},  # lm-eval
        {"messages": [TEXT_MESSAGE], "max_tokens": 9, "max_completion_tokens": 9, "stop": None, "ignore_eos": True}  # GuideLLM
        | {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
        {
            "messages": [
                USER,
                {"role": "assistant", "content": None, "tool_calls": CALLS},
                {"role": "tool", "content": "4", "tool_call_id": "c1"},
            ]
        }
        | {"stream": False, "tools": TOOLS, "tool_choice": "auto"},  # LangChain
        {"messages": [USER, {"role": "assistant", "content": "x", "refusal": None, "function_call": None, "audio": None}, USER]},  # openai
        {"frequency_penalty": 0, "presence_penalty": 0, "top_p": 1, "n": 1, "logprobs": False, "user": "u", **STREAMED},  # Open WebUI
    ],
)
def test_requests_that_clients_send_by_default_are_read(fields: dict[str, Any]) -> None:
    assert chat(**fields).params.n == 1


def test_what_completions_ask_for_nothing_is_taken() -> None:
    assert complete(best_of=1, suffix=None, tools=None, messages=None, user="me", max_tokens=16.0) == complete()


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"tools": [{}]}, "invalid_value", "tools[0].function"),
        ({"tools": [{"function": {"name": 5}}]}, "invalid_value", "tools[0].function.name"),
        ({"tools": {}}, "invalid_value", "tools"),
        ({"documents": ["a"]}, "invalid_value", "documents[0]"),
        ({"chat_template_kwargs": []}, "invalid_value", "chat_template_kwargs"),
        ({"chat_template_kwargs": {"messages": []}}, "invalid_value", "chat_template_kwargs.messages"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "invalid_value", "continue_final_message"),
        ({"best_of": 2}, "unsupported_parameter", "best_of"),
        ({"thinking": None, "thinkin": 1}, "unsupported_parameter", "thinkin"),
        ({"a\nb": 1}, "unsupported_parameter", "a\nb"),
        ({"echo": True}, "unsupported_parameter", "echo"),
        ({"response_format": {"type": "xml"}}, "invalid_value", "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "invalid_value", "response_format"),
        ({"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}, "invalid_value", "response_format"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "invalid_value", "structured_outputs"),
        ({"structured_outputs": {"structural_tag": {}}}, "invalid_value", "structured_outputs"),
        ({"guided_json": {"type": "object"}}, "unsupported_parameter", "guided_json"),
        ({"bad_words": [""]}, "invalid_value", "bad_words"),
        ({"chat_template": "{{ 1 }}"}, "unsupported_parameter", "chat_template"),
        ({"logit_bias": {"5": 101}}, "invalid_value", "logit_bias"),
        ({"logit_bias": {"five": 1}}, "invalid_value", "logit_bias"),
        ({"logit_bias": {str(number): 1 for number in range(1025)}}, "invalid_value", "logit_bias"),
        ({"return_token_ids": 1}, "invalid_value", "return_token_ids"),
        ({"temprature": 1}, "unsupported_parameter", "temprature"),
        ({"stream_options": {"include_usage": 1}, "stream": True}, "invalid_value", "stream_options.include_usage"),
        ({"stream_options": [], "stream": True}, "invalid_value", "stream_options"),
        ({"stream_options": {"include_usage": True}}, "invalid_value", "stream_options"),
        ({"stream": 1}, "invalid_value", "stream"),
        ({"n": 129}, "invalid_value", "n"),
        ({"n": 1 << 70}, "invalid_value", "n"),
        ({"temperature": -1}, "invalid_value", "temperature"),
        ({"temperature": "1"}, "invalid_value", "temperature"),
        ({"top_p": 0}, "invalid_value", "top_p"),
        ({"seed": -2}, "invalid_value", "seed"),
        ({"stop": ["a"] * 65}, "invalid_value", "stop"),
        ({"stop": [""]}, "invalid_value", "stop"),
        ({"stop": {"a": 1}}, "invalid_value", "stop"),
        ({"max_tokens": 0}, "invalid_value", "max_tokens"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, "invalid_value", "max_completion_tokens"),
        ({"top_logprobs": 2}, "invalid_value", "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "invalid_value", "top_logprobs"),
        ({"logprobs": 5}, "invalid_value", "logprobs"),
        ({"messages": []}, "invalid_value", "messages"),
        ({"messages": "hello"}, "invalid_value", "messages"),
        ({"messages": [USER] * 4097}, "invalid_value", "messages"),
        ({"messages": ["hello"]}, "invalid_value", "messages[0]"),
        ({"messages": [USER, {"content": ""}]}, "invalid_value", "messages[1].role"),
        ({"messages": [{"role": "user"}]}, "invalid_value", "messages[0].content"),
        ({"messages": [USER | {"content": 5}]}, "invalid_value", "messages[0].content"),
        ({"messages": [USER | {"content": [{"text": "a"}]}]}, "invalid_value", "messages[0].content[0].type"),
        ({"messages": [USER | {"content": ["a", {"type": "text"}]}]}, "invalid_value", "messages[0].content[1].text"),
        ({"messages": [USER | {"content": ["a", {"type": "image_url"}]}]}, "unsupported_parameter", "messages[0].content[1]"),
        ({"messages": [USER | {"content": [{"type": "input_audio"}]}]}, "unsupported_parameter", "messages[0].content[0]"),
        ({"messages": [USER, {"role": "assistant", "audio": {"id": "a"}}]}, "unsupported_parameter", "messages[1].audio"),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "invalid_value", "messages[0].tool_calls[0].function"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": 5}}]}]},
            "invalid_value",
            "messages[0].tool_calls[0].function.arguments",
        ),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "invalid_value", None),
        ({"messages": [USER, None]}, "invalid_value", "messages[1]"),
        ({"model": "other"}, "model_not_found", "model"),
    ],
)
def test_wrong_field_of_a_chat_is_named(fields: dict[str, Any], code: str, param: str | None) -> None:
    with pytest.raises(ApiError) as caught:
        chat(**fields)
    assert (caught.value.kind.code, caught.value.param) == (code, param)
    assert "\n" not in caught.value.message
    assert len(caught.value.body) < 2000


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"prompt": None}, "invalid_value", "prompt"),
        ({"prompt": 5}, "invalid_value", "prompt"),
        ({"prompt": ["a", 5]}, "invalid_value", "prompt[1]"),
        ({"prompt": [[1], [1, -1]]}, "invalid_value", "prompt[1]"),
        ({"prompt": [1, True]}, "invalid_value", "prompt"),
        ({"prompt": [1, -1]}, "invalid_value", "prompt"),
        ({"prompt": ["a"] * 129}, "invalid_value", "prompt"),
        ({"prompt": ["a"] * 20, "n": 10}, "invalid_value", "prompt"),
        ({"best_of": 2}, "unsupported_parameter", "best_of"),
        ({"max_tokens": False}, "invalid_value", "max_tokens"),
        ({"max_tokens": -1}, "invalid_value", "max_tokens"),
        ({"prompt_logprobs": 21}, "invalid_value", "prompt_logprobs"),
        ({"prompt_logprobs": 1, "echo": True, "logprobs": 2}, "invalid_value", "prompt_logprobs"),
        ({"max_completion_tokens": 5}, "unsupported_parameter", "max_completion_tokens"),
        ({"messages": [USER]}, "unsupported_parameter", "messages"),
    ],
)
def test_wrong_field_of_a_completion_is_named(fields: dict[str, Any], code: str, param: str) -> None:
    with pytest.raises(ApiError) as caught:
        prompts_of(**fields)
    assert (caught.value.kind.code, caught.value.param) == (code, param)


@pytest.mark.parametrize("body", [b"", b"5", b"[]", b"{", b'{"prompt": NaN}', b"\xff", b'{"a":' * 50_000, b'{"x\xff": 1}'])
def test_what_is_not_a_json_object_is_refused(body: bytes) -> None:
    with pytest.raises(ApiError, match=r"is not|nests deeper"):
        read_completion_request(body, "tiny")


def test_half_a_character_is_named() -> None:
    """Python's json.dumps writes such texts."""
    for text in ("\ud800", "a\udc00b"):
        with pytest.raises(ApiError, match="half a character"):
            complete(stop=text)
    assert prompts_of(prompt="\U0001f600") == ["\U0001f600"]
    with pytest.raises(ApiError, match="is not JSON: trailing"):
        read_completion_request(json.dumps({"prompt": "\U0001f600"}).encode() + b"}", "tiny")


@pytest.mark.parametrize("depth", [129, 500, 600])
def test_depth_of_values_is_bounded(depth: int) -> None:
    """Templates, grammars and schemas of tools are functions that call themselves."""

    def nested(levels: int) -> Any:
        value: Any = "a"
        for _ in range(levels):
            value = {"properties": value}
        return value

    def tools(parameters: Any) -> dict[str, Any]:
        return {"tools": [{"type": "function", "function": {"name": "f", "parameters": parameters}}], "tool_choice": "required"}

    for param, fields in (
        ("tools", tools(nested(depth))),
        ("chat_template_kwargs", {"chat_template_kwargs": nested(depth)}),
        ("structured_outputs", {"structured_outputs": {"json": nested(depth)}}),
        ("messages[1]", {"messages": [USER, USER | {"extra": nested(depth)}]}),
    ):
        with pytest.raises(ApiError, match="nests deeper than 128") as caught:
            chat(**fields)
        assert caught.value.param == param
    assert chat(**tools(nested(120))).params.structured_outputs is not None


def test_long_text_of_a_schema_is_not_decoded() -> None:
    """The error is about the length, not about the end, which is wrong."""
    for spaces, text in ((10_000, "must be a JSON schema"), (1 << 20, "without white space")):
        with pytest.raises(ApiError, match=text) as caught:
            chat(structured_outputs={"json": '{"type": ' + " " * spaces})
        assert caught.value.param == "structured_outputs"


@pytest.mark.parametrize("number", [b"1e400", b"-1e400", b"1" * 5000, b'{"5": 1e400}'])
def test_number_out_of_range_is_refused_with_its_field(number: bytes) -> None:
    for name in ("temperature", "seed", "logit_bias", "model", "best_of"):
        with pytest.raises(ApiError, match="out of range") as caught:
            read_completion_request(b'{"prompt": "a", "%s": %s}' % (name.encode(), number), "tiny")
        assert (caught.value.kind.code, caught.value.param) == ("invalid_value", name)


SMALL = st.none() | st.booleans() | st.integers(-(1 << 70), 1 << 70) | st.floats() | st.text(max_size=5) | st.just("user")
VALUES = st.recursive(SMALL, lambda each: st.lists(each, max_size=3) | st.dictionaries(st.text(max_size=3), each, max_size=3), max_leaves=8)
KEYS = st.sampled_from(["role", "content", "name", "tool_calls", "function", "type", "text"])
MESSAGES = st.lists(st.dictionaries(KEYS, VALUES), max_size=3)
BODIES = st.dictionaries(st.sampled_from(sorted(json_body.FIELDS)) | st.text(max_size=4), VALUES | MESSAGES, max_size=5)


@settings(max_examples=100, deadline=None)
@given(BODIES, st.integers(0, 1 << 16), st.binary(max_size=3))
def test_any_body_is_read_or_refused_with_one_line(fields: dict[str, Any], at: int, piece: bytes) -> None:
    """Bodies whose fields have any values, whole or with some bytes replaced."""
    whole = json.dumps({"prompt": [1, 2], "messages": [USER]} | fields, ensure_ascii=False).encode(errors="surrogatepass")
    for body in (whole, whole[: at % len(whole)] + piece + whole[at % len(whole) + 1 :]):
        for read in (read_chat_request, read_completion_request):
            refused: ApiError | None = None
            try:
                for prompt in read(body, "tiny").prompts:
                    assert isinstance(prompt, str | Chat) or all(type(token_id) is int for token_id in prompt.read())
            except ApiError as error:
                refused = error
            if refused is not None:
                assert refused.kind.status in (400, 404)
                assert "\n" not in refused.message
                assert len(json.loads(refused.body)["error"]["message"]) < 1000
