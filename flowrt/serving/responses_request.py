"""Reads a request of OpenAI's Responses API as a request for a chat. Pure.

No state is kept: the input is the whole conversation.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import msgspec

from flowrt.errors import shown
from flowrt.serving.api_errors import UNSUPPORTED, ApiError
from flowrt.serving.api_request import NO_DEFAULTS, CompletionRequest, read_chat_request
from flowrt.serving.json_body import FIELDS, MAX_CHAT_BYTES, MAX_FIELD_BYTES, MAX_NAMED, decode_bounded, invalid, split_object
from flowrt.serving.tool_choice import EXAMPLE

_STATE = ("previous_response_id", "conversation", "prompt")  # what a server would have to keep
# They change no output, or only with tools or state that a server has.
_IGNORED = ("include", "truncation", "max_tool_calls", "prompt_cache_options", "client_metadata", "stream_options", "background_options")
_OF_CHATS = (
    *("messages", "n", "max_tokens", "max_completion_tokens", "response_format", "reasoning_effort", "functions"),
    *("logprobs", "prompt_logprobs", "return_token_ids", "return_tokens_as_token_ids"),
)
_ECHOED = (
    *("instructions", "tools", "tool_choice", "temperature", "top_p", "max_output_tokens", "text", "reasoning", "metadata", "truncation"),
)
_NAMES = (
    ("max_completion_tokens", "max_output_tokens"),
    ("response_format", "text.format"),
    ("reasoning_effort", "reasoning.effort"),
    ("tool_call_id", "call_id"),
)
_OWN = ("input", "instructions", "max_output_tokens", "text", "reasoning", "background", "top_logprobs", *_STATE, *_IGNORED)
_FIELDS = FIELDS.union(_OWN)
_MESSAGE = re.compile(r"messages(?:\[\d+\](?:\.content|\.tool_calls\[\d+\](?:\.id)?)?)?")
_FUNCTION = re.compile(r"\.function\b")
_EXAMPLE = "{'type': 'function', 'name': 'f'}"
Message = dict[str, Any]


class ResponsesReader:
    """Reads one request; it knows where the messages of the chat come from."""

    def __init__(self) -> None:
        self._paths: dict[str, str] = {}  # of the messages of the chat, their contents and calls: in the input
        self._is_chat = False  # what is wrong from now on has the names of a chat

    def read(self, body: bytes, model: str, defaults: Mapping[str, Any] = NO_DEFAULTS) -> CompletionRequest:
        """`defaults`: see read_chat_request. Raises ApiError, whose names `renamed` translates."""
        given = {name: json for name, json in split_object(body, _FIELDS).items() if json != b"null"}
        if unknown := [name for name in given if name not in _FIELDS][:MAX_NAMED]:
            given = {name: b"0" for name in unknown} | {"input": b'""'}  # for the error of a chat that has them
        fields = {name: decode_bounded(json, name, MAX_CHAT_BYTES if name == "input" else MAX_FIELD_BYTES) for name, json in given.items()}
        # Not what is large: the response keeps it, and the body has left the budget by then.
        echoed = {name: fields[name] for name in _ECHOED if name in fields and len(given[name]) <= MAX_FIELD_BYTES}
        chat = self._chat_fields(fields)
        self._is_chat = True
        request = read_chat_request(msgspec.json.encode(chat), model, defaults)
        echoed |= {"parallel_tool_calls": chat.get("parallel_tool_calls", True)}
        return replace(request, response_fields=echoed)

    def renamed(self, error: ApiError) -> ApiError:
        """The error with the names of this API."""

        def rename(text: str) -> str:
            text = _FUNCTION.sub("", _MESSAGE.sub(lambda found: self._paths.get(found[0], "input"), text))
            for name, own in _NAMES:
                text = text.replace(name, own)
            return text

        if error.param is None or not self._is_chat:
            return error
        message = error.message.replace(error.param, rename(error.param), 1).replace(EXAMPLE, _EXAMPLE)
        return ApiError(error.kind, message, rename(error.param), allow=error.allow)

    def _chat_fields(self, fields: dict[str, Any]) -> dict[str, Any]:
        for name in _STATE:
            if name in fields:
                raise ApiError(UNSUPPORTED, f"{name} is not supported: no state is kept, so send the whole conversation as input", name)
        for name in _OF_CHATS:
            if name in fields:
                raise ApiError(UNSUPPORTED, f"there is no field {name} in this API", name)
        if fields.pop("background", False) is not False:
            raise ApiError(UNSUPPORTED, "background is not supported: no state is kept", "background")
        if fields.pop("top_logprobs", 0) != 0 or "message.output_text.logprobs" in _list(fields.get("include")):
            raise ApiError(UNSUPPORTED, "top_logprobs is not supported here; /v1/chat/completions has logprobs", "top_logprobs")
        if fields.get("truncation", "disabled") not in ("disabled", "auto"):  # with both, a conversation that does not fit is refused
            raise invalid("truncation", f"is {shown(fields['truncation'])}, it must be disabled or auto")
        for name in _IGNORED:
            fields.pop(name, None)
        chat: dict[str, Any] = {"messages": self._messages(fields.pop("instructions", None), fields.pop("input", None))}
        if "max_output_tokens" in fields:
            chat["max_completion_tokens"] = fields.pop("max_output_tokens")
        text = _object(fields, "text", ("format", "verbosity"))
        reasoning = _object(fields, "reasoning", ("effort", "summary", "generate_summary"))
        if (form := text.get("format")) is not None:
            is_schema = isinstance(form, dict) and form.get("type") == "json_schema"
            if is_schema and not isinstance(form.get("schema"), dict):
                raise invalid("text.format", 'has no schema; write {"type": "json_schema", "name": "...", "schema": {...}}')
            chat["response_format"] = {"type": "json_schema", "json_schema": form} if is_schema else form
        if reasoning.get("effort") is not None:
            chat["reasoning_effort"] = reasoning["effort"]
        if "tools" in fields:
            if not isinstance(tools := fields.pop("tools"), list):
                raise invalid("tools", f"is {shown(tools)}, it must be a list")
            chat["tools"] = [_chat_tool(index, tool) for index, tool in enumerate(tools)]
        choice = fields.get("tool_choice")
        if isinstance(choice, dict) and choice.get("type") == "function" and isinstance(choice.get("name"), str):
            fields["tool_choice"] = {"type": "function", "function": {"name": choice["name"]}}
        return fields | chat

    def _messages(self, instructions: Any, given: Any) -> list[Message]:
        if not isinstance(given, str | list):
            raise invalid("input", "must be a text or a list of items")
        messages: list[Message] = []
        if instructions is not None:
            messages.append({"role": "system", "content": instructions})
            self._paths |= dict.fromkeys(("messages[0]", "messages[0].content"), "instructions")
        reasoning = ""
        for index, item in enumerate([{"role": "user", "content": given}] if isinstance(given, str) else given):
            path = f"input[{index}]"
            if not isinstance(item, dict):
                raise invalid(path, f"is {shown(item)}, it must be an object")
            kind = item.get("type", "message")
            if kind == "reasoning":
                parts = _list(item.get("content")) or _list(item.get("summary"))
                reasoning = "\n".join(str(part.get("text", "")) for part in parts if isinstance(part, dict))
                continue
            message = _message(path, kind, item)
            thought = {"reasoning_content": reasoning} if reasoning and message["role"] == "assistant" else {}
            reasoning = ""  # also that of an answer which was cut off
            if message["role"] == "assistant" and messages and "tool_calls" in message and messages[-1]["role"] == "assistant":
                messages[-1].setdefault("tool_calls", []).extend(message["tool_calls"])  # one answer, in several items
                messages[-1] = thought | messages[-1]
            else:
                messages.append(message | thought)
                place = f"messages[{len(messages) - 1}]"
                self._paths |= {place: path, f"{place}.content": f"{path}.{'output' if message['role'] == 'tool' else 'content'}"}
            self._note_call(messages, path)
        return messages

    def _note_call(self, messages: list[Message], path: str) -> None:
        """`path`: of the last call of the last message, if it has one."""
        place = f"messages[{len(messages) - 1}].tool_calls[{len(messages[-1].get('tool_calls', ())) - 1}]"
        self._paths |= {place: path, f"{place}.id": f"{path}.call_id"}


def _message(path: str, kind: Any, item: dict[str, Any]) -> Message:
    if kind == "message":
        return {"role": item.get("role"), "content": item.get("content")}
    if kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        return {"role": "assistant", "content": None, "tool_calls": [{"id": item.get("call_id"), "type": "function", "function": function}]}
    if kind == "function_call_output":
        return {"role": "tool", "tool_call_id": item.get("call_id"), "content": item.get("output")}
    raise ApiError(UNSUPPORTED, f"{path}.type is {shown(kind)}, which is not supported", f"{path}.type")


def _chat_tool(index: int, tool: Any) -> dict[str, Any]:
    if not isinstance(tool, dict) or tool.get("type") != "function":
        kind = tool.get("type") if isinstance(tool, dict) else tool
        raise ApiError(UNSUPPORTED, f"tools[{index}].type is {shown(kind)}; only functions are supported", f"tools[{index}].type")
    return {"type": "function", "function": {name: value for name, value in tool.items() if name != "type" and value is not None}}


def _object(fields: dict[str, Any], name: str, keys: Collection[str]) -> dict[str, Any]:
    value = fields.pop(name, {})
    if not isinstance(value, dict):
        raise invalid(name, f"is {shown(value)}, it must be an object")
    if unknown := [key for key in value if key not in keys]:
        raise invalid(f"{name}.{unknown[0][:40]}", f"is no field; {name} has {', '.join(keys)}")
    return value


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
