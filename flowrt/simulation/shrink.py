"""Shrinks a failing case to a minimal part that still fails: fewer faults, fewer requests, calm network conditions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from flowrt.simulation.case import Case, Kept

MAX_RUNS = 60


def shrink(case: Case, fails: Callable[[Case], bool], max_runs: int = MAX_RUNS) -> Kept:
    """Returns the part of the failing `case` to keep. No single element can be removed from it without losing the failure, unless
    `max_runs` was exhausted first. Any failure counts as the same, because one bug rarely fails twice in the same way."""
    kept = Kept(tuple(range(len(case.scenario.faults))), tuple(range(len(case.requests) + len(case.calls))))
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
            smaller = replace(kept, faults=_remove(kept.faults, number))
            if still_fails(smaller):
                kept, shrunk = smaller, True
        for number in kept.requests or ():
            smaller = replace(kept, requests=_remove(kept.requests, number))
            if smaller.requests and still_fails(smaller):
                kept, shrunk = smaller, True
    return kept


def _remove(numbers: tuple[int, ...] | None, number: int) -> tuple[int, ...]:
    return tuple(each for each in numbers or () if each != number)
