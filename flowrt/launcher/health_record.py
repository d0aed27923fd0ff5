"""Collects a run's events, heartbeats and request progress, and computes its health from them. Pure; one record per launcher."""

from __future__ import annotations

from collections.abc import Callable, Collection

from flowrt.actors.control import Heartbeat
from flowrt.graph.model import MONITOR
from flowrt.launcher import events
from flowrt.reliability.health import STALL_SECONDS, Health, RequestProgress, ServiceState, WorkerProgress, health


class HealthRecord:
    """`emitting`: the workers that emit tags. Their firings count as progress of requests, since a step of a long prompt yields no token.
    `now`: the clock, in seconds."""

    def __init__(self, emitting: Collection[str], now: Callable[[], float]) -> None:
        self._emitting, self._now = frozenset(emitting), now
        self.progress = RequestProgress()
        self._failure: str | None = None
        self._suspects: dict[str, str] = {}
        self._stuck: dict[str, str] = {}  # marked dead and not replaced: name -> why
        self._down: dict[str, str] = {}
        self._given_up: dict[str, None] = {}
        self._lost_experts: dict[str, events.UnavailableExperts] = {}  # by group
        self._workers: dict[str, tuple[Heartbeat, float]] = {}  # the latest heartbeat, and when its number of firings last changed

    def note(self, event: events.Event) -> None:
        match event:
            case events.WorkerSuspected(name, why):
                self._suspects[name] = why
            case events.WorkerMarkedDead(name, why, is_killed):
                self._suspects.pop(name, None)
                if not is_killed:
                    self._stuck[name] = why
            case events.WorkerCleared(name):
                self._suspects.pop(name, None)
                self._stuck.pop(name, None)
            case events.WorkerLost(name, how):  # never an attention group: its death ends the run
                self._down[name] = how
                self._given_up.pop(name, None)  # the fork server was only stopped for a while
                self._workers.pop(name, None)
                self._suspects.pop(name, None)
                if name == MONITOR:
                    self._suspects.clear()  # a dead monitor clears none; its next incarnation suspects again
            case events.WorkerRestarted(name):
                self._down.pop(name, None)
                self._given_up.pop(name, None)
            case events.WorkerGivenUp(name):
                for known in (self._down, self._suspects, self._workers):
                    known.pop(name, None)
                self._given_up[name] = None
            case events.UnavailableExperts(name, text):
                self._lost_experts.pop(name, None)
                if text:
                    self._lost_experts[name] = event
            case events.RunFailed(error):
                self._failure = str(error)

    def on_heartbeat(self, name: str, heartbeat: Heartbeat) -> None:
        now = self._now()
        before, since = self._workers.get(name, (None, now))
        if before is not None and heartbeat.num_firings != before.num_firings:
            since = now
            if name in self._emitting:
                self.progress.progressed(now)
        self._workers[name] = heartbeat, since

    def health(self, stall_seconds: float = STALL_SECONDS) -> Health:
        now = self._now()
        lost = sorted({f"{each.text}" for each in self._lost_experts.values() if each.follows != "degrade"})
        degraded = sorted({f"{each.text}" for each in self._lost_experts.values() if each.follows == "degrade"})
        state = ServiceState(
            num_open=self.progress.num_open,
            idle_seconds=self.progress.idle_seconds(now),
            failure=self._failure,
            lost_experts="; ".join(lost) or None,
            degraded="; ".join(degraded) or None,
            suspects=self._suspects,
            fenced=self._stuck,
            groups=self._emitting,
            down=self._down,
            given_up=tuple(self._given_up),
            workers={name: _progress_of(heartbeat, now - since) for name, (heartbeat, since) in self._workers.items()},
        )
        return health(state, stall_seconds)


def _progress_of(heartbeat: Heartbeat, idle_seconds: float) -> WorkerProgress:
    return WorkerProgress(
        heartbeat.num_firings, idle_seconds, heartbeat.running, heartbeat.running_seconds, heartbeat.bound_seconds, heartbeat.lag_seconds
    )
