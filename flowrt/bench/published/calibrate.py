"""Fits the constants of device families to the rows for calibration, and says what each of these rows changes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flowrt.bench.published import predict
from flowrt.bench.published.rows import PublishedRow
from flowrt.costs.devices import calibrated_family, families, read_device
from flowrt.costs.fit import fit_logarithms

Floats = NDArray[np.floating[Any]]
Constants = Mapping[str, Mapping[str, float]]
# What a constant is taken for without any row, and by which factor it is taken to vary: data sheets bound it, or experience with kernels.
PRIORS = {
    "fixed": 10e-6,
    "bandwidth_efficiency": 0.8,
    "flops_efficiency": 0.9,
    "feed": 1500e12,
    "attention_efficiency": 0.6,
    "half_rows": 32.0,
    "exchange": 30e-6,
    "quantize": 10e-6,
    "within_efficiency": 0.7,
    "between_efficiency": 0.7,
    "jitter": 0.03,
    "bulk_share": 0.15,
}
PRIOR_SPREADS = {"feed": 1.0, "quantize": 1.0}  # kernels differ in these; all others: 0.5
SPREADS = {"communication": 0.05, "step": 0.15}  # of rows about a right model: how noisy published numbers are taken to be
_LARGEST = {name: 1.0 for name in PRIORS if name.endswith("efficiency")}


def predicted(row: PublishedRow, constants: Constants) -> float | dict[object, float]:
    """What the model says, in the row's unit. Raises ValueError for anything that is not finite and above 0."""
    value: predict.Value = getattr(predict, row.predict)(predict.Costs(constants), **row.given)
    values = {key: one / row.scale for key, one in value.items()} if isinstance(value, dict) else value / row.scale
    if not all(math.isfinite(one) and one >= 0 for one in (values.values() if isinstance(values, dict) else (values,))):
        raise ValueError(f"{row.label}: the model gave {values}")
    return values


def calibration_rows(rows: Sequence[PublishedRow]) -> list[PublishedRow]:
    """The rows that constants are fitted to: numbers, each of one device."""
    return [row for row in rows if row.calibrates and row.predict and not row.is_ordering]


def family_of(row: PublishedRow) -> str:
    return calibrated_family(read_device(str(row.given["device"])).family)


def fit_constants(rows: Sequence[PublishedRow], start: Constants | None = None) -> dict[str, dict[str, float]]:
    """The constants of every family that some row is about; those of the others are the ones of the cards. `start`: where to look first."""
    found: dict[str, dict[str, float]] = {}
    names, prior, spreads = list(PRIORS), np.array(list(PRIORS.values())), np.array([PRIOR_SPREADS.get(name, 0.5) for name in PRIORS])
    for family in families():
        own = [row for row in calibration_rows(rows) if family_of(row) == family]
        if not own:
            continue
        begin = np.array([(start or {}).get(family, PRIORS)[name] for name in names])
        found[family] = bounded(names, fit_logarithms(partial(_residuals, own, family, names), begin, prior, spreads))
    return found


def _residuals(rows: Sequence[PublishedRow], family: str, names: Sequence[str], values: Floats) -> Floats:
    """By row: ln(predicted / measured), in units of the spread of its group."""
    constants = {family: bounded(names, values)}
    return np.array([math.log(_predicted_share(row, constants)) / SPREADS[row.group] for row in rows])


def _predicted_share(row: PublishedRow, constants: Constants) -> float:
    """Predicted over measured, of a row that is a number."""
    value = predicted(row, constants)
    assert isinstance(value, float | int), row.label
    assert isinstance(row.measured, float | int), row.label
    return value / row.measured


def bounded(names: Sequence[str], values: Sequence[float] | Floats) -> dict[str, float]:
    """Constants by name, none of them above what it can be."""
    return {name: min(float(value), _LARGEST.get(name, math.inf)) for name, value in zip(names, values, strict=True)}


def errors(rows: Sequence[PublishedRow], constants: Constants) -> dict[str, float]:
    """Label -> predicted over measured, less 1, of all rows that are numbers; decisions are judged by their grid."""
    return {row.label: _predicted_share(row, constants) - 1 for row in rows if row.predict and row.measured_number is not None}


def left_out(rows: Sequence[PublishedRow], fitted: Constants) -> dict[str, dict[str, float]]:
    """Id of a row for calibration -> the errors of all rows with constants that are fitted without it."""
    ids = dict.fromkeys(row.id for row in calibration_rows(rows))
    return {each: errors(rows, {**fitted, **fit_constants([row for row in rows if row.id != each], fitted)}) for each in ids}
