"""How well the cost model predicts what others have published: identities, rows, bands, scores. Nothing is measured."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from flowrt.bench.published.calibrate import calibration_rows, errors, fit_constants, left_out, predicted
from flowrt.bench.published.identities import PublishedIdentity, identities
from flowrt.bench.published.rows import PublishedRow, published_rows
from flowrt.bench.published.scores import Prediction, TargetScore, score
from flowrt.bench.report.plots import new_picture, save_picture
from flowrt.bench.report.report import new_console, new_table, print_progress
from flowrt.costs.devices import CONSTANTS, calibration_hash, error_bands, families
from flowrt.system.output_file import json_text, write_file

_HOLDS = {True: "holds", False: "does not hold", None: ""}
_COLOURS = {"communication": "#2a7f62", "step": "#5b7083"}


def compare_published(json: str | None, plot: str | None, refit: bool) -> bool:
    """Prints all rows and scores; True when every identity and every target holds. `refit`: fit constants anew, with all rows and without
    each, and print them as families.yaml has them."""
    console = new_console(json)
    held, rows = identities(), published_rows()
    constants: Mapping[str, Mapping[str, float]] = families()
    bands, moved = error_bands(), None
    if refit:
        print_progress("fitting constants to all rows for calibration, then without each of them; this takes minutes")
        constants = fit_constants(rows, constants)
        refitted = left_out(rows, constants)
        bands = {group: _band_of([refitted[row.id][row.label] for row in calibration_rows(rows) if row.group == group]) for group in bands}
        moved = _moves(errors(rows, constants), refitted)
    predictions = [Prediction(row, predicted(row, constants), 1 + bands.get(row.group, bands["step"])) for row in rows if row.predict]
    compared = _Comparison(held, predictions, [row for row in rows if row.reason], score(predictions, moved), constants, moved)
    for number, table in enumerate(compared.tables()):
        if number:
            console.print()
        console.print(table)
    if refit:
        console.print(f"\nfamilies.yaml:\n{_as_cards(constants, bands)}", markup=False)
    if json is not None:
        write_file(json, json_text(compared.record()))
    if plot is not None:
        _draw(predictions, plot)
    return all(identity.holds for identity in held) and all(each.met for each in compared.scores)


def _moves(all_in: Mapping[str, float], refitted: Mapping[str, Mapping[str, float]]) -> dict[str, dict[str, float]]:
    """Row left out -> label -> by how much the error of every other row moves, in shares of what is measured."""

    def moves(left: str, own: Mapping[str, float]) -> dict[str, float]:
        return {label: error - all_in[label] for label, error in own.items() if label.split()[0] != left}

    return {left: moves(left, own) for left, own in refitted.items()}


@dataclass(frozen=True)
class _Comparison:
    """What is predicted beside what is published. `moved`: with --refit, how far errors move when a row is left out."""

    held: list[PublishedIdentity]
    predictions: list[Prediction]
    not_represented: list[PublishedRow]
    scores: list[TargetScore]
    constants: Mapping[str, Mapping[str, float]]
    moved: Mapping[str, Mapping[str, float]] | None

    def tables(self) -> Iterator[Table]:
        lines = [(each.id, each.name, f"{each.computed:.6g}", f"{each.published:g}", _HOLDS[each.holds]) for each in self.held]
        yield new_table("identities", "id", "identity", "computed", "published", "", rows=lines)
        numbers = [_line(each) for each in self.predictions if not isinstance(each.value, Mapping)]
        yield new_table("numbers", "row", "predicted", "low", "high", "measured", "error", "", rows=numbers)
        orders = [_order_line(each) for each in self.predictions if isinstance(each.value, Mapping)]
        yield new_table("orderings", "row", "predicted", "published", "tau", "", rows=orders)
        reasons = [(row.label, row.reason) for row in self.not_represented]
        yield new_table("rows that the model cannot represent", "row", "reason", rows=reasons)
        targets = [(each.name, each.found, each.target, "met" if each.met else "missed") for each in self.scores]
        yield new_table("scores", "score", "found", "target", "", rows=targets)
        families = self.constants.values()
        constants = [(name, meaning, *(_amount(name, own[name]) for own in families)) for name, (_, meaning) in CONSTANTS.items()]
        title = f"constants, calibration {calibration_hash(self.constants)}"
        yield new_table(title, "constant", "meaning", *self.constants, rows=constants)
        if self.moved is not None:
            furthest = {row: max(moves.items(), key=lambda move: abs(move[1])) for row, moves in self.moved.items()}
            largest = [(row, label, f"{100 * move:+.1f}") for row, (label, move) in furthest.items()]
            yield new_table("leaving out a row moves the error of", "left out", "row", "by points", rows=largest)

    def record(self) -> dict[str, Any]:
        """For `json_text`."""
        published = ("id", "name", "group", "source", "unit", "measured", "relation")
        return {
            "benchmark": "model",
            "calibration": calibration_hash(self.constants),
            "constants": self.constants,
            "identities": [{**vars(each), "holds": each.holds} for each in self.held],
            "rows": [
                {
                    **{name: getattr(each.row, name) for name in published},
                    "predicted": each.value,
                    **({} if isinstance(each.value, Mapping) else {"low": each.low, "high": each.high, "error": each.error}),
                    "holds": each.holds,
                }
                for each in self.predictions
            ],
            "not_represented": [{"id": row.id, "name": row.name, "reason": row.reason} for row in self.not_represented],
            "scores": self.scores,
            "moved_without": self.moved,
        }


def _line(each: Prediction) -> tuple[str, ...]:
    row, error = each.row, each.error
    bounds = " and ".join(f"{bound:g}" for bound in row.measured) if isinstance(row.measured, tuple) else f"{row.measured:g}"
    words = "" if row.relation == "equals" else f"{row.relation.replace('_', ' ')} "
    verdict = _HOLDS[each.holds] if each.is_inside is not False else "outside the band"
    shown = f"{error:+.1%}" if error is not None else ""
    return row.label, f"{each.number:.4g} {row.unit}", f"{each.low:.4g}", f"{each.high:.4g}", f"{words}{bounds} {row.unit}", shown, verdict


def _order_line(each: Prediction) -> tuple[str, ...]:
    assert isinstance(each.value, Mapping)
    ours, theirs = (
        ", ".join(f"{choice}: {value:.4g}" for choice, value in side.items()) if isinstance(side, Mapping) else f"best is {each.row.choice}"
        for side in (each.value, each.row.measured)
    )
    tau = "" if each.tau is None else f"{each.tau:.2f}"
    return each.row.label, f"{ours} {each.row.unit}", theirs, tau, _HOLDS[each.holds]


def _amount(name: str, value: float) -> str:
    unit = CONSTANTS[name][0]
    return f"{value * 1e6:.3g} us" if unit == "s" else f"{value / 1e12:.4g} TFLOPS" if unit else f"{value:.3g}"


def _draw(predictions: list[Prediction], path: str) -> None:
    """Predicted over measured of each number, with its band. Raises UserError when the file cannot be written."""
    numbers = [each for each in predictions if each.error is not None]
    picture, axes = new_picture((9.0, 1.5 + 0.19 * len(numbers)))
    for place, each in enumerate(numbers):
        ratio = each.number / each.row.measured  # type: ignore[operator]
        axes.plot([ratio / each.band, ratio * each.band], [place, place], color=_COLOURS[each.row.group], linewidth=1.2)
        axes.plot([ratio], [place], marker="o", markersize=4, color=_COLOURS[each.row.group])
    axes.axvline(1.0, color="grey", linewidth=0.8, linestyle=":")
    axes.set_xscale("log", base=2)
    ticks = [0.25, 0.5, 1.0, 2.0, 4.0]
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.set_yticks(range(len(numbers)), [each.row.label for each in numbers], fontsize="x-small")
    axes.set_ylim(len(numbers), -1)
    axes.set_xlabel("predicted / measured, and the band of the prediction")
    for group, colour in _COLOURS.items():  # of the legend
        axes.plot([], [], marker="o", color=colour, label=group)
    axes.legend(fontsize="small", loc="lower center", bbox_to_anchor=(0.3, 1.0), ncols=3, frameon=False)
    save_picture(picture, path)


def _as_cards(constants: Mapping[str, Mapping[str, float]], bands: Mapping[str, float]) -> str:
    """Constants and bands as families.yaml has them."""
    lines = ["calibrated:"]
    for family, own in constants.items():
        lines += [f"  {family}:", *(f"    {name}: {_amount(name, value)}" for name, value in own.items())]
    return "\n".join([*lines, f"bands: {{{', '.join(f'{group}: {band:.2f}' for group, band in bands.items())}}}"])


def _band_of(errors: list[float], share: float = 0.9) -> float:
    """The relative half width that holds so many of these errors."""
    ordered = sorted(max(1 + error, 1 / (1 + error)) - 1 for error in errors)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]
