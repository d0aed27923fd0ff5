"""Servers that stop responding are found by checks at even intervals."""

from __future__ import annotations

from flowrt.reliability.poll_timeout import PollTimeout


def looks(timeout: PollTimeout, times: list[float], latest: float, incarnation: str = "a") -> list[bool]:
    return [timeout.has_expired(now, incarnation, latest) for now in times]


def test_silence_counts_from_the_first_look_at_it() -> None:
    timeout = PollTimeout(2.0, 0.5)
    assert looks(timeout, [100.0, 100.5, 101.0, 101.5, 102.0], latest=7.0) == [False, False, False, False, True]


def test_any_response_restarts_the_period() -> None:
    timeout = PollTimeout(2.0, 0.5)
    assert not any(looks(timeout, [0.0, 0.5, 1.0, 1.5], latest=7.0))
    assert not any(looks(timeout, [2.0, 2.5, 3.0, 3.5], latest=8.0))
    assert looks(timeout, [4.0], latest=8.0) == [True]


def test_new_incarnation_gets_the_full_period() -> None:
    timeout = PollTimeout(2.0, 0.5)
    assert looks(timeout, [0.0, 0.5, 1.0, 1.5, 2.0], latest=7.0)[-1]
    assert not any(looks(timeout, [2.5, 3.0, 3.5, 4.0], latest=7.0, incarnation="b"))


def test_stopped_client_does_not_blame_the_server() -> None:
    timeout = PollTimeout(2.0, 0.5)
    assert not any(looks(timeout, [0.0, 60.0, 60.5], latest=7.0))
    assert looks(timeout, [61.0, 61.5], latest=7.0) == [False, True]
