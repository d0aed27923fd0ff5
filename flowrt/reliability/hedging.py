"""Decides which servers are slow, and when a part is late enough to hedge it with another replica. Pure: times are arguments.

Each client of the expert servers has its own estimates, because a server may be slow for one client and not for another.

A part is late when it has taken longer than its server usually takes (mean plus four mean deviations, as TCP estimates its
retransmission timeout), or much longer than another server would take. A hedge costs the servers work, so a retry budget limits hedges
to one part in ten. A client avoids a server that takes three times as long as most of the others, where another server holds a replica:
each response is compared with the latest ones of the others, so that a busy moment, in which all are slow, makes no server slow. At most
half of the other servers are avoided. One tag in `PROBE` uses avoided servers too, which shows when they have recovered.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

LATE_FACTOR = 3.0  # times the estimate of the best other server
AVOID_FACTOR, TAKE_BACK_FACTOR = 3.0, 1.5
FIRST_SECONDS = 1.0  # lateness bound while there is no estimate
MIN_SECONDS = 2e-3  # no part is late before: shorter delays come from the scheduler of the system
MIN_RESPONSES = 8  # before an estimate counts
BUDGET_SHARE, MAX_BUDGET = 0.1, 4.0
PROBE = 64
OVERDUE_SECONDS, OVERDUE_FACTOR = 0.25, 4.0  # so late that the client reports the server (the monitor suspects it)
FRESH_RESPONSES = 4  # per server: older ones of others are not compared
_MEAN_WEIGHT, _DEVIATION_WEIGHT = 1 / 8, 1 / 4
_RATIO_WEIGHT, _SLOW_WEIGHT = 1 / 16, 1 / 4  # of a response in the ratio; of a server that is avoided, which has few of them


@dataclass(slots=True)
class _Estimate:
    mean: float = 0.0
    deviation: float = 0.0
    count: int = 0

    def add(self, seconds: float) -> None:
        if self.count == 0:
            self.mean, self.deviation = seconds, seconds / 2
        else:
            self.deviation += _DEVIATION_WEIGHT * (abs(seconds - self.mean) - self.deviation)
            self.mean += _MEAN_WEIGHT * (seconds - self.mean)
        self.count += 1

    @property
    def counts(self) -> bool:
        return self.count >= MIN_RESPONSES


@dataclass(slots=True)
class _Compared:
    """The latest response of a server, and the mean logarithm of its times over those of most others."""

    size: int = 0
    seconds: float = 0.0
    at: int = 0  # its number among all responses
    mean_log_ratio: float = 0.0
    count: int = 0


class HedgingPolicy:
    """Estimates of response times per server and part size (rows, in powers of two: a prompt takes longer than a token)."""

    def __init__(self, servers: Iterable[int] = ()) -> None:
        self._estimates: dict[int, dict[int, _Estimate]] = {}
        self._compared: dict[int, _Compared] = {}
        self._num_responses = 0
        self._budget = MAX_BUDGET
        self._tags = 0
        self._has_changed = False  # an estimate, since `slow` was updated
        self.slow: frozenset[int] = frozenset()
        self.num_hedged = 0
        for server in servers:
            self.add(server)

    def add(self, server: int) -> None:
        """Begin with a server, without estimates."""
        self._estimates[server], self._compared[server] = {}, _Compared()

    def remove(self, server: int) -> None:
        """The server is gone for good, or until it is added again."""
        self.forget(server)
        del self._estimates[server], self._compared[server]

    def record_response(self, server: int, num_rows: int, seconds: float) -> None:
        """Records the response time of a part and refills the budget."""
        self._budget = min(MAX_BUDGET, self._budget + BUDGET_SHARE)
        size = num_rows.bit_length()
        self._compare(server, size, seconds)
        estimate = self._estimates[server].get(size)
        if estimate is None:
            estimate = self._estimates[server][size] = _Estimate()
        estimate.add(seconds)
        self._has_changed = True

    def update_slow(self) -> None:
        """Updates `slow` by the latest response of each server."""
        if not self._has_changed:
            return
        self._has_changed = False
        slow = sorted(filter(self._is_slow, self._estimates), key=lambda server: -self._compared[server].mean_log_ratio)
        self.slow = frozenset(slow[: max(1, (len(self._estimates) - 1) // 2)])

    def _compare(self, server: int, size: int, seconds: float) -> None:
        """Compares the response with the latest ones of the other servers, if these are fresh and their parts were not smaller."""
        self._num_responses += 1
        own, oldest = self._compared[server], self._num_responses - FRESH_RESPONSES * len(self._compared)
        own.size, own.seconds, own.at = size, seconds, self._num_responses
        others = sorted(
            each.seconds for each in self._compared.values() if each is not own and each.at > max(0, oldest) and each.size >= size
        )
        if not others or min(seconds, others[0]) <= 0:
            return
        ratio = math.log(seconds / others[len(others) // 2])  # of two, the slower one: a server may just be the last to get its rows
        weight = _SLOW_WEIGHT if server in self.slow else max(_RATIO_WEIGHT, 1 / (own.count + 1))
        own.mean_log_ratio += weight * (ratio - own.mean_log_ratio)
        own.count += 1

    def _is_slow(self, server: int) -> bool:
        own = self._compared[server]
        estimate = self._estimates[server].get(own.size)
        if own.count < MIN_RESPONSES or estimate is None or estimate.mean <= MIN_SECONDS:
            return False
        return own.mean_log_ratio > math.log(TAKE_BACK_FACTOR if server in self.slow else AVOID_FACTOR)

    def probes(self) -> bool:
        """Counts a tag. Returns whether it uses slow servers too."""
        self._tags += 1
        return self._tags % PROBE == 0

    def late_after(self, server: int, num_rows: int) -> float:
        """Seconds after which a part is late."""
        size = num_rows.bit_length()
        own, best = self._estimates[server].get(size), self._best_of_others(server, size)
        points = [own.mean + 4 * own.deviation] if own is not None and own.counts else []
        if best is not None:
            points.append(LATE_FACTOR * best)
        return max(MIN_SECONDS, min(points)) if points else FIRST_SECONDS

    def overdue_after(self, server: int, num_rows: int) -> float:
        """Seconds after which a part is so late that the client reports the server."""
        return max(OVERDUE_SECONDS, OVERDUE_FACTOR * self.late_after(server, num_rows))

    @property
    def has_budget(self) -> bool:
        """Whether the budget has a hedge left."""
        return self._budget >= 1

    def spend(self) -> None:
        self._budget -= 1
        self.num_hedged += 1

    def forget(self, server: int) -> None:
        """Drops the estimates of a lost server: its next incarnation starts without history."""
        self._estimates[server].clear()
        self._compared[server] = _Compared()
        self._has_changed = True
        self.slow -= {server}

    def _best_of_others(self, server: int, size: int) -> float | None:
        found = [
            estimate.mean
            for other, estimates in self._estimates.items()
            if other != server and (estimate := estimates.get(size)) is not None and estimate.counts
        ]
        return min(found, default=None)
