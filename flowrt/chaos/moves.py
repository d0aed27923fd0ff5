"""Times of the requests that a lost group's death moves to other groups: detection, replay, and the stall that remains. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from flowrt.chaos.compare import ReceivedAnswer
from flowrt.chaos.observer import InjectedFault

MAX_WAIT_SECONDS = 1.5  # after the verdict on a stopped group, for its requests and new ones


class UsualTimes(NamedTuple):
    """Holds, of undisturbed answers to one request, the medians of the time to the first token, and of the time per further token."""

    first_seconds: float
    token_seconds: float

    def replay_seconds(self, num_tokens: int, chunk_tokens: int) -> float:
        """The prompt, and one step for as many of the tokens given out as a step computes again (strict numerics)."""
        return self.first_seconds + -(-num_tokens // chunk_tokens) * self.token_seconds


class MovedRequest(NamedTuple):
    """One request that moved. The three parts add up to the time from the fault to the first token after the move."""

    fault: InjectedFault
    detection_seconds: float
    replay_seconds: float
    stall_seconds: float

    @property
    def seconds(self) -> float:
        return self.detection_seconds + self.replay_seconds + self.stall_seconds


def usual_times(undisturbed: Iterable[ReceivedAnswer]) -> dict[int, UsualTimes]:
    """Returns the usual times by request number."""
    found: dict[int, list[UsualTimes]] = {}
    for answer in undisturbed:
        if answer.failed or not answer.tokens:
            continue
        first, last = answer.tokens[0].at, answer.tokens[-1].at
        num_steps = max(received.place for received in answer.tokens)
        found.setdefault(answer.number, []).append(UsualTimes(first - answer.submitted, (last - first) / max(1, num_steps)))
    return {
        number: UsualTimes(statistics.median(each.first_seconds for each in times), statistics.median(each.token_seconds for each in times))
        for number, times in found.items()
    }


def moved_requests(
    answers: Iterable[ReceivedAnswer], faults: Sequence[InjectedFault], usual: Mapping[int, UsualTimes], chunk_tokens: int
) -> list[MovedRequest]:
    """Every move whose request had a token before it moved again. `chunk_tokens`: of the graph's limits."""
    moved = []
    for answer in answers:
        for number, move in enumerate(answer.moves):
            until = answer.moves[number + 1].at if number + 1 < len(answer.moves) else answer.ended
            first = next((received.at for received in answer.tokens if move.at < received.at <= until), None)
            causes = [each for each in faults if each.process == move.process and each.at <= move.at and not each.missed]
            if first is None or not causes or answer.number not in usual:
                continue
            cause = max(causes, key=lambda injected: injected.at)
            replay = min(usual[answer.number].replay_seconds(move.num_tokens, chunk_tokens), first - move.at)
            moved.append(MovedRequest(cause, move.at - cause.at, replay, first - move.at - replay))
    return moved


def stalls_of_new_requests(
    answers: Iterable[ReceivedAnswer], down: Sequence[tuple[float, float]], usual: Mapping[int, UsualTimes]
) -> list[float]:
    """Returns, of each request that was sent while a process was down (from a verdict to the return), its time to the first token, less the
    usual one."""
    return [
        max(0.0, answer.tokens[0].at - answer.submitted - usual[answer.number].first_seconds)
        for answer in answers
        if answer.tokens and not answer.moves and answer.number in usual and any(begin <= answer.submitted <= end for begin, end in down)
    ]
