"""Health: ok only while work progresses.

Here: Progress, which is told of requests and of their tokens, and `health`, which judges. Not here: who gathers what it looks at
(flowrt/launcher/health_record.py), who asks (flowrt/api, later HTTP), who is alive (detector.py). Pure: the clock is an argument.

That a process answers says little: an engine that hangs can keep a friendly front. So whoever asks is told whether something came out
lately for those who wait. With nobody waiting there is nothing to come out, and that is healthy.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

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


@dataclass(frozen=True)
class WorkerProgress:
    """What a worker's latest beat told: firings in this life, for how long none was added, what it computes, for how long it has and at
    most should (0: no bound), and how late its loop was."""

    num_firings: int
    idle_seconds: float
    running: str | None = None
    running_seconds: float = 0.0
    bound_seconds: float = 0.0
    lag_seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class ServiceState:
    """What `health` looks at. `failure`: why the run has ended. `suspects`: process -> why. `lost_experts`: a sentence about experts of
    which no copy is left; `degraded`: the same where the graph wants to go on without; `down`: process -> how it died, to be started again;
    `given_up`: processes that are not, the others carry their load. `workers`: what those tell who beat."""

    num_open: int = 0
    idle_seconds: float = 0.0
    failure: str | None = None
    lost_experts: str | None = None
    degraded: str | None = None
    suspects: Mapping[str, str] = field(default_factory=dict)
    fenced: Mapping[str, str] = field(default_factory=dict)
    groups: Collection[str] = ()
    down: Mapping[str, str] = field(default_factory=dict)
    given_up: Collection[str] = ()
    workers: Mapping[str, WorkerProgress] = field(default_factory=dict)


@dataclass(frozen=True)
class Health:
    """`ok`: send requests here. `problems`: why not; `warnings`: what does not keep it from working. `workers`: how far each has come."""

    ok: bool
    problems: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    workers: Mapping[str, WorkerProgress] = field(default_factory=dict)


def health(state: ServiceState, stall_seconds: float = STALL_SECONDS) -> Health:
    problems = []
    if state.failure is not None:
        problems.append(f"the run has ended: {state.failure}")
    if state.lost_experts is not None:
        problems.append(state.lost_experts)
    if state.num_open and state.idle_seconds > stall_seconds:
        requests = "1 request is" if state.num_open == 1 else f"{state.num_open} requests are"
        problems.append(f"{requests} open, and nothing has come of any for {state.idle_seconds:.1f} s")
    fenced = [f"{process} is marked dead: {why}" for process, why in sorted(state.fenced.items())]
    if state.groups and state.fenced.keys() >= set(state.groups):
        problems += fenced
    warnings = [f"{state.degraded}; output is degraded"] if state.degraded is not None else []
    warnings += [f"{process} is suspect: {why}" for process, why in sorted(state.suspects.items())]
    warnings += [each for each in fenced if each not in problems]
    warnings += [f"{process} {how}; it is being started again" for process, how in sorted(state.down.items())]
    warnings += [f"{process} is down, and its restarts are used up" for process in sorted(state.given_up)]
    return Health(not problems, tuple(problems), tuple(warnings), dict(state.workers))
