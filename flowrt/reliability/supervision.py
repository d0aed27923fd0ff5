"""When a process that died is started again, and when no more: a budget per process. Pure: deaths in, decisions out.

Here: Supervision. Not here: starting (flowrt/cluster/revival.py, which calls this). After Erlang's supervisors: so many restarts in so many
seconds, then the fault is taken to be in the process itself, and starting it again would only hide that.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

FIRST_DELAY_SECONDS = 0.1  # before the second restart within a window; the first is made at once
MOST_DELAY_SECONDS = 2.0


@dataclass(frozen=True)
class Restart:
    """Start it again after `delay_seconds`."""

    delay_seconds: float


@dataclass(frozen=True)
class GiveUp:
    """It stays down. `why` is for people."""

    why: str


class Supervision:
    """At most `restarts` restarts of one process in any `window_seconds`. One that was given up stays down for the rest of the run."""

    def __init__(self, restarts: int, window_seconds: float) -> None:
        self._restarts, self._window_seconds = restarts, window_seconds
        self._recent: dict[str, deque[float]] = {}  # process -> when it was last started again; at most `restarts` of them
        self._given_up: set[str] = set()

    def on_death(self, process: str, now: float) -> Restart | GiveUp:
        """It died at `now` (seconds of a monotonic clock), after its first start or after a restart."""
        recent = self._recent.setdefault(process, deque())
        while recent and now - recent[0] >= self._window_seconds:
            recent.popleft()
        if process in self._given_up or len(recent) >= self._restarts:
            self._given_up.add(process)
            return GiveUp(self._too_often(len(recent)))
        delay = min(FIRST_DELAY_SECONDS * 2 ** min(len(recent) - 1, 10), MOST_DELAY_SECONDS) if recent else 0.0
        recent.append(now)
        return Restart(delay)

    def is_given_up(self, process: str) -> bool:
        return process in self._given_up

    def _too_often(self, num_restarts: int) -> str:
        if not self._restarts:
            return "reliability.restarts is 0"
        times = "once" if num_restarts == 1 else f"{num_restarts} times"
        return f"it was started again {times} in {self._window_seconds:g} s"
