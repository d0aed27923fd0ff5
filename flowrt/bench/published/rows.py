"""Reads published rows (rows.yaml): what was measured, where it is published, and what predicts it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import yaml

from flowrt.errors import UserError

ROWS = Path(__file__).parent / "rows.yaml"
UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "GB/s": 1e9, "tok/s": 1.0, "%": 0.01, "x": 1.0, "tokens": 1.0, "GPUs": 1.0}
GROUPS = ("communication", "step", "decision")
Relation = Literal["equals", "at_most", "at_least", "between"]


@dataclass(frozen=True)
class PublishedRow:
    """One published number, or one published ordering.

    `measured`: in `unit`; of an ordering a value by choice, and `best` says which end is best; where only the best is published, it is
    `choice`. `grid`: the choices of a decision that is a number. `calibrates`: constants are fitted to it. `predict`: the function of
    predict.py, called with `given`; "": the model cannot represent it, for this `reason`.
    """

    id: str
    name: str
    group: str
    source: str
    unit: str
    measured: float | Mapping[Any, float] | tuple[float, float] | None
    choice: Any = None
    relation: Relation = "equals"
    best: Literal["lowest", "highest"] = "lowest"
    predict: str = ""
    given: Mapping[str, Any] = None  # type: ignore[assignment]
    reason: str = ""
    grid: tuple[float, ...] = ()

    @property
    def calibrates(self) -> bool:
        return self.id.startswith("C")

    @property
    def is_ordering(self) -> bool:
        return isinstance(self.measured, Mapping) or self.choice is not None

    @property
    def measured_number(self) -> float | None:
        """What a prediction is judged by its distance from. None: decisions are judged by their grid, bounds by whether they hold."""
        if isinstance(self.measured, int | float) and self.relation == "equals" and self.group != "decision":
            return self.measured
        return None

    @property
    def label(self) -> str:
        return f"{self.id} {self.name}"

    @property
    def scale(self) -> float:
        return UNITS[self.unit]


@cache
def published_rows() -> tuple[PublishedRow, ...]:
    """All rows, in the order of the file. Raises UserError for a file that is not made of rows."""
    return tuple(row for entry in yaml.safe_load(ROWS.read_text(encoding="utf-8"))["rows"] for row in _rows_of(entry))


def _rows_of(entry: Mapping[str, Any]) -> list[PublishedRow]:
    """A row, or one for each of its `cases`, which add to what the row gives."""
    own = {key: value for key, value in entry.items() if key != "cases"}
    return [_row({**own, **case, "with": {**own.get("with", {}), **case.get("with", {})}}) for case in entry.get("cases", [{}])]


def _row(entry: Mapping[str, Any]) -> PublishedRow:
    relation: Relation = next((key for key in ("at_most", "at_least", "between") if key in entry), "equals")
    measured = entry.get("order") or entry.get("measured" if relation == "equals" else relation)
    if entry["group"] not in GROUPS or entry["unit"] not in UNITS or (measured is None and not {"reason", "choice"} & entry.keys()):
        raise UserError(f"{ROWS.name}: {entry['id']}: a row needs a known group and unit, and a measured value or a reason")
    own = {key: entry[key] for key in ("id", "name", "group", "source", "unit", "choice", "best", "reason") if key in entry}
    predict = entry.get("predict", "") if "reason" not in entry else ""
    measured = tuple(measured) if isinstance(measured, list) else measured
    return PublishedRow(
        **own, measured=measured, relation=relation, predict=predict, given=entry["with"], grid=tuple(entry.get("grid", ()))
    )
