"""The arguments of calls: checks prompts before anything is submitted, and iterates over the inputs of a stream. Pure."""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from flowrt.errors import ArgumentError, shown
from flowrt.sampling_params import check_text

Prompt = str | Sequence[int]
Messages = Sequence[Mapping[str, Any]]

_MAX_SCANNED_TOKENS = 1 << 24
_BYTES = bytes | bytearray | memoryview
_MESSAGE = "{'role': 'user', 'content': 'Hello'}"


@dataclass(frozen=True)
class TextPrompt:
    """What the tokenizer encodes: a text, or the messages of a chat as plain JSON values."""

    content: str | list[dict[str, Any]]


CheckedPrompt = TextPrompt | Sequence[int]


def checked_prompt(prompt: Any, messages: Any, max_tokens: int = _MAX_SCANNED_TOKENS) -> CheckedPrompt:
    """The prompt of a call. Raises ArgumentError of one line.

    The token ids of a prompt longer than `max_tokens` are not checked: the gateway refuses it for its length.
    """
    if messages is not None:
        if prompt is not None:
            raise ArgumentError("both a prompt and messages are given; write one of them")
        return TextPrompt(_checked_messages(messages))
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


def checked_prompts(prompts: Any) -> list[tuple[Prompt | None, Messages | None]]:
    """The prompts of `generate`, each as a prompt or as messages: one text, one list of token ids, one list of messages, or a sequence of
    these. Raises ArgumentError."""
    if isinstance(prompts, _BYTES) or not isinstance(prompts, Sequence):
        raise ArgumentError(f"prompts is {shown(prompts)}, it must be a text, a list of token ids or messages, or a sequence of these")
    is_single = isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int | Mapping))
    requests: list[tuple[Any, Any]] = [(None, item) if _is_chat(item) else (item, None) for item in ([prompts] if is_single else prompts)]
    for prompt, messages in requests:
        checked_prompt(prompt, messages)
    return requests


def _is_chat(item: Any) -> bool:
    return isinstance(item, Sequence) and len(item) > 0 and isinstance(item[0], Mapping)


def _checked_messages(messages: Any) -> list[dict[str, Any]]:
    if isinstance(messages, str | _BYTES) or not isinstance(messages, Sequence) or not messages:
        raise ArgumentError(f"messages is {shown(messages)}, it must be a list of messages such as {_MESSAGE}")
    for message in messages:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str) or not {"content", "tool_calls"} & message.keys():
            raise ArgumentError(f"a message is {shown(message)}, it needs a role and content, such as {_MESSAGE}")
    try:
        plain: list[dict[str, Any]] = msgspec.json.decode(msgspec.json.encode([dict(message) for message in messages]))
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise ArgumentError(f"messages cannot be written as JSON: {' '.join(str(error).split())}") from None
    return plain


async def each_input(inputs: Iterable[Any] | AsyncIterable[Any]) -> AsyncIterator[Any]:
    """The inputs of a stream, of either kind."""
    if isinstance(inputs, AsyncIterable):
        async for item in inputs:
            yield item
    else:
        for item in inputs:
            yield item
