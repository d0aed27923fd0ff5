"""Health: ok only while work progresses.

Here: Progress, which is told of requests and of their tokens, and `health`, which judges. Not here: who asks (a command, later HTTP), who
is alive (detector.py). Pure: the clock is an argument.

That a process answers says little: an engine that hangs can keep a friendly front. So whoever asks is told whether something came out
lately for those who wait. With nobody waiting there is nothing to come out, and that is healthy.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

STALL_SECONDS = 5.0  # more than a failover takes, less than a person waits


class Progress:
    """Requests that are open, and when last something came of any. Requests that wait in line count: somebody waits for them."""

    def __init__(self) -> None:
        self._num_open = 0
        self._since = 0.0

    @property
    def num_open(self) -> int:
        return self._num_open

    def opened(self, now: float) -> None:
        if self._num_open == 0:
            self._since = now
        self._num_open += 1

    def ended(self, now: float) -> None:
        """However it ended: that too is progress."""
        if self._num_open == 0:
            raise ValueError("more requests ended than were opened")
        self._num_open -= 1
        self._since = now

    def progressed(self, now: float) -> None:
        """A step gave tokens, or a prompt was worked on."""
        self._since = now

    def idle_seconds(self, now: float) -> float:
        """For how long nothing has come, although somebody waits."""
        return now - self._since if self._num_open else 0.0


@dataclass(frozen=True, kw_only=True)
class ServiceState:
    """What `health` looks at. `failure`: why the run has ended. `suspects`: process -> why. `lost_experts`: a sentence about experts of
    which no copy is left; `given_up`: processes that are not started again, the others carry their load."""

    num_open: int = 0
    idle_seconds: float = 0.0
    failure: str | None = None
    lost_experts: str | None = None
    suspects: Mapping[str, str] | None = None
    given_up: Collection[str] = ()


@dataclass(frozen=True)
class Health:
    """`ok`: send requests here. `problems`: why not; `warnings`: what does not keep it from working."""

    ok: bool
    problems: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


def health(state: ServiceState, stall_seconds: float = STALL_SECONDS) -> Health:
    problems = []
    if state.failure is not None:
        problems.append(f"the run has ended: {state.failure}")
    if state.lost_experts is not None:
        problems.append(state.lost_experts)
    if state.num_open and state.idle_seconds > stall_seconds:
        requests = "1 request is" if state.num_open == 1 else f"{state.num_open} requests are"
        problems.append(f"{requests} open, and nothing has come of any for {state.idle_seconds:.1f} s")
    warnings = [f"{process} is suspect: {why}" for process, why in sorted((state.suspects or {}).items())]
    warnings += [f"{process} is down and not started again" for process in sorted(state.given_up)]
    return Health(not problems, tuple(problems), tuple(warnings))
