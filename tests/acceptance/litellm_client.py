"""Uses a server through LiteLLM: python litellm_client.py BASE_URL KEY MODEL. Needs litellm alone."""

from __future__ import annotations

import json
import sys
from typing import Any

import litellm

QUESTION = [{"role": "user", "content": "How warm is it?"}]
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [{"type": "function", "function": {"name": "weather", "description": "Of a city.", "parameters": PARAMETERS}}]


def check_chat(options: dict[str, Any]) -> None:
    message = litellm.completion(messages=QUESTION, **options).choices[0].message
    assert (message.content, message.reasoning_content) == ("Hello.", "No tools."), message


def check_tools(options: dict[str, Any]) -> None:
    response = litellm.completion(messages=QUESTION, tools=TOOLS, tool_choice="auto", **options)
    message = response.choices[0].message
    assert response.choices[0].finish_reason == "tool_calls"
    assert json.loads(message.tool_calls[0].function.arguments) == {"city": "Paris"}
    answered = [*QUESTION, message.model_dump(), {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "21 degrees"}]
    assert litellm.completion(messages=answered, tools=TOOLS, **options).choices[0].message.content == "It is 21 degrees."


def check_stream(options: dict[str, Any]) -> None:
    chunks = list(litellm.completion(messages=QUESTION, tools=TOOLS, stream=True, stream_options={"include_usage": True}, **options))
    whole = litellm.stream_chunk_builder(chunks)
    assert whole.choices[0].finish_reason == "tool_calls"
    assert json.loads(whole.choices[0].message.tool_calls[0].function.arguments) == {"city": "Paris"}
    assert whole.choices[0].message.reasoning_content == "I call weather."


def check_responses(options: dict[str, Any]) -> None:
    response = litellm.responses(input="Hi", **options)
    assert [item.type for item in response.output] == ["reasoning", "message"]
    assert response.output[1].content[0].text == "Hello."


def main(base_url: str, key: str, model: str) -> None:
    options = {"model": f"openai/{model}", "api_base": base_url, "api_key": key}
    litellm.suppress_debug_info = True
    for check in (check_chat, check_tools, check_stream, check_responses):
        check(options)
        print(check.__name__.removeprefix("check_"), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
