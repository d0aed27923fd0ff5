"""Turns validation errors into errors for the user, each with the line that it comes from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from flowrt.graph.document import Document, Path_
from flowrt.graph.notation import LINK_NUMBERS, nearest, shown_value
from flowrt.graph.schema import GraphFile


def _above_one(value: Any) -> bool:
    return type(value) is int and value > 1


def _is(*words: str) -> Callable[[Any], bool]:
    return lambda value: value in words


def _is_given(value: Any) -> bool:
    return True


_HOSTS = "several machines are not built yet; remove the key: all processes run on this one"
_PREFILL = "separate prefill is not built yet; remove the key: every group does its own prefill"
_UNBUILT: dict[Path_, tuple[Callable[[Any], bool], str]] = {
    ("deploy", "attention", "domains"): (_above_one, "more than one domain is not built yet; write domains: 1"),
    ("deploy", "attention", "tensor_parallel"): (_above_one, "tensor parallelism is not built yet; write tensor_parallel: 1"),
    ("deploy", "experts", "servers"): (
        lambda value: value == "colocated",
        "colocated servers are not built yet; write servers: 0 or a number",
    ),
    ("deploy", "experts", "trampoline"): (_is_given, "the trampoline is not built yet; remove the key"),
    ("deploy", "links", "prefill-attention"): (_is_given, _PREFILL),
    ("deploy", "prefill"): (_is_given, _PREFILL),
    ("deploy", "hosts"): (_is_given, _HOSTS),
    ("prefill",): (_is_given, _PREFILL),
    ("hosts",): (_is_given, _HOSTS),
    ("reliability", "recovery"): (
        lambda value: value in ("restart_role", "restart_all"),
        "this recovery is not built yet; write fine or off",
    ),
}
_WORDINGS = {  # pydantic's kind of error -> its text
    "value_error": "{error}",
    "int_type": "{shown} is not a whole number; write one",
    "float_type": "{shown} is not a number; write one",
    "finite_number": "{shown} is not a finite number; write one",
    "bool_type": "{shown} is neither true nor false; write one of them",
    "string_type": "{shown} is not a text; write a word, in quotes if it looks like a number",
    "string_too_short": "is empty; write a value",
    "list_type": "{shown} is not a list; write '- ...' lines or [..., ...]",
    "literal_error": "{shown} is not possible; write {expected}",
    "greater_than_equal": "{shown} is too small; write {ge:g} or more",
    "less_than_equal": "{shown} is too large; write {le:g} or less",
}
_WORDINGS |= dict.fromkeys(
    ("dict_type", "model_type", "model_attributes_type"), "{shown} is not a mapping; write key: value lines below it"
)


def refuse_unbuilt(document: Document) -> None:
    """Raises GraphError for the first key that is defined but not implemented yet."""
    for path, (test, text) in _UNBUILT.items():
        if document.has(path) and test(document.at(path)):
            document.fail(path, text)


def raise_first(document: Document, error: ValidationError) -> None:
    """Raises GraphError for the error that stands first in the file."""
    problems = [_problem(document, item) for item in error.errors(include_url=False)]
    path, text = min(problems, key=lambda problem: (document.line(problem[0]) or 0, len(problem[0])))
    document.fail(path, text)


def _problem(document: Document, item: Any) -> tuple[Path_, str]:
    path: Path_ = tuple(item["loc"])
    path = _real_path(document, path[:-1] if path and path[-1] == "[key]" else path)
    if item["type"] == "extra_forbidden":
        return path, _unknown_key(path)
    if item["type"] == "missing":
        return path, "is missing; begin the file with flowrt: 1" if path == ("flowrt",) else "is missing; write it"
    context = {key: value.replace("'", "") if key == "expected" else value for key, value in item.get("ctx", {}).items()}
    wording = _WORDINGS.get(item["type"], "{shown} is not possible; {message}")
    return path, wording.format(shown=shown_value(item["input"]), message=item["msg"], **context)


def _real_path(document: Document, path: Path_) -> Path_:
    """The path without the names of union members that pydantic adds, which are not keys of the file."""
    real: list[str | int] = []
    value = document.value
    for index, key in enumerate(path):
        if isinstance(value, dict | list) and (_holds(value, key) or index == len(path) - 1):
            real.append(key)
            value = value[key] if _holds(value, key) else None  # type: ignore[index]
    return tuple(real)


def _holds(value: dict[str, Any] | list[Any], key: str | int) -> bool:
    return key in value if isinstance(value, dict) else isinstance(key, int) and key < len(value)


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
    """The model of the mapping at `path`."""
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
    """The model inside an annotation, and whether a list or dict holds it there."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation, False
    container = getattr(annotation, "__origin__", None) in (list, dict)
    for argument in get_args(annotation):
        model, inner = _model_in(argument)
        if model is not None:
            return model, container or inner
    return None, container


def _find(key: str, section: type[BaseModel], path: tuple[str, ...]) -> tuple[str, ...] | None:
    """The path of the section of the short form that has a key of this name."""
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
