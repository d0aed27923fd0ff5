"""How often a process is started again."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowrt.reliability.supervision import FIRST_DELAY_SECONDS, MOST_DELAY_SECONDS, GiveUp, Restart, Supervision


def test_three_restarts_in_a_window_and_then_no_more() -> None:
    supervision = Supervision(3, 30.0)
    assert supervision.on_death("a", 100.0) == Restart(0.0)
    assert supervision.on_death("a", 101.0) == Restart(FIRST_DELAY_SECONDS)
    assert supervision.on_death("a", 102.0) == Restart(2 * FIRST_DELAY_SECONDS)
    assert not supervision.is_given_up("a")
    assert supervision.on_death("a", 103.0) == GiveUp("it was started again 3 times in 30 s")
    assert supervision.is_given_up("a")
    assert isinstance(supervision.on_death("a", 1000.0), GiveUp)  # for good


def test_each_process_has_a_budget_of_its_own() -> None:
    supervision = Supervision(1, 30.0)
    assert supervision.on_death("a", 0.0) == supervision.on_death("b", 0.0) == Restart(0.0)
    assert supervision.on_death("a", 1.0) == GiveUp("it was started again once in 30 s")
    assert not supervision.is_given_up("b")


def test_what_is_long_ago_is_forgotten() -> None:
    supervision = Supervision(2, 30.0)
    for number in range(50):
        assert supervision.on_death("a", 15.0 * number) == Restart(FIRST_DELAY_SECONDS if number else 0.0)
    assert supervision.on_death("a", 15.0 * 49 + 14.9) == GiveUp("it was started again 2 times in 30 s")


def test_no_restart_at_all() -> None:
    assert Supervision(0, 30.0).on_death("a", 0.0) == GiveUp("reliability.restarts is 0")


@pytest.mark.parametrize("restarts", [10, 1000])
def test_the_wait_grows_to_a_bound(restarts: int) -> None:
    supervision = Supervision(restarts, 1e6)
    delays = [decision.delay_seconds for number in range(restarts) if isinstance(decision := supervision.on_death("a", number), Restart)]
    assert len(delays) == restarts
    assert delays == sorted(delays)
    assert delays[-1] == MOST_DELAY_SECONDS


@given(st.integers(0, 4), st.lists(st.floats(0, 40), max_size=40))
def test_no_window_ever_sees_more_restarts_than_allowed(restarts: int, waits: list[float]) -> None:
    supervision, now, made = Supervision(restarts, 30.0), 0.0, []
    for wait in waits:
        now += wait
        if isinstance(supervision.on_death("a", now), Restart):
            made.append(now)
    assert all(sum(1 for other in made if when <= other < when + 30.0) <= restarts for when in made)
