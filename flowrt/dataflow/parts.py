"""Parts: how one tag's work is cut, answered piece by piece, and known to be whole again. Pure.

Here: the headers of a part and of a plan, and Cover, which decides when the answers at hand make a tag whole. Not here: how
rows are cut (operators/dispatch.py), who asks again for a lost part (flowrt/engine/recovery, later), the table that holds a
Cover per tag (matching.py).

A part is answered whole or not at all. A lost or late part is superseded by new parts with new ids that cover the same
(row, slot) pairs; the first complete cover counts and whatever comes besides is dropped (DESIGN section 1).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Generic, TypeVar

import msgspec

V = TypeVar("V")


class PartHeader(msgspec.Struct, frozen=True, array_like=True):
    """Header of a part and of its answer: the part's id, unique within its tag."""

    part: int


class PlanHeader(msgspec.Struct, frozen=True, array_like=True):
    """Header of the message on a `count` port: the ids to wait for, in the order in which they are combined."""

    parts: tuple[int, ...]


class Cover(Generic[V]):
    """The answers of one tag on one gather port, until they are complete. V is what an answer carries."""

    __slots__ = ("_anonymous", "_arrived", "_count", "_plan", "_replaced_by", "_wanted")

    def __init__(self) -> None:
        self._plan: tuple[int, ...] | None = None
        self._count: int | None = None
        self._wanted: set[int] = set()
        self._arrived: dict[int, V] = {}
        self._anonymous: list[V] = []
        self._replaced_by: dict[int, tuple[int, ...]] = {}

    def expect(self, parts: Iterable[int]) -> None:
        """Wait for these ids, to be combined in this order."""
        self._plan = tuple(parts)
        self._wanted.update(self._plan)

    def expect_count(self, count: int) -> None:
        """Wait for `count` answers that carry no id (a user's graph)."""
        if count < 0:
            raise ValueError(f"a plan cannot expect {count} messages")
        self._count = count

    def supersede(self, part: int, by: Iterable[int]) -> None:
        """Ask for `by` in the place of `part`; together they cover the same pairs. Either side may still answer first."""
        if part not in self._wanted or part in self._replaced_by:
            raise ValueError(f"part {part} is not awaited, or was superseded before")
        new = tuple(by)
        if not new or self._wanted.intersection(new):
            raise ValueError(f"part {part} needs new ids to supersede it, got {new}")
        self._replaced_by[part] = new
        self._wanted.update(new)

    def arrive(self, part: int | None, value: V) -> bool:
        """Take an answer. False: it is a duplicate or nobody asked for it, and the caller drops it."""
        if part is None:
            self._anonymous.append(value)
            return True
        if part not in self._wanted or part in self._arrived:
            return False
        self._arrived[part] = value
        return True

    def missing(self) -> list[int]:
        """Ids still to come, in plan order; those with replacements are given as their replacements."""
        return [part for planned in self._plan or () for part in self._missing_of(planned)]

    def complete(self) -> list[V] | None:
        """The first complete cover, in plan order, or None while something is missing."""
        if self._plan is None:
            if self._count is None or len(self._anonymous) < self._count:
                return None
            return self._anonymous[: self._count]
        chosen: list[V] = []
        for part in self._plan:
            values = self._values_of(part)
            if values is None:
                return None
            chosen.extend(values)
        return chosen

    def _values_of(self, part: int) -> list[V] | None:
        if part in self._arrived:
            return [self._arrived[part]]
        replacements = self._replaced_by.get(part)
        if replacements is None:
            return None
        chosen: list[V] = []
        for replacement in replacements:
            values = self._values_of(replacement)
            if values is None:
                return None
            chosen.extend(values)
        return chosen

    def _missing_of(self, part: int) -> list[int]:
        if part in self._arrived:
            return []
        if part not in self._replaced_by:
            return [part]
        return [missing for replacement in self._replaced_by[part] for missing in self._missing_of(replacement)]
