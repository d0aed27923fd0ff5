"""Fits what computing costs to times that were measured. Pure."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.floating[Any]]


def fit_factors(terms: Floats, seconds: Floats, min_gain: float = 1.0, base: Floats | float = 0.0) -> list[float]:
    """The factors of these terms (a row per measurement, a column per term), none below 0, whose sums, with
    `base`, are nearest to `seconds`.

    Nearest by the least squares of relative errors. More terms, or later ones, are taken only if they make those less than `min_gain` of
    what the terms before them leave. All `seconds` are above 0.
    """
    num_terms, relative, goal = terms.shape[1], terms / seconds[:, None], np.ones(len(seconds)) - base / seconds
    best, least = np.zeros(num_terms), float("inf")
    for count in range(1, num_terms + 1):  # with few terms, trying each choice of them is the shortest correct method
        for chosen in map(list, combinations(range(num_terms), count)):
            factors = np.linalg.lstsq(relative[:, chosen], goal, rcond=None)[0]
            squares = float(((relative[:, chosen] @ factors - goal) ** 2).sum())
            if (factors >= 0).all() and squares < min_gain * least - 1e-12:
                best, least = np.zeros(num_terms), squares
                best[chosen] = factors
    return [float(each) for each in best]


def fit_logarithms(
    residuals: Callable[[Floats], Floats], start: Floats, prior: Floats, prior_spread: Floats, iterations: int = 12
) -> Floats:
    """The positive constants for which `residuals(constants)` and the distance from `prior` have the least squares, from `start`.

    Residuals are in units of their expected spread, the distance of a constant is ln(constant / prior) / `prior_spread`: a constant that no
    residual depends on keeps its prior. Levenberg-Marquardt with numeric derivatives, in logarithms.
    """
    logs, goal, damping = np.log(start), np.log(prior), 1e-2

    def all_residuals(logs: Floats) -> Floats:
        return np.concatenate([residuals(np.exp(logs)), (logs - goal) / prior_spread])

    current = all_residuals(logs)
    for _ in range(iterations):
        steps = np.eye(len(logs)) * 1e-4
        jacobian = np.stack([(all_residuals(logs + step) - current) / 1e-4 for step in steps], axis=1)
        normal, gradient = jacobian.T @ jacobian, jacobian.T @ current
        while damping < 1e6:
            moved = logs - np.linalg.solve(normal + damping * np.diag(np.diag(normal)), gradient)
            tried = all_residuals(moved)
            if tried @ tried < current @ current:
                gained = 1 - (tried @ tried) / (current @ current)
                logs, current, damping = moved, tried, damping / 10
                break
            damping *= 10
        else:
            break
        if gained < 1e-6:
            break
    return np.exp(logs)
