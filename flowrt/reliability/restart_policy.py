"""Decides when a dead process is restarted: a restart budget per process. Pure: deaths in, decisions out.

As in Erlang's supervisors, the budget is a number of restarts per window. A process that exhausts it has a fault that a restart does not
cure. It stays down for one window, and each later attempt that fails doubles this time. flowrt/launcher/run_state.py calls it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

FIRST_DELAY_SECONDS = 0.1  # before the second restart within a window; the first is immediate
MAX_DELAY_SECONDS = 2.0
MAX_RETRY_SECONDS = 600.0  # between attempts for a process that was given up; the first follows after one window


@dataclass(frozen=True)
class Restart:
    """Restart the process after `delay_seconds`."""

    delay_seconds: float


@dataclass(frozen=True)
class GiveUp:
    """The process stays down for `retry_seconds`, or for the rest of the run (None). `why`: the reason as text for users."""

    why: str
    retry_seconds: float | None


@dataclass(slots=True)
class _Past:
    starts: deque[float] = field(default_factory=deque)  # times of restarts within the latest window, oldest first
    num_tries: int = 0  # attempts since it was given up


class RestartPolicy:
    """Allows `restarts` restarts per process in any `window_seconds`; then single attempts, until one survives a whole window."""

    def __init__(self, restarts: int, window_seconds: float) -> None:
        self._restarts, self._window_seconds = restarts, window_seconds
        self._past: dict[str, _Past] = {}

    def on_death(self, process: str, now: float) -> Restart | GiveUp:
        """Records a death at `now` (seconds of a monotonic clock), after the first start or after a restart, and returns the decision."""
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
