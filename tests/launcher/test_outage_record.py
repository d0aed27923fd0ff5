"""Deaths are counted once, with the time that it took to notice them and to restart the process."""

from __future__ import annotations

from flowrt.launcher import events
from flowrt.launcher.health_record import OutageRecord


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
