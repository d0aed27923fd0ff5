"""The bubbles of a group."""

from __future__ import annotations

from flowrt.workers.group import WorkTimes


def test_only_time_with_sequences_counts() -> None:
    work = WorkTimes()
    work.note(10.0, 0.0, False)
    work.note(20.0, 1.0, True)
    assert (work.working_seconds, work.bubble_seconds) == (0.0, 0.0)
    work.note(23.0, 3.0, True)
    work.note(24.0, 3.5, False)
    work.note(30.0, 3.5, True)
    assert (work.working_seconds, work.bubble_seconds) == (4.0, 1.5)


def test_a_computation_that_counts_at_its_end_makes_no_bubble_and_none_ever_shrinks() -> None:
    work = WorkTimes()
    work.note(0.0, 0.0, True)
    found = []
    for now, computed in ((1.0, 0.0), (2.0, 0.0), (4.0, 3.0), (5.0, 4.0), (9.0, 4.0)):  # it computes from 1 to 4 and from 4 to 5
        work.note(now, computed, True)
        found.append(work.bubble_seconds)
    assert found == sorted(found)
    assert (work.working_seconds, work.bubble_seconds) == (9.0, 5.0)


def test_time_that_another_group_computes_is_no_bubble() -> None:
    work = WorkTimes()
    work.note(0.0, 0.0, True)
    work.note(1.0, 1.0, False)
    work.note(3.0, 3.0, True)  # experts that this process holds, for others
    work.note(4.0, 4.0, True)
    assert (work.working_seconds, work.bubble_seconds) == (2.0, 0.0)
