"""Reads `tools` and `tool_choice` of a chat request, and writes the schema of an output that must call tools. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from flowrt.errors import shown
from flowrt.serving.json_body import invalid

ToolChoice = Literal["none", "auto", "required"]
Tool = dict[str, Any]


def chosen_tools(tools: Sequence[Tool] | None, choice: Any) -> tuple[ToolChoice, list[Tool]]:
    """What the model may do, and the tools that it may call. Raises ApiError."""
    tools = list(tools or ())
    places: dict[str, int] = {}
    for index, tool in enumerate(tools):
        name = tool["function"]["name"]
        if tool.get("type", "function") != "function":
            raise invalid(f"tools[{index}].type", f"is {shown(tool['type'])}, it must be 'function'")
        if places.setdefault(name, index) < index:
            raise invalid(f"tools[{index}].function.name", f"is {shown(name)}, as that of another tool is")
    if choice in (None, "auto"):
        return ("auto", tools) if tools else ("none", [])
    if choice == "none":
        return "none", []
    if choice == "required":
        if not tools:
            raise invalid("tool_choice", "is 'required', and there are no tools")
        return "required", tools
    function = choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise invalid("tool_choice", f"is {shown(choice)}, it must be none, auto, required, or a function such as {_EXAMPLE}")
    if function["name"] not in places:
        raise invalid("tool_choice.function.name", f"is {shown(function['name'])}, which is none of the tools")
    return "required", [tools[places[function["name"]]]]


_EXAMPLE = "{'type': 'function', 'function': {'name': 'f'}}"


def required_schema(tools: Sequence[Tool], max_calls: int | None) -> dict[str, Any]:
    """The JSON schema of a list of calls, as output_formats.REQUIRED_CALLS reads it. References in the schema of a tool stay within it."""
    schemas = {str(index): _parameters(tool, f"#/$defs/{index}") for index, tool in enumerate(tools)}
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


def _parameters(tool: Tool, root: str) -> Any:
    parameters = tool["function"].get("parameters")
    return _moved(
        {"type": "object"} | parameters if parameters else {"type": "object", "properties": {}, "additionalProperties": False}, root
    )


def _moved(schema: Any, root: str) -> Any:
    """A schema that is at `root` of another one."""
    if isinstance(schema, Mapping):
        moved = {name: _moved(value, root) for name, value in schema.items()}
        if isinstance(reference := schema.get("$ref"), str) and reference.startswith("#"):
            moved["$ref"] = root + reference.removeprefix("#")
        return moved
    return [_moved(each, root) for each in schema] if isinstance(schema, list) else schema
