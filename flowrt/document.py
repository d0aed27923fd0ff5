"""Reads the YAML of graph files, scenarios and cards as plain values with their line numbers, and applies `--set` overrides to them.

It refuses duplicate keys, tags, anchors and aliases (so that no small file becomes a large one), deep nesting, large files, and several
documents. The values are not checked: schema.py does that.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from os import PathLike, fspath
from pathlib import Path
from typing import Any, NoReturn

import yaml
from yaml.events import (
    AliasEvent,
    DocumentStartEvent,
    MappingEndEvent,
    MappingStartEvent,
    ScalarEvent,
    SequenceEndEvent,
    SequenceStartEvent,
)

from flowrt.errors import GraphError, shown
from flowrt.text_files import TextFileError, read_text_file

Path_ = tuple[str | int, ...]  # the keys from the top of the file
Lines = dict[str | int, Any]  # key -> its line, or its line and the `Lines` of the mapping or list below it

MAX_FILE_BYTES = (
    64 << 20
)  # room for what each of 1,024 servers holds in each layer, and for the explicit form of 480 groups and 288 servers
MAX_DEPTH = 24
MAX_PATH_CHARACTERS = 1000

_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml's parser is 20 times as fast
_UNPRINTABLE = re.compile("[^\t\n\r -~\x85\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")  # YAML 1.1, section 5.1
_INT = re.compile(r"[-+]?[0-9][0-9_]*|0x[0-9a-fA-F]+|0o[0-7]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9][0-9_]*(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_LITERALS: dict[str, Any] = {"": None, "~": None, "null": None, "Null": None, "NULL": None}
_LITERALS |= {word: True for word in ("true", "True", "TRUE")} | {word: False for word in ("false", "False", "FALSE")}


@dataclass
class Document:
    """`value` is made of dict (keys are strings), list, str, int, float, bool and None.

    `lines` gives the lines of the keys; None for values that were not read from a file. `overrides`: where keys come from that
    were set later.
    """

    name: str
    value: Any
    lines: Lines | None = None
    overrides: dict[Path_, str] = field(default_factory=dict)

    def where(self, path: Path_) -> str:
        """ "FILE:LINE" of the key at `path`, or of the nearest key above it; for an override where it comes from."""
        if (override := self._override(path)) is not None:
            return override
        return self.name if self.lines is None else f"{self.name}:{self.line(path)}"

    def line(self, path: Path_) -> int:
        """The line number alone; 0 for a value of an override or not from a file."""
        if self.lines is None or self._override(path) is not None:
            return 0
        line, below = 1, self.lines
        for key in path:
            if (found := below.get(key)) is None:
                break
            line, below = found if type(found) is tuple else (found, {})
        return line

    def _override(self, path: Path_) -> str | None:
        ends = range(len(path), -1, -1) if self.overrides else ()
        return next((self.overrides[path[:end]] for end in ends if path[:end] in self.overrides), None)

    def fail(self, path: Path_, text: str) -> NoReturn:
        raise GraphError(self.where(path), dotted(path), text)

    def below(self, key: str) -> Document:
        """The document of the mapping at `key`; its lines stay those of the file."""
        found = (self.lines or {}).get(key)
        overrides = {path[1:]: where for path, where in self.overrides.items() if path[0] == key}
        return Document(self.name, self.value.get(key) or {}, found[1] if type(found) is tuple else {}, overrides)

    def has(self, path: Path_) -> bool:
        """Whether the file or an override has the key at `path`."""
        try:
            self.at(path)
        except (LookupError, TypeError):
            return False
        return True

    def at(self, path: Path_) -> Any:
        """The value at `path`. Raises LookupError or TypeError when there is none."""
        value = self.value
        for key in path:
            if isinstance(value, str):
                raise LookupError(key)
            value = value[key]
        return value


def dotted(path: Path_) -> str:
    return ".".join(str(key) for key in path)


def read_document(path: Path) -> Document:
    """Read the file at `path`. Raises GraphError when it is missing, too large, not UTF-8, or not the YAML of graph files."""
    return parse_document(read_text(path), str(path))


def read_text(path: Path) -> str:
    """As `read_text_file`. Raises GraphError."""
    try:
        return read_text_file(path)
    except TextFileError as error:
        raise GraphError(f"{path}:{error.line}" if error.line else str(path), "", str(error)) from None


def parse_document(text: str, name: str) -> Document:
    """As `read_document`, for a text. Errors use `name` as the file name."""
    if (unprintable := _UNPRINTABLE.search(text)) is not None:
        line = text.count("\n", 0, unprintable.start()) + 1
        raise GraphError(f"{name}:{line}", "", f"holds the character {unprintable[0]!r}; remove it")
    try:
        return _Reader(name, _LOADER(text)).read()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line, found = (1, "") if mark is None else (mark.line + 1, text[mark.index : mark.index + 1])
        problem = _single_line(error.problem or str(error)) + (f" at {found!r}" if found else "")
        began = error.context_mark.line + 1 if error.context_mark is not None else line
        place = "this line" if began >= line else f"this line, or what begins on line {began}"
        raise GraphError(f"{name}:{line}", "", f"is not YAML: {problem}; correct {place}") from None
    except yaml.YAMLError as error:
        raise GraphError(f"{name}:1", "", f"is not YAML: {_single_line(str(error))}; correct it") from None


def document_of(value: Mapping[str, Any], name: str) -> Document:
    """A document of values from Python instead of a file. Raises GraphError for values that a file cannot hold."""
    return Document(name, _plain(value, (), name))


def _plain(value: Any, path: Path_, name: str) -> Any:
    """A copy of plain values; paths become text. It ends in a structure that contains itself, because the depth is bounded."""
    if len(path) > MAX_DEPTH:
        raise GraphError(name, dotted(path), f"is nested more than {MAX_DEPTH} deep; write a flatter structure")
    if isinstance(value, Mapping):
        if (wrong := next((key for key in value if not isinstance(key, str)), None)) is not None:
            raise GraphError(name, dotted(path), f"has the key {shown(wrong)}; keys are texts")
        return {key: _plain(inner, (*path, key), name) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner, (*path, index), name) for index, inner in enumerate(value)]
    if isinstance(value, PathLike):
        return fspath(value)
    if value is None or type(value) in (str, int, float, bool):
        return value
    raise GraphError(name, dotted(path), f"is {shown(value)}; write a text, a number, True, False, None, a list or a dict")


class _Reader:
    """Turns parse events into values. It does not use a YAML loader's values, because that resolves aliases and tags first."""

    def __init__(self, name: str, parser: Any) -> None:
        self._name = name
        self._next = parser.get_event
        self._path: list[str | int] = []  # of the value that is being read

    def read(self) -> Document:
        document = Document(self._name, None, {})
        documents = 0
        while (event := self._next()) is not None:
            if isinstance(event, DocumentStartEvent):
                documents += 1
                if documents > 1:
                    self._fail(event, "a second document begins; a file holds one: remove what follows '---'")
            elif isinstance(event, ScalarEvent | MappingStartEvent | SequenceStartEvent | AliasEvent):
                document.value, lines = self._value(event)
                document.lines = lines or {}
        return document

    def _value(self, event: Any) -> tuple[Any, Lines | None]:
        """The value that begins with `event`, and the lines of a mapping or list."""
        if len(self._path) > MAX_DEPTH:
            del self._path[4:]
            self._fail(event, f"is nested more than {MAX_DEPTH} deep; write a flatter structure")
        kind = type(event)
        if kind is AliasEvent or event.anchor is not None or event.tag is not None:
            self._refuse(event)
        if kind is ScalarEvent:
            return self._scalar(event), None
        return self._sequence() if kind is SequenceStartEvent else self._mapping()

    def _refuse(self, event: Any) -> NoReturn:
        if isinstance(event, AliasEvent):
            self._fail(event, f"'*{event.anchor}' refers to an anchor; write the value out")
        if event.anchor is not None:
            self._fail(event, f"'&{event.anchor}' is an anchor; write the value out where it is needed")
        self._fail(event, f"the YAML tag {event.tag} is refused; write the plain value")

    def _sequence(self) -> tuple[list[Any], Lines]:
        values: list[Any] = []
        lines: Lines = {}
        while type(event := self._next()) is not SequenceEndEvent:
            values.append(self._item(len(values), event.start_mark.line + 1, event, lines))
        return values, lines

    def _mapping(self) -> tuple[dict[str, Any], Lines]:
        values: dict[str, Any] = {}
        lines: Lines = {}
        while type(event := self._next()) is not MappingEndEvent:
            if type(event) is AliasEvent or event.anchor is not None or event.tag is not None:
                self._refuse(event)
            if type(event) is not ScalarEvent:
                self._fail(event, "a key must be a word, not a list or mapping; write key: value")
            key = str(event.value)
            if key in values:
                first = lines[key][0] if type(lines[key]) is tuple else lines[key]
                self._path.append(key)
                self._fail(event, f"the key exists twice, first on line {first}; keep one")
            values[key] = self._item(key, event.start_mark.line + 1, self._next(), lines)
        return values, lines

    def _item(self, key: str | int, line: int, event: Any, lines: Lines) -> Any:
        """The value of `key` that begins with `event`. Adds the line of the key to `lines`."""
        self._path.append(key)
        value, below = self._value(event)
        self._path.pop()
        lines[key] = line if below is None else (line, below)
        return value

    def _scalar(self, event: ScalarEvent) -> Any:
        text = str(event.value)
        if event.style in ("'", '"', "|", ">"):
            return text
        try:
            return plain_value(text)
        except ValueError:
            self._fail(event, f"{text[:24]} is too large a number; write one of at most 18 digits")

    def _fail(self, event: Any, text: str) -> NoReturn:
        raise GraphError(f"{self._name}:{event.start_mark.line + 1}", dotted(tuple(self._path)), text)


