"""The health record from events, heartbeats and requests in time order: synchronous, with its own clock."""

from __future__ import annotations

import pytest

from flowrt.actors.control import ExpertsUnavailable, Heartbeat
from flowrt.errors import WorkerDiedError
from flowrt.graph.model import MONITOR, Graph, Node
from flowrt.launcher import events
from flowrt.launcher.health_record import HealthRecord, OutageRecord


class RecordAt:
    """A HealthRecord at `now`."""

    def __init__(self) -> None:
        self.now = 100.0
        nodes = [Node("group", "source", "attention.0"), Node("prompts", "source", "prefill.0"), Node("pack", "kv_pack", "prefill.0")]
        self.standing = HealthRecord(Graph.of(nodes, []), lambda: self.now)

    def heartbeat(self, name: str, num_firings: int, running: str | None = None) -> None:
        self.standing.on_heartbeat(name, Heartbeat(0, 0.0, num_firings, running, 0.5, 2.0))

    def note(self, *noted: events.Event) -> None:
        for event in noted:
            self.standing.note(event)

    @property
    def warnings(self) -> tuple[str, ...]:
        return self.standing.health().warnings


@pytest.fixture
def record() -> RecordAt:
    return RecordAt()


def reported(group: str, text: str, follows: str) -> events.ExpertsReported:
    return events.ExpertsReported(group, ExpertsUnavailable(text, follows))  # type: ignore[arg-type]


def test_open_requests_without_progress_are_not_ok_until_something_comes(record: RecordAt) -> None:
    record.standing.progress.opened(record.now)
    record.now += 5.1
    assert record.standing.health().problems == ("1 request is open, and none has made progress for 5.1 s",)
    assert record.standing.health(6.0).ok
    record.standing.progress.progressed(record.now)
    assert record.standing.health().ok


def test_steps_of_groups_are_progress_and_heartbeats_alone_are_not(record: RecordAt) -> None:
    record.standing.progress.opened(record.now)
    record.heartbeat("attention.0", 3)
    record.now += 4.0
    record.heartbeat("attention.0", 4)
    record.now += 4.0
    assert record.standing.health().ok, "a prompt is worked on"
    record.heartbeat("prefill.0", 3)
    record.now += 2.0
    record.heartbeat("prefill.0", 4)
    record.now += 3.5
    assert record.standing.health().ok, "a prefill worker works on one"
    record.heartbeat("attention.0", 4)
    record.heartbeat("experts.0", 3)
    record.now += 1.6
    record.heartbeat("experts.0", 9)
    assert not record.standing.health().ok


def test_how_far_each_worker_has_come(record: RecordAt) -> None:
    record.heartbeat("experts.0", 3)
    record.now += 2.0
    record.heartbeat("experts.0", 5)
    record.now += 1.0
    record.heartbeat("experts.0", 5, "'experts'")
    progress = record.standing.health().workers["experts.0"]
    assert (progress.num_firings, progress.idle_seconds, progress.running, progress.bound_seconds) == (5, 1.0, "'experts'", 2.0)
    record.note(events.WorkerLost("experts.0", "was killed by SIGKILL"))
    assert not record.standing.health().workers


def test_suspected_and_dead_processes_are_warnings_until_they_return(record: RecordAt) -> None:
    record.note(events.WorkerSuspected("experts.0", "no heartbeat for 0.42 s"))
    assert record.warnings == ("experts.0 is suspect: no heartbeat for 0.42 s",)
    record.note(events.WorkerCleared("experts.0", "heartbeats arrive again"))
    assert record.warnings == ()
    record.note(events.WorkerSuspected("experts.0", "no heartbeat"), events.WorkerLost("experts.0", "was marked dead"))
    assert record.warnings == ("experts.0 was marked dead; it is being started again",)
    record.note(events.WorkerRestarted("experts.0", 7, 0.5))
    assert record.warnings == ()
    why = "the fork server was killed, and it was started again once in 30 s"
    record.note(events.WorkerLost("experts.0", "was killed"), events.WorkerGivenUp("experts.0", why))
    assert record.warnings == (f"experts.0 stays down: {why}",), "its own restarts are not used up"
    assert record.standing.health().ok
    record.note(events.WorkerRestarted("experts.0", 8, 20.0))
    assert record.warnings == ()


