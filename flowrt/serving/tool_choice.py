"""Reads `tools` and `tool_choice` of a chat request, and writes the schema of an output that must call tools. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from flowrt.errors import shown
from flowrt.serving.json_body import invalid
from flowrt.serving.output_parser import can_be_named

ToolChoice = Literal["none", "auto", "required"]
Tool = dict[str, Any]


def chosen_tools(tools: Sequence[Tool] | None, choice: Any) -> tuple[ToolChoice, list[Tool]]:
    """What the model may do, and the tools that it may call. Raises ApiError."""
    tools = list(tools or ())
    places: dict[str, int] = {}
    for index, tool in enumerate(tools):
        name = tool["function"]["name"]
        if places.setdefault(name, index) < index:
            raise invalid(f"tools[{index}].function.name", f"is {shown(name)}, as that of another tool is")
        if not can_be_named(name):
            rule = "1 to 64 letters, digits, _ and - as for OpenAI"
            raise invalid(f"tools[{index}].function.name", f"is {shown(name)}, which calls could not have; write {rule}")
    if choice in (None, "auto"):
        return ("auto", tools) if tools else ("none", [])
    if choice == "none":
        return "none", []
    if choice == "required":
        if not tools:
            raise invalid("tool_choice", "is 'required', and there are no tools")
        _check_schemas(tools, places)
        return "required", tools
    function = choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise invalid("tool_choice", f"is {shown(choice)}, it must be none, auto, required, or a function such as {EXAMPLE}")
    if function["name"] not in places:
        raise invalid("tool_choice.function.name", f"is {shown(function['name'])}, which is none of the tools")
    tools = [tools[places[function["name"]]]]
    _check_schemas(tools, places)
    return "required", tools


EXAMPLE = "{'type': 'function', 'function': {'name': 'f'}}"


def required_schema(tools: Sequence[Tool], max_calls: int | None) -> dict[str, Any]:
    """The JSON schema of a list of calls, as output_formats.REQUIRED_CALLS reads it. Ids make the schemas of tools documents of their own:
    references and anchors stay within them."""
    schemas = {str(index): {"$id": f"tool:/{index}/"} | argument_schema(tool) for index, tool in enumerate(tools)}
    calls = [
        {
            "type": "object",
            "properties": {"name": {"enum": [tool["function"]["name"]]}, "parameters": {"$ref": f"#/$defs/{index}"}},
            "required": ["name", "parameters"],
            "additionalProperties": False,
        }
        for index, tool in enumerate(tools)
    ]
    bounds = {"minItems": 1} | ({} if max_calls is None else {"maxItems": max_calls})
    return {"type": "array", "items": {"anyOf": calls}, **bounds, "$defs": schemas}


def argument_schema(tool: Tool) -> dict[str, Any]:
    """The JSON schema of the arguments of a call."""
    parameters = tool["function"].get("parameters")  # {}: any object; without them there are no arguments
    return ({"properties": {}, "additionalProperties": False} if parameters is None else parameters) | {"type": "object"}


def _check_schemas(tools: list[Tool], places: Mapping[str, int]) -> None:
    """Raises ApiError for a schema by which no call can be required."""
    found: dict[str, Any] = {}
    for tool in tools:
        path = f"tools[{places[tool['function']['name']]}].function.parameters"
        parameters = tool["function"].get("parameters") or {}
        if "object" not in (kind if isinstance(kind := parameters.get("type", "object"), list) else [kind]):
            raise invalid(path, f"have the type {shown(kind)}, it must be 'object'")
        _check_ids(parameters, path, found)


def _check_ids(parameters: Any, path: str, found: dict[str, Any]) -> None:
    """Raises ApiError for an id that another schema has, too: references could mean either. `found`: the schemas by their ids."""
    if isinstance(parameters, Mapping):
        if isinstance(name := parameters.get("$id"), str) and found.setdefault(name, parameters) != parameters:
            raise invalid(path, f"has the $id {shown(name)} of another schema")
        parameters = parameters.values()
    elif not isinstance(parameters, list):
        return
    for each in parameters:
        _check_ids(each, path, found)
