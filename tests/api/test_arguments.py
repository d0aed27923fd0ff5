"""Wrong arguments raise in one line before anything is submitted."""

from __future__ import annotations

from collections import UserDict
from typing import Any

import pytest

import flowrt
from flowrt.api.arguments import TextPrompt, checked_prompt, checked_prompts
from flowrt.sampling_params import PARAMETER_TYPES, SamplingKeywords, SamplingParams, checked_params
from flowrt.serving.chat import Chat

USER = {"role": "user", "content": "hi"}


@pytest.mark.parametrize(
    ("parameters", "text"),
    [
        ({"temperature": "x"}, "temperature is 'x', it must be a number"),
        ({"temperature": None}, "temperature is None, it must be a number"),
        ({"temperature": True}, "temperature is True, it must be a number"),
        ({"temperature": 10**400}, "temperature is 1000"),
        ({"stop": (1,)}, "stop is (1,), it must be a text or a list of at most 64 texts"),
        ({"stop": 5}, "stop is 5, it must be a text or a list of at most 64 texts"),
        ({"stop": ("",)}, "stop is ('',), it must be a text or a list of at most 64 texts, each of 1 to 1024 characters"),
        ({"stop": ("\ud800",)}, "stop holds half a character"),
        ({"stop_token_ids": (True,)}, "stop_token_ids is (True,), it must be a list of at most 1024 whole numbers"),
        ({"max_tokens": "5"}, "max_tokens is '5', it must be a whole number from 1 to 2**63 - 1"),
        ({"max_tokens": True}, "max_tokens is True, it must be a whole number from 1 to 2**63 - 1"),
        ({"max_tokens": 10**40}, "max_tokens is 1000"),
        ({"n": 0}, "n is 0, it must be a whole number from 1 to 128"),
        ({"n": 129}, "n is 129, it must be a whole number from 1 to 128"),
        ({"max_tokens": None, "n": 10**5000}, "n is a int that cannot be shown, it must be"),
        ({"seed": 1.5}, "seed is 1.5, it must be a whole number from 0 to 2**63 - 1"),
        ({"seed": 1 << 64}, "seed is 1844"),
        ({"ignore_eos": "no"}, "ignore_eos is 'no', it must be true or false"),
        ({"ignore_eos": 1}, "ignore_eos is 1, it must be true or false"),
        ({"seed": "7" * 5000}, "seed is '7777"),
    ],
)
def test_a_wrong_value_is_refused_in_either_form(parameters: dict[str, Any], text: str) -> None:
    for params, keywords in ((SamplingParams(**parameters), {}), (None, parameters)):
        with pytest.raises(flowrt.ArgumentError) as caught:
            checked_params(params, keywords)
        assert str(caught.value).startswith(text)
        assert len(str(caught.value)) < 160
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("params", "keywords", "text"),
    [
        (None, {"max_token": 4}, "there is no parameter 'max_token'; did you mean max_tokens?"),
        (None, {"zzz": 4}, "there is no parameter 'zzz'; known are max_tokens, min_tokens"),
        (SamplingParams(), {"n": 2}, "both params and n are given"),
        ({"n": 2}, {}, "params is {'n': 2}, it must be a SamplingParams"),
    ],
)
def test_the_two_forms_are_not_mixed_and_unknown_names_are_refused(params: Any, keywords: dict[str, Any], text: str) -> None:
    with pytest.raises(flowrt.ArgumentError) as caught:
        checked_params(params, keywords)
    assert str(caught.value).startswith(text)


def test_values_are_converted_and_none_is_no_stop() -> None:
    given = {"stop_token_ids": iter([3]), "stop": "cd", "temperature": 1, "seed": None}
    assert checked_params(None, given) == SamplingParams(stop_token_ids=(3,), stop=("cd",), temperature=1.0)
    assert checked_params(None, {"stop": None, "stop_token_ids": None}) == checked_params(None, {}) == SamplingParams()


