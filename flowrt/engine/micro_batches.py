"""How many micro-batches a group uses, chosen from the load while it runs (xDeepServe section 4.1).

More micro-batches hide more of the exchange and make each batch smaller. Which number is best depends on the sequences that run, on the
times of both sides and of the links, and on other groups at the same servers. So it is measured, not modelled: the group counts rows per
second with the present number and, now and then, with one more and one less, and keeps the fastest.
"""

from __future__ import annotations

import math

SETTLE_ROUNDS, MEASURED_ROUNDS = 1, 4  # a round is one step of each micro-batch in use
MIN_GAIN = 1.02  # a smaller one is noise
REMEASURE_STEPS = 1000  # after so many steps a number that is not in use is tried again


class MicroBatchCount:
    """Pure: ends of steps and the time in, the number of micro-batches to use out. `most` is the number that the graph has."""

    def __init__(self, most: int) -> None:
        self._most = most
        self.number = most
        self._load = 0
        self._best: dict[int, int] = {}  # by load: the fastest number so far
        self._rates: dict[tuple[int, int], tuple[float, int]] = {}  # (load, number) -> rows per second, and the step at which measured
        self._num_steps = 0
        self._since, self._steps, self._rows = 0.0, 0, 0  # of the window: its beginning, steps and rows
        self._latest = self._longest = 0.0  # the end of the latest step, and the longest time between two in the window

    def step_done(self, now: float, num_rows: int, num_running: int, is_decode: bool) -> int:
        """A step of `num_rows` rows is over at `now`, in seconds, and `num_running` sequences run. Returns the number to use from now on.

        Only steps that decode are compared: rows of prompts cost less each. A window of which one wait takes more than half measures a
        death or a pause, and begins anew.
        """
        self._num_steps += 1
        load = load_of(num_running)
        if load != self._load or not is_decode:
            self._load = load
            self._choose(num_running)
            self._begin_window(now)
            return self.number
        self._steps += 1
        if self._steps <= SETTLE_ROUNDS * self.number:
            self._since, self._rows, self._latest, self._longest = now, 0, now, 0.0
            return self.number
        self._rows += num_rows
        self._latest, self._longest = now, max(self._longest, now - self._latest)
        if self._steps >= (SETTLE_ROUNDS + MEASURED_ROUNDS) * self.number and now > self._since:
            if 2 * self._longest <= now - self._since:
                self._rates[load, self.number] = self._rows / (now - self._since), self._num_steps
                self._choose(num_running)
            self._begin_window(now)
        return self.number

    def _begin_window(self, now: float) -> None:
        self._since, self._steps, self._rows = now, 0, 0

    def _choose(self, num_running: int) -> None:
        """The best number for this load, or a neighbour of it that has to be measured."""
        load, most = self._load, max(1, min(self._most, num_running))
        nearest = min(self._best, key=lambda other: abs(other - load), default=None)
        best = min(self._best.get(load, most if nearest is None else self._best[nearest]), most)
        if (rate := self._rates.get((load, best))) is None:
            self._best[load] = self.number = best
            return
        for number in (best - 1, best + 1):
            if not 1 <= number <= most:
                continue
            other = self._rates.get((load, number))
            if other is None or self._num_steps - other[1] > REMEASURE_STEPS:
                self._best[load], self.number = best, number
                return
            if other[0] > rate[0] * MIN_GAIN:
                best, rate = number, other
        self._best[load] = self.number = best


def load_of(num_running: int) -> int:
    """Numbers of sequences that are alike for the choice: each up to 8, then four to each doubling."""
    return num_running if num_running <= 8 else round(4 * math.log2(num_running)) - 4
