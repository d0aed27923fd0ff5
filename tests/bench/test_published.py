"""Published rows: complete, predicted within sane bounds, and judged by the targets."""

from __future__ import annotations

import json
import math
import statistics
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from flowrt.bench.cases.model import compare_published
from flowrt.bench.published.calibrate import calibration_rows, errors, family_of, predicted
from flowrt.bench.published.identities import identities
from flowrt.bench.published.rows import published_rows
from flowrt.bench.published.scores import Prediction, kendall_tau, score
from flowrt.costs.devices import CONSTANTS, calibration_hash, families
from flowrt.costs.fit import fit_logarithms

ROWS = published_rows()
PREDICTED = {row.label: predicted(row, families()) for row in ROWS if row.predict}


def test_every_published_row_has_a_prediction_or_a_reason() -> None:
    ids = {row.id for row in ROWS}
    assert {f"C{number}" for number in range(1, 14)} <= ids
    assert {f"O{number}" for number in range(1, 26)} <= ids
    assert all(row.source and bool(row.predict) != bool(row.reason) for row in ROWS)
    assert max(Counter(row.label for row in ROWS).values()) == 1


def test_identities_hold() -> None:
    found = identities()
    assert {each.id for each in found} == {f"I{number}" for number in range(1, 11)}
    assert [each for each in found if not each.holds] == []


def test_errors_of_rows_for_calibration_stay_small() -> None:
    """A change of the model that spoils the fit shows here, without fitting."""
    found = errors(calibration_rows(ROWS), families())
    by_group = {"communication": (0.08, 0.16), "step": (0.10, 0.26)}
    for group, (median, worst) in by_group.items():
        own = [abs(found[row.label]) for row in calibration_rows(ROWS) if row.group == group]
        assert statistics.median(own) < median
        assert max(own) < worst


def test_rows_that_are_held_out_are_predicted() -> None:
    found = errors(ROWS, families())
    held_out = [abs(error) for label, error in found.items() if not label.startswith("C")]
    assert statistics.median(held_out) < 0.15
    assert max(abs(error) for label, error in found.items() if label.startswith("X1")) < 0.10  # other degrees of expert parallelism


def test_decisions_come_out_of_the_model() -> None:
    """The DP peak, the number of pipelines and of SMs, the degrees on 910B, the 40 devices: the best choice or one step off."""
    made = {row.label: Prediction(row, PREDICTED[row.label], 1.3) for row in ROWS if row.group == "decision" and row.predict}
    assert all(each.steps_off <= 1 for label, each in made.items() if "H20" not in label)
    h20 = next(each.value for label, each in made.items() if "H20" in label)
    assert h20["DP < EP"] == pytest.approx(h20["DP = EP"], rel=0.01)  # type: ignore[index]
    assert h20["DP < EP"] < 0.7 * h20["DP > EP"]  # type: ignore[index]


def test_constants_are_fitted_where_rows_are() -> None:
    assert {family_of(row) for row in calibration_rows(ROWS)} == set(families())
    assert len(CONSTANTS) <= 12
    moved = {"hopper": {**families()["hopper"], "fixed": 11e-6}, "ascend": families()["ascend"]}
    assert calibration_hash() == calibration_hash(families()) != calibration_hash(moved)


def test_fit_finds_constants_and_keeps_those_that_nothing_depends_on() -> None:
    x = np.array([1.0, 2.0, 5.0, 9.0])
    measured, prior = 3.0 + 0.5 * x, np.array([2.0, 1.0, 7.0])
    found = fit_logarithms(lambda values: np.log((values[0] + values[1] * x) / measured) / 0.01, np.ones(3), prior, np.full(3, 5.0))
    assert found[:2] == pytest.approx([3.0, 0.5], rel=0.01)
    assert found[2] == pytest.approx(7.0)


def test_scores() -> None:
    assert kendall_tau([1, 2, 3], [10, 20, 30]) == 1
    assert kendall_tau([1, 2, 3], [30, 20, 10]) == -1
    assert kendall_tau([1, 2, 3], [5, 5, 6]) == pytest.approx(2 / math.sqrt(3 * 2))
    row = next(row for row in ROWS if row.id == "O23")
    assert [Prediction(row, float(value), 1.3).holds for value in (32, 40, 48, 56)] == [True, True, True, False]
    rows = [row for row in ROWS if row.predict and row.relation == "equals" and row.measured is not None]
    exact = [Prediction(row, row.measured, 1.1) for row in rows]  # type: ignore[arg-type]
    assert all(each.met for each in score(exact))
    spoiled = [replace(each, value=3 * each.number) if each.row.label == "C1 dispatch, EP8" else each for each in exact]
    missed = {each.name for each in score(spoiled) if not each.met}
    assert missed == {"communication: worst error", "slopes over batch, degree and prompt: right in sign"}


def test_the_report_has_every_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "model.json"
    has_met_all = compare_published(str(file), None, refit=False)
    report, printed = json.loads(file.read_text()), capsys.readouterr().out
    assert has_met_all == all(each["met"] for each in report["scores"])
    assert len(report["rows"]) + len(report["not_represented"]) == len(ROWS)
    assert report["calibration"] == calibration_hash()
    assert report["calibration"] in printed
    for row in ROWS:
        assert row.id in printed
    assert "nan" not in printed
