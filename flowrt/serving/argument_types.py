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
MAX_SCHEMAS = 256  # that are looked at for one argument


def argument_types(schema: Any, key: str) -> set[str]:
    """The types that an argument may have; those of an unknown one are all."""
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    return _types(properties.get(key) if isinstance(properties, Mapping) else None, schema) or {"any"}


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


def _types(schema: Any, root: Any) -> set[str]:
    """Finds the types of a schema, of its alternatives, and of what it refers to, each looked at once: references may form circles."""
    found: set[str] = set()
    seen: set[int] = set()
    left = [schema]
    while left and len(seen) < MAX_SCHEMAS:
        each = left.pop()
        if not isinstance(each, Mapping) or id(each) in seen:
            continue
        seen.add(id(each))
        declared = each.get("type")
        found.update(kind for kind in (declared if isinstance(declared, list) else [declared]) if isinstance(kind, str))
        left += (alternative for name in ("anyOf", "oneOf", "allOf") for alternative in _list(each.get(name)))
        if isinstance(reference := each.get("$ref"), str):
            left.append(_resolved(reference, root))
        if "type" not in each:
            for value in (*_list(each.get("enum")), *([each["const"]] if "const" in each else [])):
                found.update(_KINDS.get(type(value), ()))
        if each.get("nullable") is True:
            found.add("null")
    return found


def _refuse(constant: str) -> float:
    raise ValueError(f"{constant} is not JSON")


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _resolved(reference: str, root: Any) -> Any:
    value = root
    for name in reference.removeprefix("#/").split("/"):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value
