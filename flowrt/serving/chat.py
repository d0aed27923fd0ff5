"""A conversation with all that a chat template sees of it, and the check of its form. Pure.

Keys that OpenAI's API does not have are left as they are: the template decides about them.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

from flowrt.errors import shown

# Parts of a content that are texts, with the key of the text.
TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal", "thinking": "thinking"}
# The fields of a Chat, as a request has them.
FIELDS = ("messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template_kwargs")
_RESERVED_NAMES = {*FIELDS, "chat_template", "tokenize"}
_PLACE = re.compile(r"(.*?)(?: - at `\$(.*)`)?")
_MISSING = re.compile(r"Object missing required field `(\w+)`")


class Chat(msgspec.Struct, frozen=True, array_like=True):
    """`kwargs`: further names for the template, such as enable_thinking. None and [] are alike for `tools` and `documents`."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    documents: list[dict[str, Any]] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    kwargs: dict[str, Any] = {}

    @property
    def fields(self) -> dict[str, Any]:
        """Those of a request for this chat."""
        return dict(zip(FIELDS, msgspec.structs.astuple(self), strict=True))


class ChatError(ValueError):
    """`path`: of the value that is wrong, such as messages[1].tool_calls[0].function."""

    def __init__(self, path: str, text: str, is_unsupported: bool = False) -> None:
        super().__init__(f"{path} {text}")
        self.path, self.text, self.is_unsupported = path, text, is_unsupported


_Function = msgspec.defstruct("Function", [("name", str), ("arguments", str | dict[str, Any] | None, None)])
_ToolCall = msgspec.defstruct("ToolCall", [("function", _Function), ("id", str | None, None)])
_Part = msgspec.defstruct("Part", [("type", str)])
_Message = msgspec.defstruct(
    "Message",
    [
        ("role", str),
        ("content", str | list[str | _Part] | None, None),  # type: ignore[valid-type]
        ("name", str | None, None),
        ("tool_calls", list[_ToolCall] | None, None),  # type: ignore[valid-type]
        ("function_call", _Function | None, None),
        ("tool_call_id", str | None, None),
    ],
)
_Tool = msgspec.defstruct(
    "Tool", [("function", msgspec.defstruct("ToolFunction", [("name", str), ("parameters", dict[str, Any] | None, None)]))]
)


def check_chat(chat: Chat) -> None:
    """Raises ChatError."""
    _check_type("messages", chat.messages, list[_Message])  # type: ignore[valid-type]
    for index, tool in enumerate(chat.tools if isinstance(chat.tools, list) else ()):
        if isinstance(tool, dict) and tool.get("type", "function") != "function":
            raise ChatError(f"tools[{index}].type", f"is {shown(tool['type'])}; only functions are supported", is_unsupported=True)
    _check_type("tools", chat.tools, list[_Tool] | None)  # type: ignore[valid-type]
    _check_type("documents", chat.documents, list[dict[str, Any]] | None)
    for index, message in enumerate(chat.messages):
        where = f"messages[{index}]"
        if message["role"] in ("system", "developer", "user") and message.get("content") is None:
            raise ChatError(f"{where}.content", "is missing")
        if message.get("audio") is not None:
            raise ChatError(f"{where}.audio", "is not supported: only text is", is_unsupported=True)
        for at, part in enumerate(content if isinstance(content := message.get("content"), list) else ()):
            if isinstance(part, dict):
                _check_part(f"{where}.content[{at}]", part)
    if chat.continue_final_message and chat.add_generation_prompt:
        raise ChatError("continue_final_message", "needs add_generation_prompt: false")
    if taken := chat.kwargs.keys() & _RESERVED_NAMES:
        raise ChatError(f"chat_template_kwargs.{min(taken)}", "is not a name of the template's own; give it as a field of the request")


def _check_part(where: str, part: dict[str, Any]) -> None:
    kind = part["type"]
    if kind not in TEXT_PARTS:
        raise ChatError(where, f"has the type {kind[:40]!r}, which is not supported: only text is", is_unsupported=True)
    if not isinstance(part.get(TEXT_PARTS[kind]), str):
        raise ChatError(f"{where}.{TEXT_PARTS[kind]}", "must be a text")


def _check_type(name: str, value: Any, kind: Any) -> None:
    try:
        msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        text, path = _PLACE.fullmatch(str(error)).groups("")  # type: ignore[union-attr]
        if missing := _MISSING.fullmatch(text):
            raise ChatError(f"{name}{path}.{missing[1]}", "is missing") from None
        raise ChatError(name + path, f"is of a wrong type: {text.replace('`', '').lower()}") from None
