"""When a process that died is started again: a restart budget per process. Pure: deaths in, decisions out.

Not here: starting (flowrt/launcher/restarts.py, which calls this). After Erlang's supervisors: a number of restarts per window. A process
that uses them up has a fault that a restart does not cure. It stays down for a while, and each later try that fails doubles the while.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

FIRST_DELAY_SECONDS = 0.1  # before the second restart within a window; the first is made at once
MAX_DELAY_SECONDS = 2.0
MAX_RETRY_SECONDS = 600.0  # between tries of a process that was given up; the first comes after one window


@dataclass(frozen=True)
class Restart:
    """Start it again after `delay_seconds`."""

    delay_seconds: float


@dataclass(frozen=True)
class GiveUp:
    """It stays down: for `retry_seconds`, or for the rest of the run (None). `why` is for people."""

    why: str
    retry_seconds: float | None


@dataclass(slots=True)
class _Past:
    starts: deque[float] = field(default_factory=deque)  # of restarts within the latest window, oldest first
    num_tries: int = 0  # since it was given up


class Supervision:
    """At most `restarts` restarts of one process in any `window_seconds`. Then one try at a time, until one lives for a whole window."""

    def __init__(self, restarts: int, window_seconds: float) -> None:
        self._restarts, self._window_seconds = restarts, window_seconds
        self._past: dict[str, _Past] = {}

    def on_death(self, process: str, now: float) -> Restart | GiveUp:
        """It died at `now` (seconds of a monotonic clock), after its first start or after a restart."""
        if not self._restarts:
            return GiveUp("reliability.restarts is 0", None)
        past = self._past.setdefault(process, _Past())
        while past.starts and now - past.starts[0] >= self._window_seconds:
            past.starts.popleft()
        if not past.starts:
            past.num_tries = 0
        if past.num_tries or len(past.starts) >= self._restarts:
            delay = min(self._window_seconds * 2**past.num_tries, max(MAX_RETRY_SECONDS, self._window_seconds))
            why = self._why(len(past.starts), past.num_tries)
            past.num_tries = min(past.num_tries + 1, 64)
            past.starts.append(now + delay)
            return GiveUp(why, delay)
        delay = min(FIRST_DELAY_SECONDS * 2 ** min(len(past.starts) - 1, 10), MAX_DELAY_SECONDS) if past.starts else 0.0
        past.starts.append(now + delay)
        return Restart(delay)

    def _why(self, num_restarts: int, num_tries: int) -> str:
        if num_tries:
            return "it died again within the restart window"
        times = "once" if num_restarts == 1 else f"{num_restarts} times"
        return f"it was started again {times} in {self._window_seconds:g} s"
