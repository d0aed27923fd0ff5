"""Fits what computing costs to times that were measured. Pure."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.floating[Any]]


def fit_factors(terms: Floats, seconds: Floats, min_gain: float = 1.0) -> list[float]:
    """The factors of these terms (a row per measurement, a column per term), none below 0, whose sums are nearest to `seconds`.

    Nearest by the least squares of relative errors. More terms, or later ones, are taken only if they make those less than `min_gain` of
    what the terms before them leave. All `seconds` are above 0.
    """
    num_terms, relative = terms.shape[1], terms / seconds[:, None]
    best, least = np.zeros(num_terms), float("inf")
    for count in range(1, num_terms + 1):  # with few terms, trying each choice of them is the shortest correct method
        for chosen in map(list, combinations(range(num_terms), count)):
            factors = np.linalg.lstsq(relative[:, chosen], np.ones(len(seconds)), rcond=None)[0]
            squares = float(((relative[:, chosen] @ factors - 1) ** 2).sum())
            if (factors >= 0).all() and squares < min_gain * least - 1e-12:
                best, least = np.zeros(num_terms), squares
                best[chosen] = factors
    return [float(each) for each in best]