def plain_value(text: str) -> Any:
    """The value of `text` without quotes: null, a truth value, a number, or the text. Raises ValueError for too many digits."""
    if text in _LITERALS:
        return _LITERALS[text]
    if text[0] not in "+-.0123456789":
        return text
    if _INT.fullmatch(text):
        digits = text.replace("_", "")
        if len(digits) > 18:
            raise ValueError(text)
        return int(digits, 0) if digits[:2] in ("0x", "0o") else int(digits)
    if _FLOAT.fullmatch(text):
        return float(text.replace("_", ""))
    return text


def apply_overrides(document: Document, overrides: Iterable[str]) -> Document:
    """`document` with each "path=value" written in: a copy, if there are any. The value is YAML; "path=" empties the key.

    At each step of a path the longest existing key wins, so that names may contain dots. Later errors name the override.
    """
    return with_values(document, map(_parse_override, overrides))


def _parse_override(override: str) -> tuple[str, Any, str]:
    where = f"--set {override}"
    name, equals, text = override.partition("=")
    if len(name) > MAX_PATH_CHARACTERS:
        raise GraphError(where, "", f"the path has {len(name)} characters, at most {MAX_PATH_CHARACTERS} are possible; shorten it")
    if not equals or "" in name.strip().split("."):
        raise GraphError(where, "", "is not an override; write path=value, such as deploy.experts.servers=2")
    try:
        return name.strip(), parse_document(text, where).value, where
    except GraphError as error:
        raise GraphError(where, name, error.text) from None


