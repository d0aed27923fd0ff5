"""Parts: headers of parts and plans, and `Cover`, which decides when the responses of a tag are complete. Pure.

A part is responded whole or not at all. New parts with new ids supersede a lost or late part and cover the same (row, slot)
pairs. The first complete cover counts; later responses are dropped.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Generic, TypeVar

import msgspec

from flowrt.errors import FailureCause

V = TypeVar("V")


FAILED = "failed"  # kind of the response to a request whose firing failed


class PartHeader(msgspec.Struct, frozen=True, array_like=True):
    """Header of a part and of its response: the part's id, unique within its tag."""

    part: int


class FailedHeader(msgspec.Struct, frozen=True, array_like=True):
    """Header of a FAILED message: the error in one line, and the part id of the request if it has one."""

    error: str
    part: int | None = None
    cause: FailureCause = FailureCause.ERROR


class PlanHeader(msgspec.Struct, frozen=True, array_like=True):
    """Header of the message on a `count` port: the expected part ids, in the order in which they are combined. `responds_to`: the id of the
    part to which the combined responses are the response."""

    parts: tuple[int, ...]
    responds_to: int = 0


class Cover(Generic[V]):
    """Responses of one tag on one gather port, until they are complete. V is the type of one response."""

    __slots__ = ("_anonymous", "_arrived", "_count", "_plan", "_replaced_by", "_wanted")

    def __init__(self) -> None:
        self._plan: tuple[int, ...] | None = None
        self._count: int | None = None
        self._wanted: set[int] = set()
        self._arrived: dict[int, V] = {}
        self._anonymous: list[V] = []
        self._replaced_by: dict[int, tuple[int, ...]] = {}

    def expect(self, parts: Iterable[int]) -> None:
        """Expect these part ids, to be combined in this order."""
        self._plan = tuple(parts)
        self._wanted.update(self._plan)

    def expect_count(self, count: int) -> None:
        """Expect `count` responses without ids (a user's graph). Raises ValueError for a negative count."""
        if count < 0:
            raise ValueError(f"a plan cannot expect {count} messages")
        self._count = count

    def supersede(self, part: int, by: Iterable[int]) -> None:
        """Let the parts `by` replace `part`; together they cover the same pairs. Either side may still complete first.

        Raises ValueError if `part` is not expected or already superseded, or if `by` is empty or contains a known id.
        """
        if part not in self._wanted or part in self._replaced_by:
            raise ValueError(f"part {part} is not awaited, or was superseded before")
        new = tuple(by)
        if not new or self._wanted.intersection(new):
            raise ValueError(f"part {part} needs new ids to supersede it, got {new}")
        self._replaced_by[part] = new
        self._wanted.update(new)

    def arrive(self, part: int | None, value: V) -> bool:
        """Add a response. Returns False for a duplicate or an unexpected part, which the caller drops."""
        if part is None:
            self._anonymous.append(value)
            return True
        if part not in self._wanted or part in self._arrived:
            return False
        self._arrived[part] = value
        return True

    def missing(self) -> list[int]:
        """Ids still expected, in plan order. A superseded part is listed as its missing replacements."""
        return [part for part in self._cover(self._plan or ()) if part not in self._arrived]

    def complete(self) -> list[V] | None:
        """The first complete cover, in plan order, or None while a response is missing."""
        if self._plan is None:
            if self._count is None or len(self._anonymous) < self._count:
                return None
            return self._anonymous[: self._count]
        cover = self._cover(self._plan)
        if any(part not in self._arrived for part in cover):
            return None
        return [self._arrived[part] for part in cover]

    def _cover(self, parts: Sequence[int]) -> Sequence[int]:
        """Ids that cover these parts: each part itself if it has arrived, else its replacements, if it has any."""
        if not self._replaced_by:
            return parts
        cover: list[int] = []
        for part in parts:
            is_replaced = part in self._replaced_by and part not in self._arrived
            cover += self._cover(self._replaced_by[part]) if is_replaced else (part,)
        return cover
