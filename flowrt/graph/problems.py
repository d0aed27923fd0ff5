"""Validates the values of a graph file, and gives errors for the user, each with the line that it comes from."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from math import isfinite
from types import NoneType
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

import msgspec

from flowrt.costs.links import LINK_NUMBERS
from flowrt.document import Document, Path_
from flowrt.errors import nearest
from flowrt.graph.notation import shown_value
from flowrt.graph.schema import keys_of, kind_of, members_of, sections
from flowrt.graph.settings import Section

S = TypeVar("S", bound=Section)


def _above_one(value: Any) -> bool:
    return type(value) is int and value > 1


def _is_given(value: Any) -> bool:
    return True


_UNBUILT: dict[Path_, tuple[Callable[[Any], bool], str]] = {
    ("deploy", "attention", "tensor_parallel"): (_above_one, "tensor parallelism is not built yet; write tensor_parallel: 1"),
    ("deploy", "hosts"): (_is_given, "hosts belong at the top of the file; write hosts: {engine: ray, count: 2}"),
    ("prefill",): (_is_given, "prefill workers belong under deploy; write deploy: {prefill: {workers: 1}}"),
}
_TENSORS, _PIPELINES, _DRAFTS, _QUANTISED = "tensor parallelism", "pipeline parallelism", "speculative decoding", "quantisation"
_UNBUILT_NAMES = {  # keys and options of other servers
    **dict.fromkeys(("tensor_parallel", "tensor_parallel_size", "tp", "tp_size"), _TENSORS),
    **dict.fromkeys(("pipeline_parallel_size", "pp", "pp_size"), _PIPELINES),
    **dict.fromkeys(("speculative", "speculative_config", "speculative_model", "speculative_algorithm", "num_speculative_tokens"), _DRAFTS),
    **dict.fromkeys(("quantization", "quantization_config"), _QUANTISED),
}
_WRONG_TYPES = {
    int: "{} is not a whole number; write one",
    float: "{} is not a number; write one",
    bool: "{} is neither true nor false; write one of them",
    str: "{} is not a text; write a word, in quotes if it looks like a number",
    list: "{} is not a list; write '- ...' lines or [..., ...]",
    dict: "{} is not a mapping; write key: value lines below it",
}


def refuse_unbuilt(document: Document) -> None:
    """Raises GraphError for the first key that is defined but not implemented yet."""
    for path, (test, text) in _UNBUILT.items():
        if document.has(path) and test(document.at(path)):
            document.fail(path, text)


def read_sections(document: Document, kind: type[S], what: str) -> S:
    """The sections of the file. Raises GraphError for the mistake that stands first in it."""
    file, why = None, ""
    try:
        file = msgspec.convert(document.value, kind)
    except (
        msgspec.ValidationError,
        ValueError,
    ) as error:  # it gives neither the value nor every key of its path, and cannot show large integers
        why = str(error)
    problems = list(_problems(kind, document.value, (), file is not None))
    if problems:
        document.fail(*min(problems, key=lambda problem: (document.line(problem[0]) or 0, len(problem[0]))))
    if file is None:
        document.fail((), f"is not {what} ({why}); correct it")
    return file


def _problems(annotation: Any, value: Any, path: Path_, is_typed: bool) -> Iterator[tuple[Path_, str]]:
    """Yield path and text of each mistake in `value`. `is_typed`: types and bounds are right, only the checks of keys remain."""
    kind, about = kind_of(annotation)
    if type(value) not in _types(kind):
        yield path, _wrong_value(kind, value, about)
        return
    if "check" in about:
        try:
            about["check"](value)
        except ValueError as error:
            yield path, str(error)
            return
    if isinstance(kind, type) and issubclass(kind, Section):
        yield from _problems_of_section(kind, value, path, is_typed)
    elif value is None or kind is Any:
        return
    elif members_of(kind) != (kind,):
        member = next(each for each in members_of(kind) if type(value) in _types(each))
        is_choice = any(get_origin(each) is Literal for each in members_of(kind))
        found = _problems(member, value, path, is_typed)
        yield from ((path, _wrong_value(kind, value, about)) for _ in found) if is_choice else found
    elif isinstance(value, dict):
        of_key, of_value = get_args(kind)
        for key, inner in value.items():
            yield from _problems(of_key, key, (*path, key), is_typed)
            yield from _problems(of_value, inner, (*path, key), is_typed)
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            yield from _problems(get_args(kind)[0], inner, (*path, number), is_typed)
    elif not is_typed and (text := _wrong_scalar(annotation, value, about)):
        yield path, text


def _problems_of_section(section: type[Section], value: dict[str, Any], path: Path_, is_typed: bool) -> Iterator[tuple[Path_, str]]:
    keys = _checked_keys(section) if is_typed else keys_of(section)
    for key in value if not is_typed else ():  # first: one that is misspelled is not missing
        if key not in keys:
            yield (*path, key), _unknown_key(key, section)
    for key, field in keys.items() if not is_typed else ():
        if field.required and key not in value:
            yield (*path, key), "is missing; begin the file with flowrt: 1" if key == "flowrt" else "is missing; write it"
    for key, inner in value.items():
        if key in keys:
            yield from _problems(keys[key].type, inner, (*path, key), is_typed)


@cache
def _checked_keys(section: type[Section]) -> dict[str, msgspec.structs.FieldInfo]:
    """The keys whose values have a check of their own, also further below."""
    return {key: field for key, field in keys_of(section).items() if _has_check(field.type)}


def _has_check(annotation: Any) -> bool:
    kind, about = kind_of(annotation)
    if isinstance(kind, type) and issubclass(kind, Section):
        return bool(_checked_keys(kind))
    return "check" in about or any(map(_has_check, get_args(kind) if get_origin(kind) is not Literal else ()))


@cache
def _types(annotation: Any) -> frozenset[type]:
    """The types of values in a file that an annotation takes."""
    kind, _ = kind_of(annotation)
    if isinstance(kind, type) and issubclass(kind, Section):
        return frozenset((dict,))
    if kind is Any:
        return frozenset((dict, list, str, int, float, bool, NoneType))
    if get_origin(kind) is Literal:
        return frozenset(map(type, get_args(kind)))
    if members_of(kind) != (kind,):
        return frozenset().union(*map(_types, members_of(kind)), {NoneType} & {*get_args(kind)})
    return {float: frozenset((int, float)), tuple: frozenset((list,))}.get(get_origin(kind) or kind, frozenset((get_origin(kind) or kind,)))


def _wrong_value(kind: Any, value: Any, about: dict[str, Any]) -> str:
    """The text for a value of another type, or that is none of the choices."""
    members = members_of(kind)
    described = next(filter(None, [about.get("wrong"), *(kind_of(each)[1].get("wrong") for each in members)]), None)
    if described is not None:
        return f"{shown_value(value)} is not {described}"
    section = next((each for each in members if isinstance(each, type) and issubclass(each, Section)), None)
    if section is not None:
        fitting = next((key for key, field in keys_of(section).items() if field.required and type(value) in _types(field.type)), None)
        if fitting is not None:
            return _WRONG_TYPES[dict].format(shown_value(value)) + f", such as {fitting}: {value}"
    choices = [str(choice) for each in members if get_origin(kind_of(each)[0]) is Literal for choice in get_args(kind_of(each)[0])]
    if choices:
        numbers = [_bounds(each) for each in members if kind_of(each)[0] is int]
        possible = ", ".join(choices[:-1]) + (" or " if choices[:-1] else "") + choices[-1]
        if numbers:
            possible = f"{', '.join(choices)}, or a number from {numbers[0][0]} to {numbers[0][1]}"
        return f"{shown_value(value)} is not possible; write {possible}"
    wanted = kind_of(members[0])[0]
    return _WRONG_TYPES[next(each for each in (float, *_types(wanted)) if each in _types(wanted))].format(shown_value(value))


def _wrong_scalar(annotation: Any, value: Any, about: dict[str, Any]) -> str:
    """What is wrong with a value of the right type; "" for nothing."""
    try:
        msgspec.convert(value, annotation)
    except (msgspec.ValidationError, ValueError):
        kind, _ = kind_of(annotation)
        if isinstance(value, str) and not value:
            return "is empty; write a value"
        if get_origin(kind) is Literal or isinstance(value, str):
            return _wrong_value(kind, value, about)
        least, most = _bounds(annotation)
        if isinstance(value, float) and not isfinite(value):
            return f"{shown_value(value)} is not a finite number; write one"
        if least is not None and value < least:
            return f"{shown_value(value)} is too small; write {least:.15g} or more"
        return f"{shown_value(value)} is too large; write {most:.15g} or less"
    return ""


def _bounds(annotation: Any) -> tuple[Any, Any]:
    """The smallest and largest value of a number, None for no bound."""
    metas = get_args(annotation)[1:] if get_origin(annotation) is Annotated else ()
    return next((meta.ge for meta in metas if meta.ge is not None), None), next((meta.le for meta in metas if meta.le is not None), None)


def _unknown_key(key: str, section: type[Section]) -> str:
    if text := unbuilt(key):
        return text
    if key in LINK_NUMBERS:
        return f"unknown key {key!r}; the numbers of a link belong inside it: link: {{{key}: ..}}"
    if section in dict(sections()).values() and (elsewhere := find_section(key)) is not None:
        return f"unknown key {key!r}; it belongs {'under ' + '.'.join(elsewhere) if elsewhere else 'at the top of the file'}"
    return f"unknown key {key!r}; {nearest(key, keys_of(section))}"


def unbuilt(name: str) -> str:
    """The text for a key or option of other servers that stands for something not implemented yet; "" for others."""
    what = _UNBUILT_NAMES.get(name.replace("-", "_"))
    if what == _QUANTISED:
        return f"weights in 8 bits are model.weights and model.expert_weights, int8 or fp8; leave {name} out"
    return f"{what} is not built yet; leave {name} out" if what else ""


def find_section(key: str) -> tuple[str, ...] | None:
    """The path of the first section of a graph file that has this key, or None."""
    return next((at for at, keys in _sections() if key in keys and "*" not in at), None)


@cache
def _sections() -> list[tuple[tuple[str, ...], list[str]]]:
    """The path and keys of each section of a graph file."""
    return [(path, list(keys_of(section))) for path, section in sections()]
