"""Finds and reads cards: YAML files with the facts of devices, models and clusters, by a name of flowrt's own or a path of the user's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from os.path import exists
from pathlib import Path
from typing import Any, NoReturn

import yaml

from flowrt.errors import UserError, nearest, shown

CARDS = Path(__file__).parent / "cards"
MAX_CARD_BYTES = 1 << 20


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


def read_card(path: Path) -> dict[str, Any]:
    """The keys and values of a YAML or JSON card. Raises UserError when it cannot be read or is not a mapping."""
    try:
        if not path.is_file() or path.stat().st_size > MAX_CARD_BYTES:
            raise UserError(f"{path} is not a file of at most {MAX_CARD_BYTES >> 20} MiB; give a card")
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UserError(f"{path} is not UTF-8 text; save the card as UTF-8") from None
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        mark = getattr(error, "problem_mark", None)
        at = path if mark is None else f"{path}:{mark.line + 1}"
        raise UserError(f"{at}: not YAML: {getattr(error, 'problem', None) or type(error).__name__}; correct this line") from None
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise UserError(f"{path}: a mapping of names to values is needed, got {shown(values)}")
    return values


class CardReader:
    """Takes the values of a card one by one, and refuses what is left over. Errors name the card and the key."""

    def __init__(self, path: Path | str, values: Mapping[str, Any]) -> None:
        self._path, self._values, self._known = path, values, set[str]()

    def take(self, key: str, read: Callable[[object, str], Any], default: Any = ...) -> Any:
        """`read(value, where)` of a key, or the default of an absent one. Raises UserError when there is neither."""
        self._known.add(key)
        if key in self._values:
            return read(self._values[key], f"{self._path}: {key}")
        if default is ...:
            raise UserError(f"{self._path}: {key} is missing; add it")
        return default

    def end(self) -> None:
        """Raises UserError for the first key that was not taken."""
        for key in self._values:
            if key not in self._known:
                raise UserError(f"{self._path}: unknown key {shown(key)}; {nearest(str(key), self._known)}")


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
