"""Reads the body of a chat or completion request: every field is known and bounded, or refused with its name. Pure.

The bounds of sampling parameters are those of SamplingParams. What flowrt does not do is refused, unless the field has the value that asks
for nothing, so that no field is ever ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any

import msgspec

from flowrt.errors import shown
from flowrt.sampling_params import MAX_CHOICES, PARAMETER_TYPES, SamplingParams, checked_value
from flowrt.serving.json_body import MESSAGES, Fields, Prompt, invalid
from flowrt.serving.tool_choice import ToolChoice, chosen_tools, required_schema
from flowrt.structured_outputs import checked_outputs, outputs_of_format

DEFAULT_COMPLETION_TOKENS = 16  # as of OpenAI's API
NO_DEFAULTS: Mapping[str, Any] = MappingProxyType({})
_SAMPLING = tuple(name for name in PARAMETER_TYPES if name not in ("max_tokens", "logprobs", "prompt_logprobs"))


@dataclass(frozen=True)
class CompletionRequest:
    """`prompts`: texts, token ids or, of a chat, one Chat. `tools`: those that the model may call. `is_parsed`: reasoning and calls are not
    left in the text. `is_in_reasoning`: the prompt has opened the reasoning. `response_fields`: of a request of the Responses API, what its
    response repeats. `params.logprobs` None: none are returned. `has_continuous_usage`: each chunk of a stream has the usage so far.
    `has_token_ids`: the response has those of the prompt and of each choice. `names_token_ids`: tokens of logprobs are written as
    "token_id:5" instead of their text. `has_prompt_logprobs`: the response has the field `prompt_logprobs`. `max_tokens_name`: the field
    that has max_tokens. `omits_output`: max_tokens was 0; one token is computed, and the response has none. `outputs_name`: the field that
    has the structured outputs."""

    is_chat: bool
    prompts: tuple[Prompt, ...]
    params: SamplingParams
    is_stream: bool = False
    includes_usage: bool = False
    has_continuous_usage: bool = False
    add_special_tokens: bool = True
    tools: list[dict[str, Any]] | None = None
    tool_choice: ToolChoice = "none"
    has_parallel_calls: bool = True
    is_parsed: bool = True
    is_in_reasoning: bool = False
    response_fields: dict[str, Any] | None = None
    echo: bool = False
    has_token_ids: bool = False
    names_token_ids: bool = False
    has_prompt_logprobs: bool = False
    max_tokens_name: str = "max_tokens"
    omits_output: bool = False
    outputs_name: str = "structured_outputs"

    @property
    def prompt_name(self) -> str:
        return "messages" if self.is_chat else "prompt"

    @property
    def prompt_logprobs_name(self) -> str:
        return "prompt_logprobs" if self.has_prompt_logprobs else "logprobs"

    @property
    def has_echoed_logprobs(self) -> bool:
        """Whether the logprobs of a repeated prompt are before those of each choice."""
        return self.echo and self.params.logprobs is not None

    def num_prompt_logprobs(self, num_prompt_tokens: int) -> int:
        """Logprobs of prompts in the response, for this number of tokens of all prompts together."""
        times = self.params.n * self.has_echoed_logprobs + self.has_prompt_logprobs
        return times * num_prompt_tokens * (1 + (self.params.prompt_logprobs or 0))


def read_chat_request(body: bytes, model: str, defaults: Mapping[str, Any] = NO_DEFAULTS) -> CompletionRequest:
    """`defaults`: values of SamplingParams for fields that the body does not have. Raises ApiError."""
    fields = Fields(body)
    fields.check_model(model)
    chat = fields.take_chat()
    if chat is None:
        raise invalid("messages", f"is missing or empty; give a list of messages, such as {MESSAGES}")
    choice = fields.take("tool_choice")
    tool_choice, tools = chosen_tools(chat.tools, choice)
    is_parsed = fields.take_bool("parse_output", True)
    if tool_choice == "none":
        chat = msgspec.structs.replace(chat, tools=None)
    has_parallel_calls = fields.take_bool("parallel_tool_calls", True) and not isinstance(choice, dict)  # a named one is one call
    has_logprobs = fields.take_bool("logprobs")
    top_logprobs = fields.take_checked("top_logprobs", lambda value: checked_value("logprobs", value))
    if top_logprobs and not has_logprobs:
        raise invalid("top_logprobs", "needs logprobs: true")
    logprobs = (top_logprobs or 0) if has_logprobs else None
    request = _finish(fields, True, (chat,), logprobs, defaults)
    if tool_choice == "required":
        if request.params.structured_outputs is not None and request.outputs_name == "structured_outputs":
            raise invalid("structured_outputs", "and a tool_choice that requires calls each give the form of the output; leave one out")
        request = _with_required_calls(request, required_schema(tools, None if has_parallel_calls else 1))
    request = replace(request, is_parsed=is_parsed)
    return replace(request, tools=tools or None, tool_choice=tool_choice, has_parallel_calls=has_parallel_calls or not tools)


def read_completion_request(body: bytes, model: str, defaults: Mapping[str, Any] = NO_DEFAULTS) -> CompletionRequest:
    """Reads a completion as `read_chat_request` does a chat; max_tokens keeps the default of OpenAI's API. Raises ApiError."""
    fields = Fields(body)
    fields.check_model(model)
    prompts = fields.take_prompts()
    if not prompts:
        raise invalid("prompt", "must be a text, a list of token ids, or a list of these")
    logprobs = fields.take_checked("logprobs", lambda value: checked_value("logprobs", value))
    request = _finish(fields, False, prompts, logprobs, defaults)
    if len(prompts) * request.params.n > MAX_CHOICES:
        raise invalid("prompt", f"has {len(prompts)} prompts of {request.params.n} choices, at most {MAX_CHOICES} choices are possible")
    return request


