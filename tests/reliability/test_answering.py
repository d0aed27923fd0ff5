"""Servers that stop responding are found by checks at even intervals."""

from __future__ import annotations

from flowrt.reliability.answering import Answering


def looks(answering: Answering, times: list[float], heard: float, life: str = "a") -> list[bool]:
    return [answering.look(now, life, heard) for now in times]


def test_silence_counts_from_the_first_look_at_it() -> None:
    answering = Answering(2.0, 0.5)
    assert looks(answering, [100.0, 100.5, 101.0, 101.5, 102.0], heard=7.0) == [False, False, False, False, True]


def test_any_response_restarts_the_period() -> None:
    answering = Answering(2.0, 0.5)
    assert not any(looks(answering, [0.0, 0.5, 1.0, 1.5], heard=7.0))
    assert not any(looks(answering, [2.0, 2.5, 3.0, 3.5], heard=8.0))
    assert looks(answering, [4.0], heard=8.0) == [True]


def test_new_incarnation_gets_the_full_period() -> None:
    answering = Answering(2.0, 0.5)
    assert looks(answering, [0.0, 0.5, 1.0, 1.5, 2.0], heard=7.0)[-1]
    assert not any(looks(answering, [2.5, 3.0, 3.5, 4.0], heard=7.0, life="b"))


def test_stopped_client_does_not_blame_the_server() -> None:
    answering = Answering(2.0, 0.5)
    assert not any(looks(answering, [0.0, 60.0, 60.5], heard=7.0))
    assert looks(answering, [61.0, 61.5], heard=7.0) == [False, True]
