"""The arguments of calls: checks prompts before anything is submitted, and iterates over the inputs of a stream. Pure."""

from __future__ import annotations

import re
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict, cast

import msgspec

from flowrt.errors import ArgumentError, shown
from flowrt.sampling_params import SamplingKeywords, check_text
from flowrt.serving.chat import FIELDS, Chat, ChatError, check_chat

Prompt = str | Sequence[int]
Messages = Sequence[Mapping[str, Any]]

_MAX_SCANNED_TOKENS = 1 << 24
_BYTES = bytes | bytearray | memoryview
_MESSAGE = "{'role': 'user', 'content': 'Hello'}"


class ChatKeywords(TypedDict, total=False):
    """What a chat template sees beside `messages`; see RunningGraph.complete."""

    tools: Sequence[Mapping[str, Any]] | None
    documents: Sequence[Mapping[str, Any]] | None
    add_generation_prompt: bool
    continue_final_message: bool
    chat_template_kwargs: Mapping[str, Any] | None


class RequestKeywords(SamplingKeywords, ChatKeywords, total=False):
    """The keywords of a call: parameters of SamplingParams, and those of a chat."""


_NO_KEYWORDS: ChatKeywords = {}


@dataclass(frozen=True)
class TextPrompt:
    """What the tokenizer encodes: a text, or a chat of plain JSON values."""

    content: str | Chat


CheckedPrompt = TextPrompt | Sequence[int]


def split_keywords(keywords: RequestKeywords) -> tuple[SamplingKeywords, ChatKeywords]:
    """Divides the arguments into those of SamplingParams and those of a chat."""
    of_chat = {name: value for name, value in keywords.items() if name in ChatKeywords.__annotations__}
    return cast(SamplingKeywords, {name: value for name, value in keywords.items() if name not in of_chat}), cast(ChatKeywords, of_chat)


def checked_prompt(prompt: Any, messages: Any, max_tokens: int = _MAX_SCANNED_TOKENS, chat: ChatKeywords = _NO_KEYWORDS) -> CheckedPrompt:
    """The prompt of a call. Raises ArgumentError of one line.

    The token ids of a prompt longer than `max_tokens` are not checked: the gateway refuses it for its length.
    """
    if messages is not None:
        if prompt is not None:
            raise ArgumentError("both a prompt and messages are given; write one of them")
        return TextPrompt(_checked_chat(messages, chat))
    if chat:
        raise ArgumentError(f"{next(iter(chat))} is given without messages")
    if isinstance(prompt, str):
        try:
            check_text(prompt)
        except ValueError as error:
            raise ArgumentError(f"the prompt {error}") from None
        return TextPrompt(prompt)
    if isinstance(prompt, _BYTES) or not isinstance(prompt, Sequence):
        raise ArgumentError(f"the prompt is {shown(prompt)}, it must be a text or a sequence of token ids")
    if len(prompt) <= max_tokens and not set(map(type, prompt)) <= {int}:
        position, token_id = next((at, each) for at, each in enumerate(prompt) if type(each) is not int)
        raise ArgumentError(f"prompt token {shown(token_id)} at position {position} is not a whole number")
    return prompt


def checked_prompts(prompts: Any, chat: ChatKeywords = _NO_KEYWORDS) -> list[tuple[Prompt | None, Messages | None]]:
    """The prompts of `generate`, each as a prompt or as messages: one text, one list of token ids, one list of messages, or a sequence of
    these. Raises ArgumentError."""
    if isinstance(prompts, _BYTES) or not isinstance(prompts, Sequence):
        raise ArgumentError(f"prompts is {shown(prompts)}, it must be a text, a list of token ids or messages, or a sequence of these")
    is_single = isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int | Mapping))
    requests: list[tuple[Any, Any]] = [(None, item) if _is_chat(item) else (item, None) for item in ([prompts] if is_single else prompts)]
    for prompt, messages in requests:
        checked_prompt(prompt, messages, chat=chat if messages else {})
    if chat and all(messages is None for _, messages in requests):
        raise ArgumentError(f"{next(iter(chat))} is given without messages")
    return requests


def _is_chat(item: Any) -> bool:
    return isinstance(item, Sequence) and len(item) > 0 and isinstance(item[0], Mapping)


def _checked_chat(messages: Any, given: ChatKeywords) -> Chat:
    if isinstance(messages, str | _BYTES) or not isinstance(messages, Sequence) or not messages:
        raise ArgumentError(f"messages is {shown(messages)}, it must be a list of messages such as {_MESSAGE}")
    continues = given.get("continue_final_message", False)
    values: list[Any] = [messages, None, None, not continues, False, {}]
    fields: dict[str, Any] = dict(zip(FIELDS, values, strict=True)) | {name: value for name, value in given.items() if value is not None}
    try:
        chat = msgspec.json.decode(msgspec.json.encode(list(fields.values()), enc_hook=_plain), type=Chat)
        check_chat(chat)
    except msgspec.ValidationError as error:
        text = re.sub(r"\$\[(\d)\]", lambda found: FIELDS[int(found[1])], str(error)).replace("`", "")
        raise ArgumentError(f"the chat has a value of a wrong type: {text}; a message is such as {_MESSAGE}") from None
    except ChatError as error:
        raise ArgumentError(str(error)) from None
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise ArgumentError(f"messages cannot be written as JSON: {' '.join(str(error).split())}") from None
    return chat


def _plain(value: Any) -> Any:
    """A mapping or sequence of any type as JSON."""
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Sequence):
        return list(value)
    raise TypeError(f"{shown(value)} is not a JSON value")


async def each_input(inputs: Iterable[Any] | AsyncIterable[Any]) -> AsyncIterator[Any]:
    """The inputs of a stream, of either kind."""
    if isinstance(inputs, AsyncIterable):
        async for item in inputs:
            yield item
    else:
        for item in inputs:
            yield item
