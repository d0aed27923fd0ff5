"""Fits the constants of a device card to measured times. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from flowrt.costs.devices import Device
from flowrt.costs.fit import Floats, fit_factors, fit_logarithms
from flowrt.costs.work import FiringLoad, Work
from flowrt.graph.kinds import kind_of
from flowrt.kinds.device_times import device_seconds
from flowrt.operators.model_config import ModelConfig

# Constant -> where its fit begins; the spread is wide, so that only a constant that no call depends on stays there.
STARTS: Mapping[str, float] = {
    "fixed": 30e-6,
    "bandwidth_efficiency": 0.7,
    "flops_efficiency": 0.7,
    "half_rows": 8.0,
    "attention_efficiency": 0.2,
    "kv_efficiency": 0.3,
    "expert": 10e-6,
}
FED = 10.0  # `feed`, in peaks: in one dtype, what it bounds is part of flops_efficiency
FITTED = (*STARTS, "feed")
_SPREAD, _UNIT = 4.0, 0.1  # of a constant's logarithm before any call; of the logarithm of a predicted time
_HALF_ROWS = (1.0, 8.0, 64.0)  # where fits begin: whether a call waits for memory or computes changes on the way
RUN_CONSTANTS = ("step", "sequence", "firing", "message")  # of the runtime, which only runs show


@dataclass(frozen=True)
class MeasuredCall:
    """Seconds of one call of an operator of a model."""

    config: ModelConfig
    operator: str
    load: FiringLoad
    seconds: float

    @property
    def work(self) -> Work:
        found = kind_of(self.operator).work
        assert found is not None, self.operator
        return found(self.config, self.load)

    def error(self, device: Device) -> float:
        """How far the prediction is off, as a share of what was measured."""
        return device_seconds(device, kind_of(self.operator), self.config, self.load) / self.seconds - 1


@dataclass(frozen=True)
class FitErrors:
    """The median and the worst of the absolute errors of a fit."""

    median: float
    worst: float
    count: int

    @classmethod
    def of(cls, errors: Sequence[float]) -> FitErrors:
        found = [abs(each) for each in errors]
        return cls(statistics.median(found), max(found), len(found))

    def __str__(self) -> str:
        return f"median error {100 * self.median:.0f} %, worst {100 * self.worst:.0f} % of {self.count}"


def fit_device(device: Device, calls: Sequence[MeasuredCall]) -> Device:
    """The device with the constants whose times have the least squares of relative errors, for each dtype on its own: those of the first
    are the device's. Shares stay at 1 or below, and the bandwidth and peaks are at least what some call reached.

    Calls of `per_step` operators that only move rows (embed) are not fitted: they take microseconds of a step.
    """
    calls = [call for call in calls if call.work.num_flops]
    dtypes = [*dict.fromkeys(call.config.dtype for call in calls)]
    peaks = {
        dtype: max([rate, *(call.work.num_flops / call.seconds for call in calls if call.config.dtype == dtype)])
        for dtype, rate in device.flops_per_second.items()
    }
    bandwidth = max(device.bytes_per_second, *(call.work.num_bytes / call.seconds for call in calls))
    device = replace(device, bytes_per_second=bandwidth, flops_per_second=peaks, by_dtype={})
    first, *others = (_fit_dtype(device, [call for call in calls if call.config.dtype == dtype]) for dtype in dtypes)
    return replace(first, by_dtype=dict(zip(dtypes[1:], others, strict=True)))


def _fit_dtype(device: Device, calls: Sequence[MeasuredCall]) -> Device:
    feed, start = FED * device.peak(calls[0].config.dtype), np.array([*STARTS.values()])

    def made(constants: Floats) -> Device:
        named = zip(STARTS, map(float, constants), strict=True)
        found = {name: min(1.0, value) if name.endswith("efficiency") else value for name, value in named}
        return device.with_constants({**found, "feed": feed})

    def residuals(constants: Floats) -> Floats:
        fitted = made(constants)
        return np.array([math.log1p(call.error(fitted)) / _UNIT for call in calls])

    begins = [np.array([*{**STARTS, "half_rows": rows}.values()]) for rows in _HALF_ROWS]
    fits = [fit_logarithms(residuals, begin, start, np.full(len(start), _SPREAD), iterations=40) for begin in begins]
    return made(min(fits, key=lambda constants: float((residuals(constants) ** 2).sum())))


def fit_link(seconds: Mapping[int, float]) -> tuple[float, float]:
    """Seconds of a message without bytes, and bytes per second, from the seconds of messages by their bytes."""
    terms = np.array([(1.0, num_bytes) for num_bytes in seconds])
    fixed, per_byte = fit_factors(terms, np.array([*seconds.values()]))
    return fixed, 1 / per_byte if per_byte else math.inf


@dataclass(frozen=True)
class MeasuredStep:
    """A step of a real run. `predicted`: its seconds without the constants of RUN_CONSTANTS; `terms`: how often each counts in it."""

    seconds: float
    predicted: float
    terms: tuple[float, ...]


def fit_runtime(steps: Sequence[MeasuredStep]) -> dict[str, float]:
    """The constants of RUN_CONSTANTS, none below 0."""
    terms, base = np.array([step.terms for step in steps]), np.array([step.predicted for step in steps])
    return dict(zip(RUN_CONSTANTS, fit_factors(terms, np.array([step.seconds for step in steps]), base=base), strict=True))
