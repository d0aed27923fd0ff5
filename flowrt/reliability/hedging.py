"""Decides which servers are slow, and when a part is late enough to hedge it with another replica. Pure: times are arguments.

Each client of the expert servers has its own estimates, because a server may be slow for one client and not for another.

A part is late when it has taken longer than its server usually takes (mean plus four mean deviations, as TCP estimates its
retransmission timeout), or much longer than another server would take. A hedge costs the servers work, so a retry budget limits hedges
to one part in ten. A client avoids a server that takes three times as long as the best of the others, where another server holds a
replica. One tag in `PROBE` uses avoided servers too, which shows when they have recovered.
"""

from __future__ import annotations

from dataclasses import dataclass

LATE_FACTOR = 3.0  # times the estimate of the best other server
AVOID_FACTOR, TAKE_BACK_FACTOR = 3.0, 1.5
FIRST_SECONDS = 1.0  # lateness bound while there is no estimate
MIN_SECONDS = 2e-3  # no part is late before: shorter delays come from the scheduler of the system
MIN_RESPONSES = 8  # before an estimate counts
BUDGET_SHARE, MAX_BUDGET = 0.1, 4.0
PROBE = 64
OVERDUE_SECONDS, OVERDUE_FACTOR = 0.25, 4.0  # so late that the client reports the server (the monitor suspects it)
_MEAN_WEIGHT, _DEVIATION_WEIGHT = 1 / 8, 1 / 4


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


class HedgingPolicy:
    """Estimates of response times per server and part size (rows, in powers of two: a prompt takes longer than a token)."""

    def __init__(self, num_servers: int) -> None:
        self._estimates: list[dict[int, _Estimate]] = [{} for _ in range(num_servers)]
        self._latest = [0] * num_servers  # size class of the latest part with a response
        self._budget = MAX_BUDGET
        self._tags = 0
        self._has_changed = False  # an estimate, since `avoided` was updated
        self.avoided: frozenset[int] = frozenset()
        self.num_hedged = 0

    def record_response(self, server: int, num_rows: int, seconds: float) -> None:
        """Records the response time of a part and refills the budget."""
        self._budget = min(MAX_BUDGET, self._budget + BUDGET_SHARE)
        size = self._latest[server] = num_rows.bit_length()
        estimate = self._estimates[server].get(size)
        if estimate is None:
            estimate = self._estimates[server][size] = _Estimate()
        estimate.add(seconds)
        self._has_changed = True

    def update_avoided(self) -> None:
        """Updates `avoided` by the latest response of each server."""
        if not self._has_changed:
            return
        self._has_changed = False
        self.avoided = frozenset(server for server in range(len(self._estimates)) if self._is_slow(server))

    def _is_slow(self, server: int) -> bool:
        size = self._latest[server]
        own, best = self._estimates[server].get(size), self._best_of_others(server, size)
        if own is None or not own.counts or best is None:
            return False
        factor = TAKE_BACK_FACTOR if server in self.avoided else AVOID_FACTOR
        return own.mean > max(MIN_SECONDS, factor * best)

    def probes(self) -> bool:
        """Counts a tag. Returns whether it uses avoided servers too."""
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
        self._has_changed = True
        self.avoided -= {server}

    def _best_of_others(self, server: int, size: int) -> float | None:
        found = [
            estimate.mean
            for other, estimates in enumerate(self._estimates)
            if other != server and (estimate := estimates.get(size)) is not None and estimate.counts
        ]
        return min(found, default=None)
