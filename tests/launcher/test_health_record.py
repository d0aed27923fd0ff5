"""The health record from events, heartbeats and requests in time order: synchronous, with its own clock."""

from __future__ import annotations

import pytest

from flowrt.actors.control import Heartbeat
from flowrt.errors import WorkerDiedError
from flowrt.graph.model import MONITOR
from flowrt.launcher import events
from flowrt.launcher.health_record import HealthRecord


class Told:
    """A HealthRecord at `now`."""

    def __init__(self) -> None:
        self.now = 100.0
        self.standing = HealthRecord(["attention.0"], lambda: self.now)

    def heartbeat(self, name: str, num_firings: int, running: str | None = None) -> None:
        self.standing.on_heartbeat(name, Heartbeat(0, 0.0, num_firings, running, 0.5, 2.0))

    def hear(self, *told: events.Event) -> None:
        for event in told:
            self.standing.note(event)

    @property
    def warnings(self) -> tuple[str, ...]:
        return self.standing.health().warnings


@pytest.fixture
def told() -> Told:
    return Told()


def test_open_requests_without_progress_are_not_ok_until_something_comes(told: Told) -> None:
    told.standing.progress.opened(told.now)
    told.now += 5.1
    assert told.standing.health().problems == ("1 request is open, and nothing has come of any for 5.1 s",)
    assert told.standing.health(6.0).ok
    told.standing.progress.progressed(told.now)
    assert told.standing.health().ok


def test_steps_of_groups_are_progress_and_heartbeats_alone_are_not(told: Told) -> None:
    told.standing.progress.opened(told.now)
    told.heartbeat("attention.0", 3)
    told.now += 4.0
    told.heartbeat("attention.0", 4)
    told.now += 4.0
    assert told.standing.health().ok, "a prompt is worked on"
    told.heartbeat("attention.0", 4)
    told.heartbeat("experts.0", 3)
    told.now += 1.1
    told.heartbeat("experts.0", 9)
    assert not told.standing.health().ok


def test_how_far_each_worker_has_come(told: Told) -> None:
    told.heartbeat("experts.0", 3)
    told.now += 2.0
    told.heartbeat("experts.0", 5)
    told.now += 1.0
    told.heartbeat("experts.0", 5, "'experts'")
    progress = told.standing.health().workers["experts.0"]
    assert (progress.num_firings, progress.idle_seconds, progress.running, progress.bound_seconds) == (5, 1.0, "'experts'", 2.0)
    told.hear(events.WorkerLost("experts.0", "was killed by SIGKILL"))
    assert not told.standing.health().workers


def test_suspected_and_dead_processes_are_warnings_until_they_return(told: Told) -> None:
    told.hear(events.WorkerSuspected("experts.0", "no heartbeat for 0.42 s"))
    assert told.warnings == ("experts.0 is suspect: no heartbeat for 0.42 s",)
    told.hear(events.WorkerCleared("experts.0", "it beats"))
    assert told.warnings == ()
    told.hear(events.WorkerSuspected("experts.0", "no beat"), events.WorkerLost("experts.0", "was held for dead"))
    assert told.warnings == ("experts.0 was held for dead; it is being started again",)
    told.hear(events.WorkerRestarted("experts.0", 7, 0.5))
    assert told.warnings == ()
    told.hear(events.WorkerLost("experts.0", "was killed"), events.WorkerGivenUp("experts.0", "too often"))
    assert told.warnings == ("experts.0 is down, and its restarts are used up",)
    assert told.standing.health().ok
    told.hear(events.WorkerRestarted("experts.0", 8, 20.0))
    assert told.warnings == ()


def test_with_the_monitor_its_suspicions_are_gone(told: Told) -> None:
    told.hear(events.WorkerSuspected("experts.0", "no beat"), events.WorkerLost(MONITOR, "was killed"))
    assert told.warnings == ("monitor was killed; it is being started again",)


def test_a_process_that_is_fenced_is_named_until_it_is_cleared(told: Told) -> None:
    told.hear(events.WorkerMarkedDead("experts.0", "stopped", is_killed=False))
    told.heartbeat("experts.0", 3)  # of an operation beyond its bound
    assert told.warnings == ("experts.0 is marked dead: stopped",)
    told.hear(events.WorkerCleared("experts.0", "it works again"))
    assert told.warnings == ()


def test_without_any_group_that_works_the_service_is_not_healthy(told: Told) -> None:
    told.hear(events.WorkerMarkedDead("attention.0", "stopped", is_killed=False))
    assert told.standing.health().problems == ("attention.0 is marked dead: stopped",)
    assert told.warnings == ()
    told.hear(events.WorkerCleared("attention.0", "it works again"))
    assert told.standing.health().ok


def test_lost_experts_are_a_problem_or_where_output_may_be_degraded_a_warning(told: Told) -> None:
    text = "no replica is left of expert 3: experts.1 went down and is not back"
    told.hear(events.UnavailableExperts("attention.0", text, "wait"), events.UnavailableExperts("attention.1", text, "error"))
    assert told.standing.health().problems == (text,)
    told.hear(events.UnavailableExperts("attention.0", "", "wait"), events.UnavailableExperts("attention.1", text, "degrade"))
    assert (told.standing.health().ok, told.warnings) == (True, (f"{text}; output is degraded",))
    told.hear(events.UnavailableExperts("attention.1", "", "wait"))
    assert told.warnings == ()


def test_a_run_that_has_ended_is_not_ok(told: Told) -> None:
    told.hear(events.RunFailed(WorkerDiedError("attention.0", "was killed by SIGKILL")))
    assert not told.standing.health().ok
