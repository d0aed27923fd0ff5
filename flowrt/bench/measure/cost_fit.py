"""Fits the modelled compute time of an operator (`emulate.compute` of a graph file) to its measured times."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from typing import NamedTuple

import numpy as np

from flowrt.graph.model import ComputeCost


class ComputeLoad(NamedTuple):
    """What one call computes in one layer: the numbers that a ComputeCost charges for."""

    num_rows: int
    num_experts: int = 0
    num_kv_tokens: int = 0


@dataclass(frozen=True)
class FittedCost:
    """A cost, and its largest relative error over the measured calls."""

    cost: ComputeCost
    worst_error: float


def fit_cost(seconds: Mapping[ComputeLoad, float]) -> FittedCost:
    """The cost whose terms, none below 0, have the least squares of relative errors. All `seconds` are above 0."""
    measured = np.array(list(seconds.values()))
    terms = np.array([(1, *load) for load in seconds], dtype=float) / measured[:, None]
    best, least = np.zeros(terms.shape[1]), float("inf")
    for count in range(1, terms.shape[1] + 1):  # with four terms, trying each choice of them is the shortest correct method
        for chosen in combinations(range(terms.shape[1]), count):
            values = np.linalg.lstsq(terms[:, chosen], np.ones(len(measured)), rcond=None)[0]
            squares = float(((terms[:, chosen] @ values - 1) ** 2).sum())
            if (values >= 0).all() and squares < least - 1e-12:
                best, least = np.zeros(terms.shape[1]), squares
                best[list(chosen)] = values
    cost = ComputeCost(*(float(f"{value:.3g}") for value in best))
    return FittedCost(cost, max(abs(cost.seconds(*load) / took - 1) for load, took in seconds.items()))


def compute_section(costs: Mapping[str, FittedCost]) -> Sequence[str]:
    """The lines of `emulate:` in a graph file, each with the largest error of its operator."""
    lines = ["compute:"]
    for operator, fitted in costs.items():
        terms = ", ".join(f"{name}: {value:g}" for name, value in asdict(fitted.cost).items() if value)
        lines.append(f"  {operator}: {{{terms}}}  # within {100 * fitted.worst_error:.0f} % of each measured time")
    return lines
