"""The places of a user's graph: who may begin, what keeps a place, and which calls are fenced."""

from __future__ import annotations

from flowrt.workers.call_table import CallTable


def test_output_frees_the_place_of_its_call() -> None:
    calls = CallTable(["p"], 2)
    assert [calls.begin(), calls.begin()] == [0, 1]
    assert not calls.can_begin()
    assert calls.end(0)
    assert calls.can_begin()
    assert calls.begin() == 2
    assert not calls.end(0)


def test_failed_call_takes_no_place_from_live_ones() -> None:
    calls = CallTable(["p"], 2)
    calls.begin()
    calls.fence(0)
    assert [calls.begin(), calls.begin()] == [1, 2]
    assert not calls.can_begin()


def test_no_call_begins_while_too_many_are_not_fenced_by_every_worker() -> None:
    calls = CallTable(["p", "q"], 1)
    calls.begin()
    assert calls.fence(0)
    assert not calls.is_live(0)
    assert not calls.end(0)  # an output that was on its way
    for worker in ("p", "p", "stranger"):
        calls.confirm(worker, [0])
    assert not calls.can_begin()
    assert not calls.fence(0)  # a second worker reports the same call
    calls.confirm("q", [0])
    assert calls.can_begin()


def test_call_of_a_graph_without_workers_needs_no_confirmation() -> None:
    calls = CallTable([], 1)
    assert calls.begin() == 0
    assert calls.fence(0)
    assert not calls.is_live(0)
    assert calls.can_begin()


def test_one_confirmation_of_several_calls() -> None:
    calls = CallTable(["p"], 2)
    for step in (calls.begin(), calls.begin()):
        calls.fence(step)
    assert not calls.can_begin()
    calls.confirm("p", [0, 1])
    assert [calls.begin(), calls.begin()] == [2, 3]


def test_part_of_a_call_may_fail_after_its_output() -> None:
    calls = CallTable(["p"], 1)
    calls.begin()
    calls.end(0)
    assert calls.begin() == 1
    assert calls.fence(0)
    calls.end(1)
    assert not calls.can_begin()  # the workers may still hold the rest of call 0
    calls.confirm("p", [0])
    assert calls.can_begin()


def test_nonsense_is_ignored() -> None:
    calls = CallTable(["p"], 1)
    assert not calls.fence(0)
    assert not calls.fence(-1)
    calls.confirm("p", [7])
    assert calls.begin() == 0


def test_no_call_of_an_ordered_graph_runs_too_far_ahead() -> None:
    calls = CallTable(["p"], 8, max_ahead=3)
    oldest = calls.begin()
    for _ in range(2):
        step = calls.begin()
        calls.fence(step)
        calls.confirm("p", [step])
    assert not calls.can_begin()
    calls.end(oldest)
    assert calls.can_begin()
