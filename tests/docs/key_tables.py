"""Renders the tables of graph-file keys in docs/ from the types that validate graph files. Rewrites the pages when it is run.

    python tests/docs/key_tables.py

A table stands between `<!-- keys: SECTION ... -->` and `<!-- end of keys -->`. It has the keys of these sections, in this order, with their
paths from the top of the file; of `edges.*` and other paths that end with a star, with the names of the keys alone.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)] if str(ROOT) not in sys.path else []

from msgspec import NODEFAULT, UNSET  # noqa: E402 (the path comes first when this runs as a script)

from flowrt.graph.schema import keys_of, kind_of, members_of, sections, sentences_of  # noqa: E402

TABLE = re.compile(r"(<!-- keys: (.+?) -->\n).*?(<!-- end of keys -->)", re.DOTALL)
_NAMES = {"place": "ROLE", "compute": "OPERATOR", "links": "ROLE-ROLE", "nodes": "NODE", "edges": "EDGE", "inputs": "PORT", "roles": "ROLE"}


@dataclass(frozen=True)
class Row:
    """A key: its path with "*" for any name, its default and its meaning in Markdown."""

    path: tuple[str, ...]
    default: str
    text: str

    def cells(self, below: tuple[str, ...]) -> str:
        path = self.path[len(below) :]
        named = [_NAMES.get(before, "*") if key == "*" else key for before, key in zip(("", *path), path, strict=False)]
        return f"| `{'.'.join(named).replace('**', '*')}` | {self.default} | {self.text} |".replace("|  |", "| |")


def rows() -> list[Row]:
    """Each key with a sentence, without those of `limits.roles.ROLE`, which are keys of `limits`."""
    found = []
    for path, section in sections():
        sentences = sentences_of(section) if path[:2] != ("limits", "roles") else {}
        for name, field in keys_of(section).items():
            if name in sentences:
                text, _, default = sentences[name].partition(" Default: ")
                found.append(Row((*path, name), default.removesuffix(".") or _default(field), text + _choices(field, text)))
    return found


def _choices(field: Any, text: str) -> str:
    """The words that a key takes, where its sentence leaves some out."""
    kinds = [kind_of(each)[0] for each in members_of(kind_of(field.type)[0])]
    words = [f"`{word}`" for kind in kinds if get_origin(kind) is Literal for word in get_args(kind)]
    return f" One of {', '.join(words)}." if len(words) > 1 and any(word not in text for word in words) else ""


def _default(field: Any) -> str:
    value = field.default
    if value is NODEFAULT:
        return "required" if field.required else ""
    if value is None or value is UNSET or value == "":
        return ""
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return f"`{value}`" if isinstance(value, str) else f"{value:.15g}" if isinstance(value, float) else str(value)


def _merged(found: list[Row]) -> Iterator[Row]:
    """`found` with one row for keys that several sections share: their paths differ in one place, which is written as a star."""
    alike: dict[tuple[Any, ...], list[Row]] = {}
    for row in found:
        alike.setdefault((len(row.path), row.path[0], row.path[-1], row.default, row.text), []).append(row)
    for same in alike.values():
        yield replace(same[0], path=tuple(keys[0] if len({*keys}) == 1 else "**" for keys in zip(*(row.path for row in same), strict=True)))


def table(names: str) -> str:
    """The table of the sections in a marker. Raises ValueError for a section without keys."""
    lines = ["| key | default | meaning |", "|---|---|---|"]
    for name in names.split():
        path = tuple(name.split("."))
        found = [row for row in rows() if row.path[: len(path)] == path]
        if not found:
            raise ValueError(f"no key of a graph file is {name} or below it")
        lines += [row.cells(path if path[-1] == "*" else ()) for row in _merged(found)]
    return "\n".join(lines) + "\n"


def rendered(page: str) -> str:
    """The text of a page with its tables as they should be."""
    return TABLE.sub(lambda match: f"{match[1]}{table(match[2])}{match[3]}", page)


if __name__ == "__main__":
    for path in sorted((ROOT / "docs").glob("*.md")):
        text = path.read_text(encoding="utf-8")
        if rendered(text) != text:
            path.write_text(rendered(text), encoding="utf-8")
            print(f"wrote {path.relative_to(ROOT)}")
