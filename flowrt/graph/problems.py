"""Turns validation errors into errors for the user, each with the line that it comes from."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import is_dataclass
from fnmatch import fnmatchcase
from typing import Any, get_args, get_origin, get_type_hints

from pydantic import BaseModel, ValidationError

from flowrt.graph.document import Document, Path_
from flowrt.graph.notation import LINK_NUMBERS, nearest, shown_value
from flowrt.graph.schema import GraphFile


def _above_one(value: Any) -> bool:
    return type(value) is int and value > 1


def _is_given(value: Any) -> bool:
    return True


_UNBUILT: dict[Path_, tuple[Callable[[Any], bool], str]] = {
    ("deploy", "attention", "tensor_parallel"): (_above_one, "tensor parallelism is not built yet; write tensor_parallel: 1"),
    ("deploy", "hosts"): (_is_given, "hosts belong at the top of the file; write hosts: {engine: ray, count: 2}"),
    ("prefill",): (_is_given, "prefill workers belong under deploy; write deploy: {prefill: {workers: 1}}"),
}
_WORDINGS = {  # pydantic's kind of error -> its text
    "value_error": "{error}",
    "int_type": "{shown} is not a whole number; write one",
    "float_type": "{shown} is not a number; write one",
    "finite_number": "{shown} is not a finite number; write one",
    "bool_type": "{shown} is neither true nor false; write one of them",
    "string_type": "{shown} is not a text; write a word, in quotes if it looks like a number",
    "string_pattern_mismatch": "{shown} is not a device; write cpu, cuda, or cuda:N",
    "string_too_short": "is empty; write a value",
    "list_type": "{shown} is not a list; write '- ...' lines or [..., ...]",
    "literal_error": "{shown} is not possible; write {expected}",
    "greater_than_equal": "{shown} is too small; write {ge:.15g} or more",
    "less_than_equal": "{shown} is too large; write {le:.15g} or less",
}
_WORDINGS |= dict.fromkeys(("dict_type", "model_type", "dataclass_type"), "{shown} is not a mapping; write key: value lines below it")


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
    while item["type"] != "missing" and not document.has(path):  # pydantic adds "[key]", and names in what a validator returned
        path = path[:-1]
    if item["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        return path, _unknown_key(path)
    if item["type"] == "missing":
        return path, "is missing; begin the file with flowrt: 1" if path == ("flowrt",) else "is missing; write it"
    context = {key: value.replace("'", "") if key == "expected" else value for key, value in item.get("ctx", {}).items()}
    wording = _WORDINGS.get(item["type"], "{shown} is not possible; {message}")
    return path, wording.format(shown=shown_value(item["input"]), message=item["msg"], **context)


def _unknown_key(path: Path_) -> str:
    *parents, key = map(str, path)
    known = next((keys for at, keys in _sections(GraphFile, ()) if len(at) == len(parents) and all(map(fnmatchcase, parents, at))), [])
    if key in LINK_NUMBERS:
        return f"unknown key {key!r}; the numbers of a link belong inside it: link: {{{key}: ..}}"
    if (elsewhere := find_section(key)) is not None:
        return f"unknown key {key!r}; it belongs {'under ' + '.'.join(elsewhere) if elsewhere else 'at the top of the file'}"
    return f"unknown key {key!r}; {nearest(key, known)}"


def find_section(key: str) -> tuple[str, ...] | None:
    """The path of the first section of a graph file that has this key, or None."""
    return next((at for at, keys in _sections(GraphFile, ()) if key in keys and "*" not in at), None)


def _sections(section: type[Any], path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], list[str]]]:
    """Yield the path and keys of every section of a graph file; "*" stands for any key of a mapping of sections."""
    if is_dataclass(section):
        fields: dict[str, Any] = get_type_hints(section)
    else:
        fields = {field.alias or name: field.annotation for name, field in section.model_fields.items()}
    yield path, list(fields)
    for key, annotation in fields.items():
        for model, container in _models_in(annotation):
            yield from _sections(model, (*path, key, *container))


def _models_in(annotation: Any) -> Iterator[tuple[type[Any], tuple[str, ...]]]:
    """Yield the models and dataclasses inside an annotation, each with ("*",) where a mapping holds it."""
    if isinstance(annotation, type) and (issubclass(annotation, BaseModel) or is_dataclass(annotation)):
        yield annotation, ()
    for argument in get_args(annotation):
        for model, container in _models_in(argument):
            yield model, ("*",) if get_origin(annotation) is dict else container
