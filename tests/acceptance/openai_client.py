"""Uses a server as programs with the `openai` package do: python openai_client.py BASE_URL KEY MODEL. Needs openai alone.

Not a test of the suite. Each check is a function; one line per check goes to standard output.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from typing import Any

import openai

PROMPT = "Once upon a time"
SUM: list[dict[str, str]] = [{"role": "user", "content": "What is 347 + 285?"}]
IGNORE_EOS = {"ignore_eos": True}
ADD: dict[str, object] = {
    "type": "object",
    "properties": {"sign": {"enum": ["plus", "minus"]}, "exact": {"type": "boolean"}},
    "required": ["sign", "exact"],
    "additionalProperties": False,
}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "add", "parameters": ADD}},
    {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}, "additionalProperties": False}}},
]


def check_models(client: openai.OpenAI, model: str) -> None:
    assert [each.id for each in client.models.list()] == [model]


def check_stream(client: openai.OpenAI, model: str) -> None:
    whole = client.chat.completions.create(model=model, messages=SUM, temperature=0)
    options = {"include_usage": True}
    *chunks, last = client.chat.completions.create(model=model, messages=SUM, temperature=0, stream=True, stream_options=options)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content == " 632"
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason == "stop"
    assert last.usage == whole.usage
    assert whole.usage.completion_tokens > 0


def check_n(client: openai.OpenAI, model: str) -> None:
    response = client.completions.create(model=model, prompt=PROMPT, n=3, seed=1, max_tokens=12, temperature=1, extra_body=IGNORE_EOS)
    assert [choice.index for choice in response.choices] == [0, 1, 2]
    assert len({choice.text for choice in response.choices}) > 1
    assert response.usage.completion_tokens == 36


def check_stop(client: openai.OpenAI, model: str) -> None:
    full = client.completions.create(model=model, prompt=PROMPT, max_tokens=30, temperature=0, extra_body=IGNORE_EOS).choices[0].text
    word = full[len(full) // 2 :][:4]
    response = client.completions.create(model=model, prompt=PROMPT, max_tokens=30, temperature=0, stop=word, extra_body=IGNORE_EOS)
    assert response.choices[0].text == full[: full.index(word)]
    assert response.choices[0].finish_reason == "stop"


def check_seed(client: openai.OpenAI, model: str) -> None:
    def text(seed: int) -> str:
        response = client.completions.create(model=model, prompt=PROMPT, max_tokens=20, temperature=1, seed=seed, extra_body=IGNORE_EOS)
        return response.choices[0].text

    assert text(7) == text(7) != text(8)


def check_logprobs(client: openai.OpenAI, model: str) -> None:
    chat = client.chat.completions.create(model=model, messages=SUM, temperature=0, logprobs=True, top_logprobs=3)
    tokens = chat.choices[0].logprobs.content
    assert len(tokens) == chat.usage.completion_tokens
    for token in tokens:
        assert len(token.top_logprobs) == 3
        assert token.logprob == max(each.logprob for each in token.top_logprobs) <= 0
    text = client.completions.create(model=model, prompt=PROMPT, max_tokens=5, temperature=0, logprobs=2, extra_body=IGNORE_EOS)
    assert len(text.choices[0].logprobs.token_logprobs) == 5


def check_prompt_logprobs(client: openai.OpenAI, model: str) -> None:
    """As lm-evaluation-harness scores texts."""
    options = {"model": model, "prompt": PROMPT, "temperature": 0, "echo": True, "logprobs": 2}
    scored = client.completions.create(max_tokens=0, **options)
    found = scored.choices[0].logprobs
    assert (scored.choices[0].text, scored.usage.completion_tokens) == (PROMPT, 0)
    assert len(found.tokens) == len(found.token_logprobs) == len(found.top_logprobs) == scored.usage.prompt_tokens
    assert (found.token_logprobs[0], found.top_logprobs[0]) == (None, None)
    assert all(logprob <= 0 for logprob in found.token_logprobs[1:])
    both = client.completions.create(max_tokens=3, extra_body=IGNORE_EOS, **options).choices[0].logprobs
    assert (len(both.tokens), both.tokens[: len(found.tokens)]) == (len(found.tokens) + 3, found.tokens)


def check_tools(client: openai.OpenAI, model: str) -> None:
    """Constrained: the model was not trained to call tools."""
    options = {"model": model, "messages": SUM, "tools": TOOLS, "seed": 1, "max_tokens": 120}
    for choice, names in (("required", {"add", "now"}), ({"type": "function", "function": {"name": "add"}}, {"add"})):
        whole = client.chat.completions.create(tool_choice=choice, parallel_tool_calls=False, **options).choices[0]
        stream = list(client.chat.completions.create(tool_choice=choice, parallel_tool_calls=False, stream=True, **options))
        (call,) = whole.message.tool_calls
        assert (whole.finish_reason, whole.message.content) == ("tool_calls", None)
        assert call.function.name in names
        assert stream[-1].choices[0].finish_reason == "tool_calls"
        parts = [part for chunk in stream for part in chunk.choices[0].delta.tool_calls or []]
        assert (parts[0].function.name, parts[0].type) == (call.function.name, "function")
        assert "".join(part.function.arguments or "" for part in parts) == call.function.arguments
        assert json.loads(call.function.arguments).keys() == ({"sign", "exact"} if call.function.name == "add" else set())
    answered = [*SUM, whole.message, {"role": "tool", "tool_call_id": call.id, "content": "632"}, *SUM]
    error = raised_by(lambda: client.chat.completions.create(model=model, messages=answered, max_tokens=4))
    assert error is None or "leaves no trace" in error.body["message"], error  # this model's template takes no tools


def check_responses(client: openai.OpenAI, model: str) -> None:
    whole = client.responses.create(model=model, input=SUM[0]["content"], temperature=0)
    assert (whole.output_text, whole.status) == (" 632", "completed")
    with client.responses.stream(model=model, input=SUM, temperature=0) as stream:
        types = [event.type for event in stream]
        assert stream.get_final_response().output_text == " 632"
    assert (types[0], types[-1]) == ("response.created", "response.completed")
    functions = [{"type": "function", **tool["function"], "strict": True} for tool in TOOLS]
    options = {"model": model, "input": SUM[0]["content"], "tools": functions, "max_output_tokens": 120, "extra_body": {"seed": 1}}
    choice = {"type": "function", "name": "add"}
    (call,) = client.responses.create(tool_choice=choice, **options).output
    assert (call.type, call.name, call.status) == ("function_call", "add", "completed")
    with client.responses.stream(tool_choice=choice, **options) as stream:
        assert stream.get_final_response().output[0].arguments == call.arguments
    assert isinstance(
        raised_by(lambda: client.responses.create(model=model, input="a", previous_response_id="resp_1")), openai.BadRequestError
    )
    assert isinstance(raised_by(lambda: client.responses.retrieve(whole.id)), openai.NotFoundError)


def check_errors(client: openai.OpenAI, model: str) -> None:
    for kind, call in (
        (openai.NotFoundError, lambda: client.completions.create(model="another", prompt="a")),
        (openai.BadRequestError, lambda: client.chat.completions.create(model=model, messages=SUM, temperature=-1)),
        (openai.BadRequestError, lambda: client.chat.completions.create(model=model, messages=SUM, tools=[{"type": "function"}])),
        (openai.AuthenticationError, lambda: client.with_options(api_key="wrong").models.list()),
    ):
        error = raised_by(call)
        assert isinstance(error, kind), f"{error!r} is not {kind.__name__}"
        assert error.body["message"]


def raised_by(call: Callable[[], object]) -> Exception | None:
    try:
        call()
    except Exception as error:
        return error
    return None


def check_abort(client: openai.OpenAI, model: str) -> None:
    for _ in range(20):
        stream = client.completions.create(model=model, prompt=PROMPT, max_tokens=100, stream=True, extra_body=IGNORE_EOS)
        next(iter(stream))
        stream.close()


def check_async(client: openai.OpenAI, model: str) -> None:
    async def run() -> None:
        async with openai.AsyncOpenAI(base_url=client.base_url, api_key=client.api_key) as later:

            async def text() -> str:
                options = {"max_tokens": 20, "temperature": 0, "stream": True, "extra_body": IGNORE_EOS}
                stream = await later.completions.create(model=model, prompt=PROMPT, **options)
                return "".join([chunk.choices[0].text async for chunk in stream])

            texts = await asyncio.gather(*(text() for _ in range(32)))
            assert len(set(texts)) == 1
            assert texts[0]

    asyncio.run(run())


CHECKS: tuple[Callable[[openai.OpenAI, str], None], ...] = (
    check_models,
    check_stream,
    check_n,
    check_stop,
    check_seed,
    check_logprobs,
    check_prompt_logprobs,
    check_tools,
    check_responses,
    check_errors,
    check_abort,
    check_async,
)


def main(base_url: str, key: str, model: str) -> None:
    with openai.OpenAI(base_url=base_url, api_key=key, max_retries=0) as client:
        for check in CHECKS:
            check(client, model)
            print(check.__name__.removeprefix("check_"), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