def test_keywords_are_the_parameters() -> None:
    assert list(SamplingKeywords.__annotations__) == list(PARAMETER_TYPES)


@pytest.mark.parametrize(
    ("prompt", "messages", "text"),
    [
        ([1.5], None, "prompt token 1.5 at position 0 is not a whole number"),
        ([1, True], None, "prompt token True at position 1 is not a whole number"),
        (["a"], None, "prompt token 'a' at position 0 is not a whole number"),
        (None, None, "the prompt is None, it must be a text or a sequence of token ids"),
        (5, None, "the prompt is 5, it must be"),
        (b"ab", None, "the prompt is b'ab', it must be"),
        ({1: 2}, None, "the prompt is {1: 2}, it must be"),
        ("half \ud800", None, "the prompt holds half a character"),
        ("text", [USER], "both a prompt and messages are given"),
        (None, [], "messages is [], it must be a list of messages such as {'role': 'user', 'content': 'Hello'}"),
        (None, "hi", "messages is 'hi', it must be"),
        (None, USER, "messages is {'role': 'user', 'content': 'hi'}, it must be"),
        (
            None,
            [USER, "hi"],
            "the chat has a value of a wrong type: Expected object, got str - at messages[1]; a message is such as {'role'",
        ),
        (None, [{"role": "user"}], "messages[0].content is missing"),
        (None, [{"role": 1, "content": "x"}], "messages[0].role is of a wrong type: expected str, got int"),
        (None, [{"role": "user", "content": [{"type": "image_url"}]}], "messages[0].content[0] has the type 'image_url', which is not"),
        (None, [{"role": "user", "content": object}], "messages cannot be written as JSON"),
        (None, [{"role": "user", "content": "half \ud800"}], "messages cannot be written as JSON"),
    ],
)
def test_a_wrong_prompt_is_refused(prompt: Any, messages: Any, text: str) -> None:
    with pytest.raises(flowrt.ArgumentError) as caught:
        checked_prompt(prompt, messages)
    assert str(caught.value).startswith(text)
    assert "\n" not in str(caught.value)


def test_prompts_of_each_form() -> None:
    assert checked_prompt("a", None) == TextPrompt("a")
    call = {"id": "c1", "function": {"name": "f", "arguments": "{}"}}
    messages = ({"role": "assistant", "tool_calls": (call,)}, UserDict(USER))
    assert checked_prompt(None, messages) == TextPrompt(Chat([{"role": "assistant", "tool_calls": [call]}, USER]))
    keywords: Any = {"tools": [call], "documents": None, "continue_final_message": True, "chat_template_kwargs": {"a": (1,)}}
    assert checked_prompt(None, [USER], chat=keywords) == TextPrompt(Chat([USER], [call], None, False, True, {"a": [1]}))
    assert checked_prompt(range(10**12), None, max_tokens=100) == range(10**12), "too long to be scanned: refused for its length later"
    assert checked_prompts("a") == [("a", None)]
    assert checked_prompts([1, 2]) == [([1, 2], None)]
    assert checked_prompts([USER]) == [(None, [USER])]
    assert checked_prompts(["a", [1, 2], [USER]]) == [("a", None), ([1, 2], None), (None, [USER])]
    assert checked_prompts([]) == []
    with pytest.raises(flowrt.ArgumentError, match="prompts is None, it must be a text"):
        checked_prompts(None)
    with pytest.raises(flowrt.ArgumentError, match=r"the prompt is 1\.5"):
        checked_prompts([1.5])
    with pytest.raises(flowrt.ArgumentError, match="tools is given without messages"):
        checked_prompts(["a"], {"tools": []})
    with pytest.raises(flowrt.ArgumentError, match=r"wrong type: Expected bool, got int - at add_generation_prompt"):
        checked_prompt(None, [USER], chat={"add_generation_prompt": 1})  # type: ignore[typeddict-item]
