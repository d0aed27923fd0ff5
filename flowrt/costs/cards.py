"""Finds and reads cards: YAML files with the facts of devices, models and clusters, by a name of flowrt's own or a path of the user's."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from os.path import exists
from pathlib import Path
from typing import Any, NoReturn

from flowrt.document import Document, dotted, read_document
from flowrt.errors import UserError, nearest, shown

CARDS = Path(__file__).parent / "cards"


@cache
def card_names(kind: str) -> tuple[str, ...]:
    """The names of flowrt's own cards of a kind (`devices`, `models`, `clusters`), sorted."""
    return tuple(sorted(path.stem for path in (CARDS / kind).glob("*.yaml")))


def find_card(kind: str, name_or_path: str | Path) -> Path:
    """The file of a card: a name of flowrt's own, or a path. Raises UserError, listing the names and the closest one."""
    text = str(name_or_path)
    if text in card_names(kind):
        return CARDS / kind / f"{text}.yaml"
    if exists(path := Path(text)):
        return path
    names, hint = card_names(kind), nearest(text, card_names(kind))
    listed = hint if hint.startswith("known") else f"{hint} Known: {', '.join(names)}"
    raise UserError(f"unknown {kind.removesuffix('s')} {shown(text)}: {listed}; or give the path of a card")


def read_card(path: Path) -> Document:
    """The keys and values of a YAML or JSON card. Raises UserError when it cannot be read or is not a mapping."""
    document = read_document(path)
    if not isinstance(document.value, dict):
        raise UserError(f"{path}: a mapping of names to values is needed, got {shown(document.value)}")
    return document


class CardReader:
    """Takes the values of a card, or of the mapping at a path of it, one by one, and refuses what is left over. Errors name file, line and
    key."""

    def __init__(self, card: Document, *path: str | int) -> None:
        self._card, self._path, self._known = card, path, set[str]()
        self._values = as_mapping(card.at(path), self._where())

    def take(self, key: str, read: Callable[[object, str], Any], default: Any = ...) -> Any:
        """`read(value, where)` of a key, or the default of an absent one. Raises UserError when there is neither."""
        self._known.add(key)
        if key in self._values:
            return read(self._values[key], self._where(key))
        if default is ...:
            raise UserError(f"{self._where()}: {key} is missing; add it")
        return default

    def end(self) -> None:
        """Raises UserError for the first key that was not taken."""
        for key in self._values:
            if key not in self._known:
                raise UserError(f"{self._where(key)}: unknown key; {nearest(str(key), self._known)}")

    def _where(self, *keys: str) -> str:
        path = (*self._path, *keys)
        return f"{self._card.where(path)}: {dotted(path)}" if path else self._card.name


def as_text(value: object, where: str) -> str:
    return value if isinstance(value, str) else _refuse(value, where, "text")


def as_name(value: object, where: str) -> str:
    """A name, which YAML may have read as a number."""
    return str(value) if isinstance(value, str | int) and not isinstance(value, bool) else _refuse(value, where, "a name")


def as_count(value: object, where: str) -> int:
    return value if type(value) is int and 0 < value <= 1 << 20 else _refuse(value, where, "a whole number from 1 to 1048576")


def as_mapping(value: object, where: str) -> dict[str, Any]:
    is_one = isinstance(value, dict) and all(isinstance(key, str) for key in value)
    return value if is_one else _refuse(value, where, "a mapping of names to values")  # type: ignore[return-value]


def as_list(value: object, where: str) -> list[Any]:
    return value if isinstance(value, list) and value else _refuse(value, where, "a list that is not empty")


def _refuse(value: object, where: str, needed: str) -> NoReturn:
    raise UserError(f"{where}: is {shown(value)}; {needed} is needed")