def _finish(
    fields: Fields, is_chat: bool, prompts: tuple[Prompt, ...], logprobs: int | None, defaults: Mapping[str, Any]
) -> CompletionRequest:
    """Read the fields that both kinds of request have, and refuse all others."""
    values: dict[str, Any] = {"temperature": 1.0, **defaults}  # OpenAI's default
    for name in _SAMPLING:
        value = fields.take_checked(name, partial(_checked, name))
        if value is not None:
            values[name] = value
    outputs_name = "structured_outputs"
    if (of_format := fields.take_checked("response_format", outputs_of_format)) is not None:
        if "structured_outputs" in values:
            raise invalid("response_format", "and structured_outputs are both given; write the grammar in one of them")
        values["structured_outputs"], outputs_name = of_format, "response_format"
    longest = fields.take_checked("max_tokens", lambda value: 0 if _is_zero(value) and not is_chat else checked_value("max_tokens", value))
    newer = fields.take_checked("max_completion_tokens", lambda value: checked_value("max_tokens", value)) if is_chat else None
    if longest is not None and newer is not None and longest != newer:
        raise invalid("max_completion_tokens", f"is {newer} and max_tokens is {longest}; give one of them")
    max_tokens = longest if newer is None else newer
    is_stream = fields.take_bool("stream")
    includes_usage, has_continuous_usage = _read_stream_options(fields.take("stream_options"), is_stream)
    echo = False if is_chat else fields.take_bool("echo")
    of_prompt = fields.take_checked("prompt_logprobs", lambda value: checked_value("prompt_logprobs", value))
    if echo and None not in (logprobs, of_prompt) and logprobs != of_prompt:
        raise invalid("prompt_logprobs", f"is {of_prompt} and logprobs, which with echo are those of the prompt too, is {logprobs}")
    add_special_tokens = fields.take_bool("add_special_tokens", not is_chat)
    has_token_ids, names_token_ids = fields.take_bool("return_token_ids"), fields.take_bool("return_tokens_as_token_ids")
    fields.refuse_rest()
    if max_tokens is None and not is_chat and "max_tokens" not in fields.nulls:  # null: what fits, as in vLLM
        max_tokens = DEFAULT_COMPLETION_TOKENS
    if (limit := defaults.get("max_tokens")) is not None:  # of all requests, as in vLLM
        max_tokens = limit if max_tokens is None else min(max_tokens, limit)
    omits_output = max_tokens == 0
    values |= {
        "max_tokens": 1 if omits_output else max_tokens,
        "logprobs": logprobs,
        "prompt_logprobs": logprobs if echo and of_prompt is None else of_prompt,
    }
    params = SamplingParams(**values)
    return CompletionRequest(
        is_chat=is_chat,
        prompts=prompts,
        params=params,
        is_stream=is_stream,
        includes_usage=includes_usage,
        has_continuous_usage=has_continuous_usage,
        add_special_tokens=add_special_tokens,
        echo=echo,
        has_token_ids=has_token_ids,
        names_token_ids=names_token_ids,
        has_prompt_logprobs=of_prompt is not None,
        max_tokens_name="max_tokens" if newer is None else "max_completion_tokens",
        omits_output=omits_output,
        outputs_name=outputs_name,
    )


def _with_required_calls(request: CompletionRequest, schema: dict[str, Any]) -> CompletionRequest:
    """The whole output is calls, also where the content would have a format."""
    try:
        outputs = checked_outputs({"json": schema})
    except ValueError as error:
        raise invalid("tools", f"are too much for tool_choice: the schema of the calls {error}") from None
    params = msgspec.structs.replace(request.params, structured_outputs=outputs)
    return replace(request, params=params, outputs_name="tools")


def _is_zero(value: Any) -> bool:
    return type(value) is int and value == 0


def _checked(name: str, value: Any) -> Any:
    """-1 is off, as clients send it."""
    if value == -1 and type(value) is int and name in ("top_k", "seed"):
        return None if name == "seed" else 0  # 0 is a value, which a default does not replace
    return checked_value(name, value)


def _read_stream_options(options: Any, is_stream: bool) -> tuple[bool, bool]:
    """include_usage and continuous_usage_stats, which without the first has no effect, as in vLLM. Other keys ask for no other output."""
    if not isinstance(options, dict | None):
        raise invalid("stream_options", f"is {shown(options)}, it must be an object")
    values = []
    for name in ("include_usage", "continuous_usage_stats"):
        value = (options or {}).get(name)
        if not isinstance(value, bool | None):
            raise invalid(f"stream_options.{name}", f"is {shown(value)}, it must be true or false")
        values.append(bool(value))
    if any(values) and not is_stream:
        raise invalid("stream_options", "needs stream: true")
    return values[0], all(values)
