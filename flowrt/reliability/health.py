"""Computes the health of a run: ok only while its open requests make progress. Pure: the clock is an argument.

A response from the front end proves little, because it can respond while the engine hangs. So health depends on recent progress of the
open requests. A run without open requests is healthy. flowrt/launcher/health_record.py gathers the state.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

STALL_SECONDS = 5.0  # longer than a failover takes, shorter than a user waits


class RequestProgress:
    """Counts open requests, queued ones included, and records the time of their latest progress."""

    def __init__(self) -> None:
        self.num_open = 0
        self._since = 0.0

    def opened(self, now: float) -> None:
        if self.num_open == 0:
            self._since = now
        self.num_open += 1

    def ended(self, now: float) -> None:
        """Records the end of a request, which counts as progress however it ended. Raises ValueError if no request is open."""
        if self.num_open == 0:
            raise ValueError("more requests ended than were opened")
        self.num_open -= 1
        self._since = now

    def progressed(self, now: float) -> None:
        """Records progress: a step produced tokens or processed a part of a prompt."""
        self._since = now

    def idle_seconds(self, now: float) -> float:
        """Seconds without progress while a request is open; 0 if none is open."""
        return now - self._since if self.num_open else 0.0


@dataclass(frozen=True)
class WorkerProgress:
    """Progress of a worker as reported by its latest heartbeat.

    `num_firings`: firings of this incarnation. `idle_seconds`: time since the latest firing. `running`: label of the running operation,
    `running_seconds` its duration so far, `bound_seconds` its bound (0: none). `lag_seconds`: lateness of the event loop.
    """

    num_firings: int
    idle_seconds: float
    running: str | None = None
    running_seconds: float = 0.0
    bound_seconds: float = 0.0
    lag_seconds: float = 0.0


@dataclass(kw_only=True)
class ServiceState:
    """The input of `health`.

    `failure`: why the run has ended. `suspects`: process -> reason. `fenced`: process -> why it was marked dead. `groups`: all groups.
    `lost_experts`: a sentence about unavailable experts; `degraded`: the same where the graph continues without them.
    `down`: process -> how it died; it will be restarted. `given_up`: process -> why it stays down for now.
    `workers`: progress of the workers that send heartbeats. `fork_server`: how it was lost, while there is none.
    """

    num_open: int = 0
    idle_seconds: float = 0.0
    failure: str | None = None
    lost_experts: str | None = None
    degraded: str | None = None
    suspects: dict[str, str] = field(default_factory=dict)
    fenced: dict[str, str] = field(default_factory=dict)
    groups: Collection[str] = ()
    down: dict[str, str] = field(default_factory=dict)
    given_up: dict[str, str] = field(default_factory=dict)
    workers: Mapping[str, WorkerProgress] = field(default_factory=dict)
    fork_server: str | None = None


@dataclass(frozen=True)
class Health:
    """`ok`: the run accepts requests. `problems`: why it is not ok. `warnings`: defects that it tolerates. `workers`: progress of each."""

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
        problems.append(f"{requests} open, and none has made progress for {state.idle_seconds:.1f} s")
    problems += [
        f"{process} has run {each.running} for {each.running_seconds:.1f} s, its bound is {each.bound_seconds:.1f} s"
        for process, each in sorted(state.workers.items())
        if each.bound_seconds and each.running_seconds > each.bound_seconds
    ]
    fenced = [f"{process} is marked dead: {why}" for process, why in sorted(state.fenced.items())]
    lost = {*state.fenced, *state.down, *state.given_up}
    if state.groups and lost.issuperset(state.groups):
        problems.append("no attention group is left; requests wait")
    warnings = [f"{state.degraded}; output is degraded"] if state.degraded is not None else []
    warnings += [f"{process} is suspect: {why}" for process, why in sorted(state.suspects.items())]
    warnings += fenced
    warnings += [f"{process} {how}; it is being started again" for process, how in sorted(state.down.items())]
    warnings += [f"{process} stays down: {why}" for process, why in sorted(state.given_up.items())]
    if state.fork_server is not None:
        warnings.append(f"the fork server {state.fork_server}; a process that ends stays down until a new one is ready")
    return Health(not problems, tuple(problems), tuple(warnings), dict(state.workers))
