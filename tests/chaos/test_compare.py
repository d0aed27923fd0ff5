"""Comparison of outputs with and without faults: each planted difference is counted, and correct outputs are not."""

from __future__ import annotations

import pytest

from flowrt.chaos import compare
from flowrt.chaos.compare import Difference, ExpectedAnswer, Move, PackedTokens, ReceivedAnswer, ReceivedToken, difference_of
from flowrt.chaos.observer import InjectedFault


def answer(
    *tokens: tuple[int, int], reason: str = "length", step_seconds: float = 0.01, submitted: float = 0.0, num_late: int = 0
) -> ReceivedAnswer:
    received = [ReceivedToken(place, token_id, submitted + step_seconds * (number + 1)) for number, (place, token_id) in enumerate(tokens)]
    return ReceivedAnswer(0, submitted, received, reason, None, received[-1].at if received else submitted, num_late)


RIGHT = tuple(enumerate((11, 12, 13, 14, 15)))
EXPECTED = ExpectedAnswer.of(answer(*RIGHT))


def test_a_right_answer_is_right() -> None:
    assert difference_of(EXPECTED, answer(*RIGHT)) == Difference()
    assert not any(Difference())


PLANTED = {
    "drop": ((*RIGHT[:2], *RIGHT[3:]), Difference(lost=1)),
    "drop of the last": (RIGHT[:4], Difference(lost=1)),
    "drop of all": ((), Difference(lost=5)),
    "dup": ((*RIGHT[:3], RIGHT[2], *RIGHT[3:]), Difference(doubled=1)),
    "dup under the next place": ((*RIGHT[:3], (3, 13), (4, 14), (5, 15)), Difference(changed=3)),
    "swap of two messages": ((RIGHT[0], RIGHT[2], RIGHT[1], *RIGHT[3:]), Difference(swapped=1)),
    "swap of two tokens": (((0, 11), (1, 13), (2, 12), *RIGHT[3:]), Difference(changed=2)),
    "another token": ((*RIGHT[:4], (4, 99)), Difference(changed=1)),
    "one too many": ((*RIGHT, (5, 16)), Difference(changed=1)),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_is_counted(name: str) -> None:
    tokens, difference = PLANTED[name]
    found = difference_of(EXPECTED, answer(*tokens))
    assert found == difference
    assert any(found)


def test_choices_logprobs_and_endings_are_compared() -> None:
    def chosen(*tokens: ReceivedToken, **endings: tuple[str, str]) -> ReceivedAnswer:
        named = {int(choice.removeprefix("choice")): ending for choice, ending in endings.items()}
        return ReceivedAnswer(0, 0.0, tokens, "length", endings=named)

    first, second = ReceivedToken(0, 11, 0.1, 0, (-0.5, ())), ReceivedToken(0, 12, 0.2, 1)
    ends = {"choice0": ("length", "one"), "choice1": ("stop", "two")}
    expected = ExpectedAnswer.of(chosen(first, second, **ends))
    assert not any(difference_of(expected, chosen(second, first, **ends))), "choices have no order among each other"
    assert difference_of(expected, chosen(first, **ends)) == Difference(lost=1)
    assert difference_of(expected, chosen(first, second._replace(choice=0), **ends)) == Difference(doubled=1, lost=1)
    assert difference_of(expected, chosen(first._replace(logprobs=(-0.6, ())), second, **ends)) == Difference(changed=1)
    assert difference_of(expected, chosen(first, second, choice0=("length", "one"))) == Difference(ends=1)
    assert difference_of(expected, chosen(first, second, **ends | {"choice1": ("length", "two")})) == Difference(ends=1)


def test_packed_tokens_are_those_received() -> None:
    shared: dict[tuple[ReceivedToken, ...], tuple[ReceivedToken, ...]] = {}
    received = [answer(*RIGHT).tokens, answer(*RIGHT, submitted=5.0).tokens]
    packed = [PackedTokens(tokens, shared) for tokens in received]
    assert [list(tokens) for tokens in packed] == [list(tokens) for tokens in received]
    assert [tokens[-1] for tokens in packed] == [tokens[-1] for tokens in received]
    assert packed[0][1:3] == list(received[0][1:3])
    assert len(packed[0]) == 5
    assert len(shared) == 1


def test_a_token_after_the_end_is_late() -> None:
    found = difference_of(EXPECTED, answer(*RIGHT, num_late=1))
    assert found == Difference(late=1)
    assert any(found)


def test_tokens_after_the_last_one_of_a_failed_request_are_not_lost() -> None:
    assert difference_of(EXPECTED, answer(*RIGHT[:2], reason="error")) == Difference()
    assert difference_of(EXPECTED, answer(RIGHT[0], RIGHT[2], reason="error")) == Difference(lost=1)
    assert answer(*RIGHT, reason="error").failed
    assert ReceivedAnswer(0, 0.0).failed  # it never ended


def test_a_token_that_comes_late_is_an_extra_stall() -> None:
    usual = compare.usual_gaps([answer(*RIGHT)])
    late = answer(*RIGHT)
    late.tokens[3:] = [received._replace(at=received.at + 0.5) for received in late.tokens[3:]]
    assert compare.extra_stalls([answer(*RIGHT)], usual) == [pytest.approx(0.0)]
    assert compare.extra_stalls([late], usual) == [pytest.approx(0.5)]
    assert compare.extra_stalls([late], usual, [0.032]) == [pytest.approx(0.5)]
    assert compare.extra_stalls([late], usual, [1.0]) == []  # it had ended before the fault


def test_different_outputs_without_faults_are_reported() -> None:
    expected, num_different = compare.expected_of([answer(*RIGHT), answer(*RIGHT[:4], (4, 99)), answer(reason="error")])
    assert expected == {0: EXPECTED}
    assert num_different == 1


def test_a_pair_compares_the_stretch_with_faults_to_the_one_before_it() -> None:
    fast = ReceivedAnswer(0, 0.0, [ReceivedToken(place, 1, 0.1 * place) for place in range(100)], "length", None, 9.9)  # 10 per second
    slow = ReceivedAnswer(0, 10.0, [ReceivedToken(place, 1, 10.0 + 0.2 * place) for place in range(50)], "length", None, 19.8)  # 5
    pair = compare.StretchPair(0.0, 9.99, 19.99)
    assert pair.rates(compare.token_times([fast, slow])) == (pytest.approx(5.0, rel=0.05), pytest.approx(10.0, rel=0.05))
    assert [pair.has_undisturbed(answer) for answer in (fast, slow)] == [True, False]
    assert not compare.StretchPair(0.0, 5.0, 9.0).has_undisturbed(fast), "it ended under faults"


def test_the_curve_counts_by_bins() -> None:
    tokens = [ReceivedToken(place, 1, at) for place, at in enumerate((0.95, 1.05, 1.06, 1.25))]
    assert compare.curve([ReceivedAnswer(0, 0.0, tokens, "length")], 1.0, 1.35, 0.1) == [20.0, 0.0, 10.0]


def test_answers_are_counted_when_they_end() -> None:
    counts = compare.AnswerCounts({0: EXPECTED})
    for ended in (answer(*RIGHT), answer(*RIGHT, reason="error")):
        counts.add(ended)
    assert str(counts) == "1 of 2 requests failed, 0 answered wrongly"
    counts.add(answer(*RIGHT[:4], (4, 99)))
    unexpected = answer((0, 99))
    unexpected.number = 7
    counts.add(unexpected)  # there is nothing to compare it with
    assert str(counts) == "1 of 4 requests failed, 1 answered wrongly"


# --- requests that move to other groups ----------------------------------------------------------------------------------------


def moved_answer(*times: float, moves: tuple[Move, ...] = (), submitted: float = 0.0) -> ReceivedAnswer:
    tokens = [ReceivedToken(place, 7, at) for place, at in enumerate(times)]
    return ReceivedAnswer(0, submitted, tokens, "length", ended=times[-1] if times else submitted, moves=list(moves))


def test_the_time_to_the_next_token_is_split() -> None:
    usual = compare.usual_times([moved_answer(0.05, 0.06, 0.07), moved_answer(0.05, 0.06, 0.07), moved_answer(0.5, 0.9, 9.0)])
    assert usual[0].first_seconds == pytest.approx(0.05)
    assert usual[0].token_seconds == pytest.approx(0.01)
    fault = InjectedFault("kill attention.0", "crash", "attention.0", 1.0)
    other = InjectedFault("kill attention.1", "crash", "attention.1", 1.005)
    moved = compare.moved_requests([moved_answer(0.9, 1.015, 1.3, moves=(Move(1.02, "attention.0", 5),))], [fault, other], usual, 4)
    (each,) = moved
    assert each.fault is fault
    assert each.detection_seconds == pytest.approx(0.02)
    assert each.replay_seconds == pytest.approx(0.07)
    assert each.stall_seconds == pytest.approx(0.21)
    assert each.seconds == pytest.approx(0.3)


def test_a_request_that_moves_again_before_its_token_counts_from_the_last_move() -> None:
    usual = compare.usual_times([moved_answer(0.05, 0.06)])
    faults = [InjectedFault("kill", "crash", f"attention.{number}", 1.0 + number) for number in range(2)]
    moves = (Move(1.01, "attention.0", 1), Move(2.01, "attention.1", 1))
    assert [each.fault for each in compare.moved_requests([moved_answer(0.9, 2.1, moves=moves)], faults, usual, 4)] == [faults[1]]
    assert compare.moved_requests([moved_answer(0.9, moves=moves)], faults, usual, 4) == []


def test_new_requests_stall_beyond_the_usual_time_to_their_first_token() -> None:
    usual = compare.usual_times([moved_answer(0.05, 0.06)])
    answers = [moved_answer(2.5, submitted=2.0), moved_answer(0.5), moved_answer(2.5, submitted=2.0, moves=(Move(2.1, "attention.0", 0),))]
    assert compare.stalls_of_new_requests(answers, [(1.0, 3.0)], usual) == [pytest.approx(0.45)]
