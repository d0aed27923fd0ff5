"""Builds the bodies of OpenAI's Responses API, whole or as events. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from flowrt.serving.api_errors import ApiError
from flowrt.serving.api_request import CompletionRequest
from flowrt.serving.api_response import CallId, PromptOutput, Usage
from flowrt.serving.choice_text import TextPiece
from flowrt.serving.output_parser import CallDelta, ContentDelta, ReasoningDelta

_PREFIXES = {"reasoning": "rs", "message": "msg", "function_call": "fc"}  # of ids, by the type of the item


class ResponsesBuilder:
    """As api_response.ResponseBuilder. The output is a list of items: reasoning, a message, and calls, in the order in which they come."""

    def __init__(self, request_id: str, created: int, model: str, request: CompletionRequest, call_id: CallId) -> None:
        self._request_id, self._call_id = request_id, call_id
        defaults = {"tools": [], "tool_choice": "auto", "parallel_tool_calls": True, "metadata": {}}
        self._fields = {"id": f"resp_{request_id}", "object": "response", "created_at": created, "model": model}
        self._fields |= {"error": None, "instructions": None, **defaults, **(request.response_fields or {})}
        self._items: list[dict[str, Any]] = []  # the last one is open
        self._texts: list[str] = []  # of the open one, which has them when it ends: text, or arguments
        self._is_whole = self._is_too_long = False  # it has ended, and nothing, or its length, has cut it
        self._num_events = 0

    def first_chunk(self, choice: int, prompt: PromptOutput) -> bytes:
        return b"".join(self._event(f"response.{name}", response=self._response("in_progress")) for name in ("created", "in_progress"))

    def chunk(self, piece: TextPiece) -> bytes:
        events = b""
        for delta in piece.deltas:
            match delta:
                case ReasoningDelta(text):
                    events += self._open("reasoning", summary=[], content=[{"type": "reasoning_text", "text": ""}])
                    events += self._add_text("response.reasoning_text.delta", text)
                case ContentDelta(text):
                    events += self._open(
                        "message", role="assistant", content=[{"type": "output_text", "text": "", "annotations": [], "logprobs": []}]
                    )
                    events += self._add_text("response.output_text.delta", text, logprobs=[])
                case CallDelta():
                    events += self._add_call(delta)
        if piece.finish_reason is not None:
            self._is_whole = piece.finish_reason == "stop" and not piece.cuts_call
            self._is_too_long = piece.finish_reason == "length"
            events += self._close(self._status)
        return events

    def error_events(self, error: ApiError) -> bytes:
        """The events that end a stream which has failed."""
        events = self._close("incomplete")
        events += self._event("error", code=error.kind.code, message=error.message, param=error.param)
        failure = {"code": "server_error" if error.kind.status >= 500 else error.kind.code, "message": error.message}
        return events + self._event("response.failed", response=self._response("failed") | {"error": failure})

    def usage_chunk(self, usage: Usage) -> bytes:
        """The last event."""
        response = self._response(self._status, usage)
        return self._event(f"response.{self._status}", response=response)

    def whole(self, pieces: Sequence[TextPiece], prompts: Sequence[PromptOutput], usage: Usage) -> Iterator[bytes]:
        for piece in pieces:
            self.chunk(piece)
        yield msgspec.json.encode(self._response(self._status, usage))

    @property
    def _status(self) -> str:
        return "completed" if self._is_whole else "incomplete"

    def _response(self, status: str, usage: Usage | None = None) -> dict[str, Any]:
        details = {"reason": "max_output_tokens"} if status == "incomplete" and self._is_too_long else None
        fields = self._fields | {"status": status, "incomplete_details": details, "output": self._items, "usage": None}
        return fields if usage is None else fields | {"usage": _usage(usage)}

    def _open(self, kind: str, **fields: Any) -> bytes:
        """Begin an item of this type, if the last one is not such, or is a call."""
        if self._items and self._items[-1]["type"] == kind and kind != "function_call":
            return b""
        events = self._close("completed")
        item = {"id": f"{_PREFIXES[kind]}_{self._request_id}_{len(self._items)}", "type": kind, "status": "in_progress", **fields}
        self._items.append(item)
        events += self._of_item("response.output_item.added", item=item | ({"content": []} if "content" in item else {}))
        return events + (self._of_part("response.content_part.added", part=item["content"][0]) if "content" in item else b"")

    def _add_text(self, name: str, text: str, **fields: Any) -> bytes:
        self._texts.append(text)
        return self._of_part(name, delta=text, **fields)

    def _add_call(self, call: CallDelta) -> bytes:
        events = b""
        if call.name is not None:
            events = self._open("function_call", call_id=call.id or self._call_id(0, call.index), name=call.name, arguments="")
        self._texts.append(call.arguments)
        return events + (self._of_item("response.function_call_arguments.delta", delta=call.arguments) if call.arguments else b"")

    def _close(self, status: str) -> bytes:
        """End the last item, if it is open."""
        if not self._items or self._items[-1]["status"] != "in_progress":
            return b""
        item, text = self._items[-1], "".join(self._texts)
        self._texts.clear()
        item["status"] = status
        if item["type"] == "function_call":
            item["arguments"] = text
            events = self._of_item("response.function_call_arguments.done", name=item["name"], arguments=text)
        else:
            (part,) = item["content"]
            part["text"] = text
            if item["type"] == "reasoning":
                events = self._of_part("response.reasoning_text.done", text=text)
            else:
                events = self._of_part("response.output_text.done", text=text, logprobs=[])
            events += self._of_part("response.content_part.done", part=part)
        return events + self._of_item("response.output_item.done", item=item)

    def _of_part(self, kind: str, /, **fields: Any) -> bytes:
        return self._of_item(kind, content_index=0, **fields)

    def _of_item(self, kind: str, /, **fields: Any) -> bytes:
        return self._event(kind, output_index=len(self._items) - 1, item_id=self._items[-1]["id"], **fields)

    def _event(self, kind: str, /, **fields: Any) -> bytes:
        number, self._num_events = self._num_events, self._num_events + 1
        body = msgspec.json.encode({"type": kind, "sequence_number": number, **fields})
        return b"event: %s\ndata: %s\n\n" % (kind.encode(), body)


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.num_prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.num_cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.num_completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.num_reasoning_tokens},
        "total_tokens": usage.num_prompt_tokens + usage.num_completion_tokens,
    }
