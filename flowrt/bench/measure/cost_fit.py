"""Fits the modelled compute time of an operator (`emulate.compute` of a graph file) to its measured times."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from msgspec import structs

from flowrt.costs.fit import fit_factors
from flowrt.costs.work import FiringLoad
from flowrt.graph.settings import ComputeCost


@dataclass(frozen=True)
class FittedCost:
    """A cost, and its largest relative error over the measured calls."""

    cost: ComputeCost
    worst_error: float


def fit_cost(seconds: Mapping[FiringLoad, float]) -> FittedCost:
    """The cost whose terms, none below 0, have the least squares of relative errors. All `seconds` are above 0."""
    terms = np.array([(1, *load[:3]) for load in seconds], dtype=float)  # scores are not charged
    cost = ComputeCost(*(float(f"{value:.3g}") for value in fit_factors(terms, np.array(list(seconds.values())))))
    return FittedCost(cost, max(abs(cost.seconds(*load) / took - 1) for load, took in seconds.items()))


def compute_section(costs: Mapping[str, FittedCost]) -> Sequence[str]:
    """The lines of `emulate:` in a graph file, each with the largest error of its operator."""
    lines = ["compute:"]
    for operator, fitted in costs.items():
        terms = ", ".join(f"{name}: {value:g}" for name, value in structs.asdict(fitted.cost).items() if value)
        lines.append(f"  {operator}: {{{terms}}}  # within {100 * fitted.worst_error:.0f} % of each measured time")
    return lines
