"""Reads the body of a chat or completion request: every field is known and bounded, or refused with its name. Pure.

The bounds of sampling parameters are those of SamplingParams. What flowrt does not do is refused, unless the field has the value that asks
for nothing, so that no field is ever ignored.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from flowrt.errors import shown
from flowrt.sampling_params import MAX_CHOICES, PARAMETER_TYPES, SamplingParams, check_text, checked_value
from flowrt.serving.api_errors import INVALID, NO_MODEL, UNSUPPORTED, ApiError
from flowrt.serving.tokenizer_process import MAX_TEXT_CHARACTERS

MAX_MESSAGES = 4096
MAX_PROMPT_TOKENS = 1 << 22  # in one list; the graph's own limits are lower
DEFAULT_COMPLETION_TOKENS = 16  # as of OpenAI's API
_ROLES = ("system", "developer", "user", "assistant")
_SAMPLING = tuple(name for name in PARAMETER_TYPES if name not in ("max_tokens", "logprobs"))
_LABELS = ("user", "safety_identifier", "metadata")  # for the caller's own books; they change no output
# Fields that ask for what flowrt does not do, with the values that ask for nothing.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "best_of": (1,),
    "suffix": ("",),
    "store": (False,),
    "service_tier": ("auto", "default"),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
    "web_search_options": (),
    "use_beam_search": (False,),
    "min_p": (0,),
    "prompt_logprobs": (),
    "add_special_tokens": (True,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "priority": (0,),
}

Messages = list[dict[str, Any]]
Prompt = str | tuple[int, ...] | Messages


@dataclass(frozen=True)
class CompletionRequest:
    """`prompts`: texts, token ids or, of a chat, the messages. `params.logprobs` None: none are returned. `has_token_ids`: the response has
    those of the prompt and of each choice. `names_token_ids`: tokens of logprobs are written as "token_id:5" instead of their text."""

    is_chat: bool
    prompts: tuple[Prompt, ...]
    params: SamplingParams
    is_stream: bool = False
    includes_usage: bool = False
    echo: bool = False
    has_token_ids: bool = False
    names_token_ids: bool = False


class Fields:
    """The fields of a JSON object that no reader has taken yet. The error of a value names its field."""

    def __init__(self, body: bytes) -> None:
        try:
            values = msgspec.json.decode(body)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
            raise ApiError(INVALID, f"the body is not JSON: {str(error).removeprefix('JSON is malformed: ')}") from None
        if not isinstance(values, dict):
            raise ApiError(INVALID, "the body is not a JSON object")
        self._values: dict[str, Any] = {name: value for name, value in values.items() if value is not None}  # null: not given
        self.nulls = values.keys() - self._values.keys()
        self._known: list[str] = []

    def take(self, name: str, default: Any = None) -> Any:
        self._known.append(name)
        return self._values.pop(name, default)

    def take_bool(self, name: str, default: bool = False) -> bool:
        value = self.take(name, default)
        if not isinstance(value, bool):
            raise invalid(name, f"is {shown(value)}, it must be true or false")
        return value

    def take_checked(self, name: str, check: Callable[[Any], Any]) -> Any:
        """`check` raises ValueError of one line that does not name the field."""
        value = self.take(name)
        try:
            return None if value is None else check(value)
        except ValueError as error:
            raise invalid(name, str(error)) from None

    def check_model(self, served: str) -> None:
        model = self.take("model", served)
        if model != served:
            raise ApiError(NO_MODEL, f"there is no model {shown(model)}; this server has {served}", "model")

    def refuse_rest(self) -> None:
        """Refuse the fields that no reader took, except those without an effect."""
        for name in _LABELS:
            self.take(name)
        for name, value in self._values.items():
            if name not in _UNSUPPORTED:
                near = difflib.get_close_matches(name, [*self._known, *_UNSUPPORTED], 1)
                hint = f"; did you mean {near[0]}?" if near else ""
                raise ApiError(UNSUPPORTED, f"there is no field {shown(name)}{hint}", name[:80])
            if value not in _UNSUPPORTED[name]:
                raise ApiError(UNSUPPORTED, f"{name} is not supported", name)


def invalid(name: str, text: str) -> ApiError:
    return ApiError(INVALID, f"{name} {text}", name)


def read_chat_request(body: bytes, model: str) -> CompletionRequest:
    """Raises ApiError."""
    fields = Fields(body)
    fields.check_model(model)
    messages = read_messages(fields.take("messages"))
    has_logprobs = fields.take_bool("logprobs")
    top_logprobs = fields.take_checked("top_logprobs", lambda value: checked_value("logprobs", value))
    if top_logprobs is not None and not has_logprobs:
        raise invalid("top_logprobs", "needs logprobs: true")
    logprobs = (top_logprobs or 0) if has_logprobs else None
    return _finish(fields, True, (messages,), logprobs, None)


def read_completion_request(body: bytes, model: str) -> CompletionRequest:
    """Raises ApiError."""
    fields = Fields(body)
    fields.check_model(model)
    prompts = _read_prompts(fields.take("prompt"))
    logprobs = fields.take_checked("logprobs", lambda value: checked_value("logprobs", value))
    request = _finish(fields, False, prompts, logprobs, DEFAULT_COMPLETION_TOKENS)
    if len(prompts) * request.params.n > MAX_CHOICES:
        raise invalid("prompt", f"has {len(prompts)} prompts of {request.params.n} choices, at most {MAX_CHOICES} choices are possible")
    if request.echo and logprobs is not None:
        raise ApiError(UNSUPPORTED, "echo with logprobs is not supported", "echo")
    return request


def _finish(
    fields: Fields, is_chat: bool, prompts: tuple[Prompt, ...], logprobs: int | None, default_max_tokens: int | None
) -> CompletionRequest:
    """Read the fields that both kinds of request have, and refuse all others."""
    values: dict[str, Any] = {"temperature": 1.0}  # OpenAI's default
    for name in _SAMPLING:
        value = fields.take_checked(name, partial(_checked, name))
        if value is not None:
            values[name] = value
    longest = fields.take_checked("max_tokens", lambda value: checked_value("max_tokens", value))
    newer = fields.take_checked("max_completion_tokens", lambda value: checked_value("max_tokens", value)) if is_chat else None
    if longest is not None and newer is not None and longest != newer:
        raise invalid("max_completion_tokens", f"is {newer} and max_tokens is {longest}; give one of them")
    max_tokens = longest if newer is None else newer
    is_stream = fields.take_bool("stream")
    includes_usage = _read_stream_options(fields.take("stream_options"), is_stream)
    echo = False if is_chat else fields.take_bool("echo")
    has_token_ids, names_token_ids = fields.take_bool("return_token_ids"), fields.take_bool("return_tokens_as_token_ids")
    fields.refuse_rest()
    if max_tokens is None and "max_tokens" not in fields.nulls:  # null: what fits, as in vLLM
        max_tokens = default_max_tokens
    values |= {"max_tokens": max_tokens, "logprobs": logprobs}
    return CompletionRequest(is_chat, prompts, SamplingParams(**values), is_stream, includes_usage, echo, has_token_ids, names_token_ids)


def _checked(name: str, value: Any) -> Any:
    return checked_value(name, 0 if name == "top_k" and value == -1 else value)  # -1: off, as vLLM's clients send it


def _read_stream_options(options: Any, is_stream: bool) -> bool:
    if options is None:
        return False
    if not isinstance(options, dict) or not options.keys() <= {"include_usage"}:
        raise ApiError(UNSUPPORTED, "stream_options may hold include_usage only", "stream_options")
    if not is_stream:
        raise invalid("stream_options", "needs stream: true")
    include = options.get("include_usage", False)
    if not isinstance(include, bool):
        raise invalid("stream_options", f"has include_usage {shown(include)}, it must be true or false")
    return include


def read_messages(messages: Any) -> Messages:
    """The messages of a chat, with their contents as texts. Raises ApiError."""
    if not isinstance(messages, list) or not messages:
        raise invalid("messages", "must be a list of messages, such as {'role': 'user', 'content': 'Hello'}")
    if len(messages) > MAX_MESSAGES:
        raise invalid("messages", f"are {len(messages)}, at most {MAX_MESSAGES} are possible")
    read = [_read_message(message, f"messages[{index}]") for index, message in enumerate(messages)]
    num_characters = sum(len(message["content"]) for message in read)
    if num_characters > MAX_TEXT_CHARACTERS:
        raise invalid("messages", f"have {num_characters} characters, at most {MAX_TEXT_CHARACTERS} are possible")
    return read


def _read_message(message: Any, where: str) -> dict[str, str]:
    if not isinstance(message, dict):
        raise invalid(where, f"is {shown(message)}, it must be an object with role and content")
    role = message.get("role")
    if role not in _ROLES:
        raise invalid(where, f"has the role {shown(role)}, it must be one of {', '.join(_ROLES)}")
    more = {name for name, value in message.items() if value not in (None, [])} - {"role", "content", "name"}
    if more:
        raise ApiError(UNSUPPORTED, f"{where} has {shown(min(more))}, which is not supported", where)
    read = {"role": str(role), "content": _read_content(message.get("content"), where)}
    if (name := message.get("name")) is not None:
        read["name"] = _read_text(name, where)
    return read


def _read_content(content: Any, where: str) -> str:
    """A text, or a list of parts that are texts."""
    if not isinstance(content, list):
        return _read_text(content, where)
    texts = []
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text" or part.keys() != {"type", "text"}:
            raise ApiError(UNSUPPORTED, f"{where} has a part that is not a text, which is not supported", where)
        texts.append(_read_text(part["text"], where))
    return "".join(texts)


def _read_text(text: Any, where: str) -> str:
    if not isinstance(text, str):
        raise invalid(where, f"has {shown(text)} where a text must be")
    try:
        check_text(text)
    except ValueError as error:
        raise invalid(where, str(error)) from None
    return text


def _read_prompts(prompt: Any) -> tuple[Prompt, ...]:
    """A text, a list of token ids, or a list of either."""
    is_list = isinstance(prompt, list)
    prompts = prompt if is_list and prompt and not isinstance(prompt[0], int) else [prompt]
    if len(prompts) > MAX_CHOICES:
        raise invalid("prompt", f"has {len(prompts)} prompts, at most {MAX_CHOICES} are possible")
    read = tuple(_read_prompt(each) for each in prompts)
    num_characters = sum(len(each) for each in read if isinstance(each, str))
    if num_characters > MAX_TEXT_CHARACTERS:
        raise invalid("prompt", f"has {num_characters} characters, at most {MAX_TEXT_CHARACTERS} are possible")
    return read


def _read_prompt(prompt: Any) -> Prompt:
    if isinstance(prompt, list):
        return read_token_ids(prompt, "prompt")
    if not isinstance(prompt, str):
        raise invalid("prompt", f"is {shown(prompt)}, it must be a text, a list of token ids, or a list of these")
    return _read_text(prompt, "prompt")


def read_token_ids(values: Any, name: str) -> tuple[int, ...]:
    """Token ids of any vocabulary. Raises ApiError."""
    if not isinstance(values, list) or len(values) > MAX_PROMPT_TOKENS:
        raise invalid(name, f"must be a list of at most {MAX_PROMPT_TOKENS} token ids")
    if not set(map(type, values)) <= {int} or not 0 <= min(values, default=0) <= max(values, default=0) < 1 << 31:
        raise invalid(name, "has an item that is not a token id")
    return tuple(values)


def estimated_tokens(prompt: Prompt) -> int:
    """About the length of a prompt, before it is tokenized."""
    if isinstance(prompt, str):
        return len(prompt) // 4 + 1
    return len(prompt) if isinstance(prompt, tuple) else sum(len(message["content"]) // 4 + 4 for message in prompt)