def with_values(document: Document, values: Iterable[tuple[str, Any, str]]) -> Document:
    """As `apply_overrides`, for triples of a path, its value, and where errors say that the value comes from."""
    values = tuple(values)
    if not values:
        return document
    result = Document(document.name, copy.deepcopy(document.value), document.lines, dict(document.overrides))
    for name, value, where in values:
        if result.value is None:
            result.value = {}
        _set(result, name.split("."), value, where)
    return result


def _set(document: Document, keys: list[str], value: Any, where: str) -> None:
    parent, rest = document.value, list(keys)
    path: Path_ = ()
    while True:
        key, used = _match(parent, rest)
        if key is None:
            text = f"{dotted(path) or 'the file'} holds no keys to set {rest[0]!r} in; set {dotted(path) or 'it'} as a whole"
            raise GraphError(where, ".".join(keys), text)
        path, rest = (*path, key), rest[used:]
        if not rest:
            parent[key] = value
            document.overrides[path] = where
            return
        if isinstance(parent, dict) and parent.get(key) is None:
            parent[key] = {}
            document.overrides[path] = where
        parent = parent[key]


def _match(parent: Any, keys: list[str]) -> tuple[str | int | None, int]:
    """The key of `parent` that the first keys name, and the number of these keys."""
    if isinstance(parent, dict):
        for used in range(len(keys), 0, -1):
            if ".".join(keys[:used]) in parent:
                return ".".join(keys[:used]), used
        return keys[0], 1
    if isinstance(parent, list) and keys[0].isdigit() and int(keys[0]) < len(parent):
        return int(keys[0]), 1
    return None, 0


def _single_line(text: str) -> str:
    return " ".join(text.split())
