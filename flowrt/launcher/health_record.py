"""Collects a run's events, heartbeats and request progress, and computes its health from them. Pure; one record per launcher."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Literal

from flowrt.actors.control import ExpertsUnavailable, Heartbeat
from flowrt.graph.model import MONITOR, Graph
from flowrt.graph.recovery import attention_groups, pipelines
from flowrt.histogram import Histogram
from flowrt.launcher import events
from flowrt.reliability.health import STALL_SECONDS, Health, RequestProgress, ServiceState, WorkerProgress, health

_EDGES = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class OutageRecord:
    """Counts the deaths of processes, and how long it took to notice them and to restart the processes.

    `detection_seconds`: from the latest heartbeat to the first notice, of processes that send heartbeats. `outage_seconds`: from there
    until the next incarnation is connected."""

    def __init__(self) -> None:
        self.deaths: Counter[str] = Counter()
        self.detection_seconds, self.outage_seconds = Histogram(_EDGES), Histogram(_EDGES)
        self._down: set[str] = set()

    def note(self, event: events.Event, heartbeat_age: float | None) -> None:
        """`heartbeat_age`: of the process that the event is about."""
        match event:
            case events.WorkerMarkedDead(name) | events.WorkerLost(name, while_loading=False) if name not in self._down:
                self._down.add(name)
                self.deaths[name] += 1
                if heartbeat_age is not None:
                    self.detection_seconds.observe(heartbeat_age)
            case events.WorkerRestarted(name, seconds=seconds):
                self._down.discard(name)
                self.outage_seconds.observe(seconds)
            case events.WorkerCleared(name):
                self._down.discard(name)

    def forget(self, names: Collection[str]) -> None:
        """These processes have left the graph. One that comes back under such a name is up."""
        self._down -= {*names}


class HealthRecord:
    """Firings of attention groups and prefill workers count as progress of requests, since a step of a long prompt yields no token. `now`:
    the clock, in seconds."""

    def __init__(self, graph: Graph, now: Callable[[], float]) -> None:
        self._now, self._pipelines, self._state = now, frozenset(pipelines(graph)), ServiceState(groups=frozenset(attention_groups(graph)))
        self.progress = RequestProgress()
        self.outages = OutageRecord()
        self._names, self._left = {*graph.process_names()}, set[str]()
        self._lost_experts: dict[str, ExpertsUnavailable] = {}  # by group
        self._workers: dict[str, tuple[Heartbeat, float, float]] = {}  # the latest, when its number of firings last changed, when it came

    def note(self, event: events.Event) -> None:
        state = self._state
        self.outages.note(event, self.heartbeat_age(getattr(event, "name", "")))
        match event:
            case events.GraphVersion(graph):
                self._pipelines, state.groups = frozenset(pipelines(graph)), frozenset(attention_groups(graph)) - {*graph.leaving}
                gone = self._names - {*graph.process_names()}
                self.outages.forget(gone)
                self._left = (self._left | gone) - {*graph.process_names()}  # they go on until they have read that they end
                self._names = {*graph.process_names()}
                for known in (state.suspects, state.fenced, state.down, state.given_up, self._lost_experts, self._workers):
                    for name in gone & known.keys():
                        del known[name]
            case events.ForkServerLost(how):
                state.fork_server = how
            case events.ForkServerRestarted():
                state.fork_server = None
            case events.WorkerSuspected(name, why):
                state.suspects[name] = why
            case events.WorkerMarkedDead(name, why, is_killed):
                state.suspects.pop(name, None)
                if not is_killed:
                    state.fenced[name] = why
            case events.WorkerCleared(name):
                state.suspects.pop(name, None)
                state.fenced.pop(name, None)
            case events.WorkerLost(name, how, while_loading) if not while_loading:
                state.down[name] = how
                state.given_up.pop(name, None)  # the fork server was only stopped for a while
                self._workers.pop(name, None)
                state.suspects.pop(name, None)
                state.fenced.pop(name, None)
                self._lost_experts.pop(name, None)  # its next incarnation reports again
                if name == MONITOR:
                    state.suspects.clear()  # a dead monitor clears none; its next incarnation suspects again
            case events.WorkerRestarted(name):
                state.down.pop(name, None)
                state.given_up.pop(name, None)
            case events.WorkerGivenUp(name, why):
                for known in (state.down, state.suspects, state.fenced, self._workers):
                    known.pop(name, None)
                state.given_up[name] = why
            case events.ExpertsReported(name, report):
                self._lost_experts[name] = report
            case events.RunFailed(error):
                state.failure = str(error)

    def on_heartbeat(self, name: str, heartbeat: Heartbeat) -> None:
        if name in self._left:
            return
        now = self._now()
        before, since, _ = self._workers.get(name, (None, now, now))
        if before is not None and heartbeat.num_firings != before.num_firings:
            since = now
            if name in self._pipelines:
                self.progress.progressed(now)
        self._workers[name] = heartbeat, since, now

    def heartbeat_age(self, name: str) -> float | None:
        """Seconds since the latest heartbeat of the worker's present incarnation; None before the first."""
        return self._now() - self._workers[name][2] if name in self._workers else None

    def condition(self, name: str) -> Literal["up", "suspect", "down", "given up"]:
        """Returns the condition of a process that has been up."""
        state = self._state
        if name in state.given_up:
            return "given up"
        if name in state.down:
            return "down"
        return "suspect" if name in state.suspects or name in state.fenced else "up"

    def health(self, stall_seconds: float = STALL_SECONDS) -> Health:
        now = self._now()
        reports = [report for report in self._lost_experts.values() if report.text]
        lost = sorted({report.text for report in reports if report.follows != "degrade"})
        degraded = sorted({report.text for report in reports if report.follows == "degrade"})
        state = replace(
            self._state,
            num_open=self.progress.num_open,
            idle_seconds=self.progress.idle_seconds(now),
            lost_experts="; ".join(lost) or None,
            degraded="; ".join(degraded) or None,
            workers={name: _progress_of(heartbeat, now - since) for name, (heartbeat, since, _) in self._workers.items()},
        )
        return health(state, stall_seconds)


def _progress_of(heartbeat: Heartbeat, idle_seconds: float) -> WorkerProgress:
    return WorkerProgress(
        heartbeat.num_firings, idle_seconds, heartbeat.running, heartbeat.running_seconds, heartbeat.bound_seconds, heartbeat.lag_seconds
    )
