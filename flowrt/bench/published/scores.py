"""Judges predictions of published rows: errors by group, bands, orderings, and the targets for each. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from flowrt.bench.published.rows import PublishedRow

# Group -> the largest median and worst error.
TARGETS = {"communication": (0.10, 0.25), "step": (0.15, 0.30)}
MIN_TAU, MIN_INSIDE, MAX_MOVED = 0.8, 0.8, 0.05


@dataclass(frozen=True)
class Prediction:
    """What the model says of a row, in its unit, and the band that the row's group has. Of an ordering `value` is by choice."""

    row: PublishedRow
    value: float | Mapping[Any, float]
    band: float  # factor from the prediction to either end

    @property
    def number(self) -> float:
        assert not isinstance(self.value, Mapping)
        return self.value

    @property
    def low(self) -> float:
        return self.number / self.band

    @property
    def high(self) -> float:
        return self.number * self.band

    @property
    def error(self) -> float | None:
        """Predicted over measured, less 1; None for decisions and bounds."""
        measured = self.row.measured_number
        return None if measured is None else self.number / measured - 1

    @property
    def is_inside(self) -> bool | None:
        """Whether the measured number is in the band; None where there is none."""
        measured = self.row.measured_number
        return None if measured is None else self.low <= measured <= self.high

    @property
    def holds(self) -> bool | None:
        """Of a bound: whether the prediction keeps it. Of a decision: whether it is the published one, or one grid step off."""
        measured: Any = self.row.measured
        match self.row.relation:
            case "between":
                return bool(measured[0] <= self.number <= measured[1])
            case "at_most":
                return bool(self.number <= measured)
            case "at_least":
                return bool(self.number >= measured)
        if self.row.group != "decision":
            return None
        has_names = isinstance(self.value, Mapping) and any(isinstance(choice, str) for choice in self.value)  # no grid
        return self.steps_off <= (0 if has_names else 1) and (self.tau is None or self.tau >= MIN_TAU)

    @property
    def steps_off(self) -> int:
        """Grid steps between the best choice of the model and the published one."""
        if isinstance(self.value, Mapping):
            choices, pick = list(self.value), min if self.row.best == "lowest" else max
            published = self.row.choice
            if isinstance(self.row.measured, Mapping):
                published = pick(self.row.measured, key=self.row.measured.__getitem__)
            return abs(choices.index(pick(self.value, key=self.value.__getitem__)) - choices.index(published))
        assert isinstance(self.row.measured, int | float)
        return abs(_nearest(self.row.grid, self.number) - _nearest(self.row.grid, self.row.measured))

    @property
    def tau(self) -> float | None:
        """Kendall's tau-b; None where no ordering is published."""
        if not isinstance(self.value, Mapping) or not isinstance(self.row.measured, Mapping):
            return None
        return kendall_tau(list(self.row.measured.values()), [self.value[choice] for choice in self.row.measured])


def _nearest(grid: Sequence[float], value: float) -> int:
    return min(range(len(grid)), key=lambda index: abs(math.log(grid[index] / value)) if value > 0 else grid[index])


def kendall_tau(one: Sequence[float], other: Sequence[float], tie: float = 0.001) -> float:
    """Kendall's tau-b of two sequences; values that differ by less than the share `tie` are equal."""

    def order_of(a: float, b: float) -> int:
        return 0 if abs(a - b) <= tie * max(abs(a), abs(b)) else 1 if a > b else -1

    orders = [(order_of(one[i], one[j]), order_of(other[i], other[j])) for i, j in combinations(range(len(one)), 2)]
    sizes = [sum(bool(pair[side]) for pair in orders) for side in (0, 1)]
    return sum(a * b for a, b in orders) / math.sqrt(sizes[0] * sizes[1]) if all(sizes) else 0.0


@dataclass(frozen=True)
class TargetScore:
    """One target: what was found, in words, and whether it is met."""

    name: str
    found: str
    target: str
    met: bool


def score(predictions: Sequence[Prediction], moved: Mapping[str, Mapping[str, float]] | None = None) -> list[TargetScore]:
    """All targets. `moved`: of each row for calibration, by how much the errors of others move when it is left out."""
    found = []

    def add(name: str, text: str, target: str, met: bool) -> None:
        found.append(TargetScore(name, text, target, met))

    def add_count(name: str, right: Sequence[tuple[str, object]]) -> None:
        wrong = [label for label, is_right in right if not is_right]
        but = f" (not {'; '.join(wrong)})" if wrong else ""
        add(name, f"{len(right) - len(wrong)} of {len(right)}{but}", "all", not wrong)

    for group, (median, worst) in TARGETS.items():
        own = {each.row.label: abs(each.error) for each in predictions if each.row.group == group and each.error is not None}
        middle, largest = statistics.median(own.values()), max(own, key=own.__getitem__)
        add(f"{group}: median error of {len(own)} rows", f"{middle:.1%}", f"<= {median:.0%}", middle <= median)
        add(f"{group}: worst error", f"{own[largest]:.1%} ({largest})", f"<= {worst:.0%}", own[largest] <= worst)
    decisions = [each for each in predictions if each.row.group == "decision"]
    add_count("slopes over batch, degree and prompt: right in sign", list(_slopes(predictions)))
    add_count("feasibility: bounds kept", [(each.row.id, each.holds) for each in predictions if each.row.relation != "equals"])
    add_count("decisions: best choice, or one step off", [(each.row.label, each.holds) for each in decisions])
    tau, label = min((each.tau, each.row.label) for each in decisions if each.tau is not None)
    add("decisions: least Kendall tau of an ordering", f"{tau:.2f} ({label})", f">= {MIN_TAU}", tau >= MIN_TAU)
    inside = [each.is_inside for each in predictions if each.is_inside is not None]
    share = sum(inside) / len(inside)
    add(f"bands: rows inside, of {len(inside)}", f"{share:.0%}", f">= {MIN_INSIDE:.0%}", share >= MIN_INSIDE)
    if moved is not None:
        move, label = max((abs(move), f"{label} without {row}") for row, moves in moved.items() for label, move in moves.items())
        target = f"< {100 * MAX_MOVED:.0f} points"
        add("calibration: largest move by leaving out a row", f"{100 * move:.1f} points ({label})", target, move < MAX_MOVED)
    return found


def _slopes(predictions: Sequence[Prediction]) -> Iterable[tuple[str, bool]]:
    """Of two rows of one table that differ in one number: their names, and whether the model says which is larger."""
    for one, other in combinations([each for each in predictions if each.error is not None], 2):
        if (one.row.id, one.row.unit, one.row.predict) != (other.row.id, other.row.unit, other.row.predict):
            continue
        keys = {key for key in {*one.row.given, *other.row.given} if one.row.given.get(key) != other.row.given.get(key)}
        if len(keys) == 1 and keys <= {"batch", "endpoints", "prompt", "ranks"}:
            is_right = (one.number - other.number) * (one.row.measured - other.row.measured) >= 0  # type: ignore[operator]
            yield f"{one.row.label} to {other.row.label}", is_right
