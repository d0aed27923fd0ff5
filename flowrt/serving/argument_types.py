"""Reads the types of a function's arguments from its JSON schema, and writes texts of a model as values of them. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

_PYTHON_NAMES = {"True": "true", "False": "false", "None": "null"}
_KINDS: dict[type, tuple[str, ...]] = {
    str: ("string",),
    bool: ("boolean",),
    int: ("integer", "number"),
    float: ("number",),
    list: ("array",),
    dict: ("object",),
    type(None): ("null",),
}
MAX_DEPTH = 16  # of references and alternatives


def argument_types(schema: Any, key: str) -> set[str]:
    """The types that an argument may have; those of an unknown one are all."""
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    return _types(properties.get(key) if isinstance(properties, Mapping) else None, schema, MAX_DEPTH) or {"any"}


def argument_json(text: str, types: set[str]) -> str:
    """A value as JSON: of one of the types if the text is one, else a string."""
    stripped = text.strip()
    stripped = _PYTHON_NAMES.get(stripped, stripped)
    try:
        kinds = _KINDS[type(json.loads(stripped, parse_constant=_refuse))]
    except (ValueError, RecursionError):
        kinds = ()
    is_value = kinds != ("string",) and bool(kinds) and ("any" in types or not types.isdisjoint(kinds))
    return stripped if is_value else json.dumps(text, ensure_ascii=False)


def _types(schema: Any, root: Any, depth: int) -> set[str]:
    if not isinstance(schema, Mapping) or not depth:
        return set()
    declared = schema.get("type")
    found = {each for each in (declared if isinstance(declared, list) else [declared]) if isinstance(each, str)}
    alternatives = [each for name in ("anyOf", "oneOf", "allOf") for each in _list(schema.get(name))]
    if isinstance(reference := schema.get("$ref"), str):
        alternatives.append(_resolved(reference, root))
    for each in alternatives:
        found |= _types(each, root, depth - 1)
    for value in (*_list(schema.get("enum")), *([schema["const"]] if "const" in schema else [])):
        found |= set(_KINDS.get(type(value), ())) if "type" not in schema else set()
    return found | ({"null"} if schema.get("nullable") is True else set())


def _refuse(constant: str) -> float:
    raise ValueError(f"{constant} is not JSON")


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _resolved(reference: str, root: Any) -> Any:
    value = root
    for name in reference.removeprefix("#/").split("/"):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value
