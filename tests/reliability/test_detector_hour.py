"""An hour of the detector, by a clock of its own: workers that stall now and then and beat late, and nobody is condemned."""

from __future__ import annotations

import heapq
import random

from flowrt.reliability.detector import Condemned, Decision, Detector

HOUR, BEAT, TICK = 3600.0, 0.1, 0.05
STALL, STALL_EVERY = 0.3, 10.0


def hour(stall_seconds: float, late_seconds: float, num_workers: int = 4, seed: int = 1) -> list[Decision]:
    """Each worker stands still for `stall_seconds` once in STALL_EVERY, and every beat comes up to `late_seconds` late."""
    drawn, detector, said = random.Random(seed), Detector(), []
    due = [(drawn.uniform(0, BEAT), worker, 0) for worker in range(num_workers)]
    stall_at = [drawn.uniform(0, STALL_EVERY) for _ in range(num_workers)]
    heapq.heapify(due)
    ticked = 0.0
    while due[0][0] < HOUR:
        at, worker, sequence = heapq.heappop(due)
        while ticked + TICK <= at:
            ticked += TICK
            said += detector.tick(ticked)
        said += detector.beat(at, f"experts.{worker}", "1", sequence)
        after = at + BEAT + drawn.uniform(0, late_seconds)
        if stall_at[worker] < after:
            after += stall_seconds
            stall_at[worker] += STALL_EVERY
        heapq.heappush(due, (after, worker, sequence + 1))
    return said


def condemned(said: list[Decision]) -> int:
    return sum(isinstance(each, Condemned) for each in said)


def test_stalls_of_300_ms_on_a_machine_four_times_too_small_cost_nobody() -> None:
    assert hour(STALL, late_seconds=0.0) == []
    assert condemned(hour(STALL, late_seconds=0.3)) == 0


def test_stalls_of_more_than_a_second_cost_everybody() -> None:
    """That the hour above says something."""
    assert condemned(hour(1.2, late_seconds=0.0)) == 4
