"""Failures of validation in a user's words, each at the line it comes from.

Here: keys that are known but not built yet, and pydantic's errors turned into one GraphError. Not here: the rules themselves
(schema.py). Called by file.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from flowrt.graph.document import Document, Path_
from flowrt.graph.notation import LINK_NUMBERS, nearest, shown_value
from flowrt.graph.schema import GraphFile

_Test = Callable[[Any], bool]


def _above_one(value: Any) -> bool:
    return type(value) is int and value > 1


def _restarts(value: Any) -> bool:
    return value in ("restart_role", "restart_all")


def _present(value: Any) -> bool:
    return True


_ATTENTION, _EXPERTS = ("deploy", "attention"), ("deploy", "experts")
_NOT_BUILT: tuple[tuple[Path_, _Test, str], ...] = (
    ((*_ATTENTION, "domains"), _above_one, "more than one domain is not built yet; write domains: 1"),
    ((*_ATTENTION, "tensor_parallel"), _above_one, "tensor parallelism is not built yet; write tensor_parallel: 1 and more groups instead"),
    ((*_EXPERTS, "servers"), lambda value: value == "colocated", "colocated servers are not built yet; write servers: 0 or a number"),
    (("hosts",), _present, "several machines are not built yet; remove the key: all processes run on this one"),
    (("deploy", "hosts"), _present, "several machines are not built yet; remove the key: all processes run on this one"),
    (
        ("reliability", "recovery"),
        lambda value: value in ("restart_role", "restart_all"),
        "this recovery is not built yet; write fine or off",
    ),
    (("prefill",), _present, "separate prefill is not built yet; remove the key: every group does its own prefill"),
    (("deploy", "prefill"), _present, "separate prefill is not built yet; remove the key: every group does its own prefill"),
)


def refuse_what_is_not_built(document: Document) -> None:
    """Raises GraphError for the first key whose meaning is settled but not there yet."""
    for path, test, text in _NOT_BUILT:
        if document.has(path):
            value = document.value
            for key in path:
                value = value[key]
            if test(value):
                document.fail(path, text)


def raise_first(document: Document, error: ValidationError) -> None:
    """Raises GraphError for the error that stands first in the file."""
    problems = [_problem(document, item) for item in error.errors(include_url=False)]
    path, text = min(problems, key=lambda problem: (document.line(problem[0]) or 0, len(problem[0])))
    document.fail(path, text)


def _problem(document: Document, item: Any) -> tuple[Path_, str]:
    path: Path_ = tuple(item["loc"])
    kind, value, context = item["type"], item["input"], item.get("ctx", {})
    if path and path[-1] == "[key]":
        path = path[:-1]
    path = _real_path(document, path)
    if kind == "extra_forbidden":
        return path, _unknown_key(path)
    if kind == "missing":
        return path, _missing(path)
    return path, _wording(kind, value, context, item["msg"])


def _wording(kind: str, value: Any, context: dict[str, Any], message: str) -> str:
    shown = shown_value(value)
    if kind == "value_error":
        return str(context["error"])
    if kind == "int_type":
        return f"{shown} is no whole number; write one"
    if kind == "bool_type":
        return f"{shown} is neither true nor false; write one of them"
    if kind == "string_type":
        return f"{shown} is no text; write a word, in quotes if it looks like a number"
    if kind == "string_too_short":
        return "is empty; write a value"
    if kind == "list_type":
        return f"{shown} is no list; write '- ...' lines or [..., ...]"
    if kind in ("dict_type", "model_type", "model_attributes_type", "dataclass_type"):
        return f"{shown} is no mapping; write key: value lines below it"
    if kind == "literal_error":
        return f"{shown} is not possible; write {context['expected'].replace(chr(39), '')}"
    if kind == "greater_than_equal":
        return f"{shown} is too small; write {context['ge']} or more"
    if kind == "less_than_equal":
        return f"{shown} is too large; write {context['le']} or less"
    return f"{shown}: {message}"


def _real_path(document: Document, path: Path_) -> Path_:
    """Without the names of union members that pydantic puts into a path, which are no keys of the file."""
    real: list[str | int] = []
    value = document.value
    for index, key in enumerate(path):
        if isinstance(value, dict | list) and (_holds(value, key) or index == len(path) - 1):
            real.append(key)
            value = value[key] if _holds(value, key) else None  # type: ignore[index]
    return tuple(real)


def _holds(value: dict[str, Any] | list[Any], key: str | int) -> bool:
    return key in value if isinstance(value, dict) else isinstance(key, int) and key < len(value)


def _missing(path: Path_) -> str:
    if path == ("flowrt",):
        return "is missing; begin the file with flowrt: 1"
    return "is missing; write it"


def _unknown_key(path: Path_) -> str:
    section = _section(path[:-1])
    known = [field.alias or name for name, field in section.model_fields.items()] if section is not None else []
    key = str(path[-1])
    if key in LINK_NUMBERS:
        return f"unknown key {key!r}; the numbers of a link belong inside it: link: {{{key}: ..}}"
    elsewhere = None if key in known else _find(key, GraphFile, ())
    hint = nearest(key, known)
    if elsewhere is not None and hint.startswith("known:"):
        return f"unknown key {key!r}; it belongs {'under ' + '.'.join(elsewhere) if elsewhere else 'at the top of the file'}"
    return f"unknown key {key!r}; {hint}"


def _section(path: Path_) -> type[BaseModel] | None:
    """The model that validates the mapping at `path`."""
    section: type[BaseModel] | None = GraphFile
    index = 0
    while section is not None and index < len(path):
        field = next((field for name, field in section.model_fields.items() if (field.alias or name) == path[index]), None)
        if field is None:
            return None
        section, is_container = _model_in(field.annotation)
        index += 2 if is_container else 1
    return section


def _model_in(annotation: Any) -> tuple[type[BaseModel] | None, bool]:
    """The model inside an annotation, and whether it lies in a list or dict there."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation, False
    container = getattr(annotation, "__origin__", None) in (list, dict)
    for argument in get_args(annotation):
        model, inner = _model_in(argument)
        if model is not None:
            return model, container or inner
    return None, container


def _find(key: str, section: type[BaseModel], path: tuple[str, ...]) -> tuple[str, ...] | None:
    """Where in the short form a key of this name belongs: the path of its section."""
    for name, field in section.model_fields.items():
        word = field.alias or name
        if word == key:
            return path
        model, container = _model_in(field.annotation)
        if model is not None and not container:
            found = _find(key, model, (*path, word))
            if found is not None:
                return found
    return None