def test_with_the_monitor_its_suspicions_are_gone(record: RecordAt) -> None:
    record.note(events.WorkerSuspected("experts.0", "no heartbeat"), events.WorkerLost(MONITOR, "was killed"))
    assert record.warnings == ("monitor was killed; it is being started again",)


def test_a_process_that_is_fenced_is_named_until_it_is_cleared(record: RecordAt) -> None:
    record.note(events.WorkerMarkedDead("experts.0", "stopped", is_killed=False))
    record.heartbeat("experts.0", 3)  # of an operation beyond its bound
    assert record.warnings == ("experts.0 is marked dead: stopped",)
    record.note(events.WorkerCleared("experts.0", "it works again"))
    assert record.warnings == ()


def test_without_any_group_that_works_the_service_is_not_healthy(record: RecordAt) -> None:
    record.note(events.WorkerMarkedDead("attention.0", "stopped", is_killed=False))
    assert record.standing.health().problems == ("no attention group is left; requests wait",)
    assert record.warnings == ("attention.0 is marked dead: stopped",)
    record.note(events.WorkerCleared("attention.0", "it works again"))
    assert record.standing.health().ok


def test_lost_experts_are_a_problem_or_where_output_may_be_degraded_a_warning(record: RecordAt) -> None:
    text = "no replica is left of expert 3: experts.1 went down and is not back"
    record.note(reported("attention.0", text, "wait"), reported("attention.1", text, "error"))
    assert record.standing.health().problems == (text,)
    record.note(reported("attention.0", "", "wait"), reported("attention.1", text, "degrade"))
    assert (record.standing.health().ok, record.warnings) == (True, (f"{text}; output is degraded",))
    record.note(reported("attention.1", "", "wait"))
    assert record.warnings == ()
    record.note(reported("attention.0", text, "wait"), events.WorkerLost("attention.0", "was killed"))
    assert text not in record.standing.health().problems, "its next incarnation reports what it misses"


def test_a_run_that_has_ended_is_not_ok(record: RecordAt) -> None:
    record.note(events.RunFailed(WorkerDiedError("attention.0", "was killed by SIGKILL")))
    assert not record.standing.health().ok


@pytest.mark.parametrize("next_event", [events.WorkerRestarted("attention.0", 7, 1.0), events.WorkerGivenUp("attention.0", "it", 30.0)])
def test_a_group_that_was_fenced_and_then_died_is_fenced_no_more(record: RecordAt, next_event: events.Event) -> None:
    record.note(events.WorkerMarkedDead("attention.0", "it hangs", is_killed=False), events.WorkerLost("attention.0", "was killed"))
    record.note(next_event)
    is_up = isinstance(next_event, events.WorkerRestarted)
    assert record.standing.health().ok == is_up
    assert record.standing.condition("attention.0") == ("up" if is_up else "given up")


def test_a_process_that_left_while_it_was_down_counts_its_next_death(record: RecordAt) -> None:
    graph = Graph.of([Node("group", "source", "attention.0"), Node("more", "source", "attention.1")], [])
    for _ in range(2):
        record.note(events.GraphVersion(graph), events.WorkerLost("attention.1", "was killed"))
        record.note(events.GraphVersion(Graph.of([Node("group", "source", "attention.0")], [])))
    assert record.standing.outages.deaths["attention.1"] == 2


def test_each_death_counts_once() -> None:
    record = OutageRecord()
    record.note(events.WorkerMarkedDead("a", "is silent"), 0.75)
    record.note(events.WorkerLost("a", "was killed by SIGKILL"), 0.8)
    record.note(events.WorkerRestarted("a", 5, 1.5), None)
    record.note(events.WorkerLost("a", "was killed by SIGKILL"), 0.1)
    record.note(events.WorkerLost("b", "was killed by SIGKILL", while_loading=True), None)
    assert record.deaths == {"a": 2}
    assert (record.detection_seconds.count, record.detection_seconds.total) == (2, 0.85)
    assert (record.outage_seconds.count, record.outage_seconds.total) == (1, 1.5)


def test_process_that_works_again_may_die_again() -> None:
    record = OutageRecord()
    for _ in range(2):
        record.note(events.WorkerMarkedDead("a", "is silent", is_killed=False), 0.5)
        record.note(events.WorkerCleared("a", "works again"), None)
    assert record.deaths == {"a": 2}
