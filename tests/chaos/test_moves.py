"""Times of moved requests: they are split into detection, replay and what remains."""

from __future__ import annotations

import pytest

from flowrt.chaos.compare import Move, ReceivedAnswer, ReceivedToken
from flowrt.chaos.moves import moved_requests, stalls_of_new_requests, usual_times
from flowrt.chaos.observer import InjectedFault


def answer(*times: float, moves: tuple[Move, ...] = (), submitted: float = 0.0) -> ReceivedAnswer:
    tokens = [ReceivedToken(place, 7, at) for place, at in enumerate(times)]
    return ReceivedAnswer(0, submitted, tokens, "length", ended=times[-1] if times else submitted, moves=list(moves))


def test_the_time_to_the_next_token_is_split() -> None:
    usual = usual_times([answer(0.05, 0.06, 0.07), answer(0.05, 0.06, 0.07), answer(0.5, 0.9, 9.0)])
    assert usual[0].first_seconds == pytest.approx(0.05)
    assert usual[0].token_seconds == pytest.approx(0.01)
    fault = InjectedFault("kill attention.0", "crash", "attention.0", 1.0)
    other = InjectedFault("kill attention.1", "crash", "attention.1", 1.005)
    moved = moved_requests([answer(0.9, 1.015, 1.3, moves=(Move(1.02, "attention.0", 5),))], [fault, other], usual, 4)
    (each,) = moved
    assert each.fault is fault
    assert each.detection_seconds == pytest.approx(0.02)
    assert each.replay_seconds == pytest.approx(0.07)
    assert each.stall_seconds == pytest.approx(0.21)
    assert each.seconds == pytest.approx(0.3)


def test_a_request_that_moves_again_before_its_token_counts_from_the_last_move() -> None:
    usual = usual_times([answer(0.05, 0.06)])
    faults = [InjectedFault("kill", "crash", f"attention.{number}", 1.0 + number) for number in range(2)]
    moves = (Move(1.01, "attention.0", 1), Move(2.01, "attention.1", 1))
    assert [each.fault for each in moved_requests([answer(0.9, 2.1, moves=moves)], faults, usual, 4)] == [faults[1]]
    assert moved_requests([answer(0.9, moves=moves)], faults, usual, 4) == []


def test_new_requests_stall_beyond_the_usual_time_to_their_first_token() -> None:
    usual = usual_times([answer(0.05, 0.06)])
    answers = [answer(2.5, submitted=2.0), answer(0.5), answer(2.5, submitted=2.0, moves=(Move(2.1, "attention.0", 0),))]
    assert stalls_of_new_requests(answers, [(1.0, 3.0)], usual) == [pytest.approx(0.45)]
