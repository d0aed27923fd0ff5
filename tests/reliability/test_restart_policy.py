"""The restart budget: how often a process is started again."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowrt.reliability.restart_policy import FIRST_DELAY_SECONDS, MAX_DELAY_SECONDS, GiveUp, Restart, RestartPolicy


def test_three_restarts_in_a_window_and_then_no_more() -> None:
    restart_policy = RestartPolicy(3, 30.0)
    assert restart_policy.on_death("a", 100.0) == Restart(0.0)
    assert restart_policy.on_death("a", 101.0) == Restart(FIRST_DELAY_SECONDS)
    assert restart_policy.on_death("a", 102.0) == Restart(2 * FIRST_DELAY_SECONDS)
    assert restart_policy.on_death("a", 103.0) == GiveUp("it was started again 3 times in 30 s", 30.0)


def test_a_process_that_was_given_up_is_tried_again_ever_more_rarely() -> None:
    restart_policy, now = RestartPolicy(1, 30.0), 0.0
    restart_policy.on_death("a", now)
    waits = []
    for _ in range(8):
        decision = restart_policy.on_death("a", now)
        assert isinstance(decision, GiveUp)
        assert decision.retry_seconds is not None
        waits.append(decision.retry_seconds)
        now += decision.retry_seconds + 1.0  # it dies a second after each try
    assert waits == [30.0, 60.0, 120.0, 240.0, 480.0, 600.0, 600.0, 600.0]
    assert restart_policy.on_death("a", now + 29.0) == Restart(0.0), "one that has lived for a window has its budget back"


def test_each_process_has_a_budget_of_its_own() -> None:
    restart_policy = RestartPolicy(1, 30.0)
    assert restart_policy.on_death("a", 0.0) == restart_policy.on_death("b", 0.0) == Restart(0.0)
    assert restart_policy.on_death("a", 1.0) == GiveUp("it was started again once in 30 s", 30.0)


def test_deaths_outside_the_window_do_not_count() -> None:
    restart_policy = RestartPolicy(2, 30.0)
    for number in range(50):
        assert isinstance(restart_policy.on_death("a", 15.2 * number), Restart)
    assert restart_policy.on_death("a", 15.2 * 49 + 14.0) == GiveUp("it was started again 2 times in 30 s", 30.0)


def test_no_restart_at_all() -> None:
    assert RestartPolicy(0, 30.0).on_death("a", 0.0) == GiveUp("reliability.restarts is 0", None)


@pytest.mark.parametrize("restarts", [10, 1000])
def test_the_wait_grows_to_a_bound(restarts: int) -> None:
    restart_policy = RestartPolicy(restarts, 1e6)
    delays = [decision.delay_seconds for number in range(restarts) if isinstance(decision := restart_policy.on_death("a", number), Restart)]
    assert len(delays) == restarts
    assert delays == sorted(delays)
    assert delays[-1] == MAX_DELAY_SECONDS


@given(st.integers(0, 4), st.lists(st.floats(0, 40), max_size=40))
def test_no_window_ever_sees_more_restarts_than_allowed(restarts: int, lifetimes: list[float]) -> None:
    restart_policy, now = RestartPolicy(restarts, 30.0), 0.0
    made: list[float] = []
    for lifetime in lifetimes:
        now += lifetime
        decision = restart_policy.on_death("a", now)
        wait = decision.delay_seconds if isinstance(decision, Restart) else decision.retry_seconds
        if wait is None:
            break
        now += wait
        made.append(now)
    assert all(sum(1 for other in made if when <= other < when + 30.0) <= restarts for when in made)
