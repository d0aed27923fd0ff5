"""Finds the tool calls and the reasoning in the outputs of a chat request. Pure."""

from __future__ import annotations

from hashlib import sha256

from flowrt.serving.api_errors import UNSUPPORTED, ApiError
from flowrt.serving.api_request import CompletionRequest
from flowrt.serving.output_formats import REQUIRED_CALLS, OutputFormats
from flowrt.serving.output_parser import OutputParser

_ID_CHARACTERS = 24


def check_tools(request: CompletionRequest, formats: OutputFormats) -> None:
    """Raises ApiError when the model may call tools, but its calls would not be found."""
    if request.tool_choice == "auto" and request.is_parsed and not formats.tools:
        text = "are not supported by this model: its chat template shows no known form of tool calls"
        hint = "name one with flowrt serve --tool-call-parser, or let tool_choice be required, a function, or none"
        raise ApiError(UNSUPPORTED, f"tools {text}; {hint}", "tools")


def new_parser(request: CompletionRequest, formats: OutputFormats) -> OutputParser | None:
    """Makes the parser of one choice; None where the text is the answer as it is."""
    if not request.is_chat or not request.is_parsed:
        return None
    is_free = request.params.structured_outputs is None  # else the whole output has the form that is asked for
    tools = {"none": None, "auto": formats.tool_format if is_free else None, "required": REQUIRED_CALLS}[request.tool_choice]
    reasoning = formats.reasoning_format if is_free else None
    if tools is None and reasoning is None:
        return None
    schemas = {tool["function"]["name"]: tool["function"].get("parameters") for tool in request.tools or ()}
    max_calls = None if request.has_parallel_calls else 1
    return OutputParser(tools, reasoning, schemas, is_in_reasoning=request.is_in_reasoning, max_calls=max_calls)


def call_id_of(response: str, formats: OutputFormats, choice: int, index: int) -> str:
    """The same each time that the response is written. `response`: distinguishes it from all others, also from one with the same
    X-Request-Id: the calls of a conversation are told apart by their ids."""
    digest = sha256(f"{response} {choice} {index}".encode()).hexdigest()
    form = formats.tool_format
    return digest[: form.id_length] if form is not None and form.id_length else f"call_{digest[:_ID_CHARACTERS]}"
