"""The smallest part of a failing case that still fails: fewer faults, fewer requests, no weather.

Here: `shrink`. Not here: what a run is (cases.py), how the result is told (campaign.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from flowrt.simulation.cases import Case, Kept

MAX_RUNS = 60


def shrink(case: Case, fails: Callable[[Case], bool], max_runs: int = MAX_RUNS) -> Kept:
    """What to keep of `case`, which fails: nothing of it can be left out alone without the failure going away, unless the runs were
    used up before. Any failure counts as the same: two faults of one bug rarely show alike."""
    kept = Kept(tuple(range(len(case.scenario.faults))), tuple(range(len(case.requests))))
    runs = 0

    def still_fails(smaller: Kept) -> bool:
        nonlocal runs
        runs += 1
        return runs <= max_runs and fails(smaller.of(case))

    if still_fails(replace(kept, calm=True)):
        kept = replace(kept, calm=True)
    shrunk = True
    while shrunk and runs < max_runs:
        shrunk = False
        if len(kept.faults or ()) > 1 and still_fails(replace(kept, faults=())):
            kept, shrunk = replace(kept, faults=()), True
        for number in kept.faults or ():
            smaller = replace(kept, faults=_without(kept.faults, number))
            if still_fails(smaller):
                kept, shrunk = smaller, True
        for number in kept.requests or ():
            smaller = replace(kept, requests=_without(kept.requests, number))
            if smaller.requests and still_fails(smaller):
                kept, shrunk = smaller, True
    return kept


def _without(numbers: tuple[int, ...] | None, number: int) -> tuple[int, ...]:
    return tuple(each for each in numbers or () if each != number)
