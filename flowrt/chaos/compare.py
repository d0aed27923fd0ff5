"""Compares the tokens and times of requests under faults with an undisturbed run of the same requests. Pure."""

from __future__ import annotations

import math
import statistics
from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple, Self

from flowrt.chaos.observer import InjectedFault

BIN_SECONDS = 0.1
STALL_SECONDS = 2.0  # after a fault; a gap between tokens in this time is attributed to it
MAX_WAIT_SECONDS = 1.5  # after the verdict on a stopped group, for its requests and new ones


class ReceivedToken(NamedTuple):
    """A token at the client: its place in its choice, its id, its time (the run's clock), its choice and its logprobs."""

    place: int
    token_id: int
    at: float
    choice: int = 0
    logprobs: tuple[object, ...] = ()


class PackedTokens(Sequence[ReceivedToken]):
    """Received tokens in little memory, so that a long run shows leaks and not its own record: equal answers share all but the times."""

    def __init__(self, tokens: Iterable[ReceivedToken], shared: dict[tuple[ReceivedToken, ...], tuple[ReceivedToken, ...]]) -> None:
        self._times = array("d", [received.at for received in tokens])
        timeless = tuple(received._replace(at=0.0) for received in tokens)
        self._timeless = shared.setdefault(timeless, timeless)

    def __len__(self) -> int:
        return len(self._times)

    def __getitem__(self, place: Any) -> Any:
        return list(self)[place] if isinstance(place, slice) else self._timeless[place]._replace(at=self._times[place])


class Move(NamedTuple):
    """The request lost its group at that time, with the death of `process`. The next attempt replays at most `num_tokens` of a choice."""

    at: float
    process: str
    num_tokens: int


@dataclass
class ReceivedAnswer:
    """One answer, as a client received it. `number` is that of its request, which is sent again and again. `endings`: the finish reason and
    the text of each choice."""

    number: int
    submitted: float
    tokens: Sequence[ReceivedToken] = field(default_factory=list)
    finish_reason: str | None = None  # None: it never ended
    error: str | None = None
    ended: float = math.inf
    num_late: int = 0  # tokens that came after the end
    endings: dict[int, tuple[str, str]] = field(default_factory=dict)
    index: int = -1  # the request's number at the gateway
    moves: list[Move] = field(default_factory=list)

    @property
    def failed(self) -> bool:
        return self.finish_reason not in ("stop", "length")

    def gaps(self) -> list[tuple[float, float]]:
        """(from, to) from each token to the next, in order."""
        return [(one.at, other.at) for one, other in pairwise(self.tokens)]

    @property
    def longest_gap_seconds(self) -> float:
        return max((end - begin for begin, end in self.gaps()), default=0.0)


class Difference(NamedTuple):
    """Counts of tokens: expected and never received; received twice; with another id or other logprobs, or beyond the expected end; after
    a later token; after the end. `ends`: choices with another finish reason or text. The answer is right when `any(difference)` is false.
    """

    lost: int = 0
    doubled: int = 0
    changed: int = 0
    swapped: int = 0
    late: int = 0
    ends: int = 0


@dataclass(frozen=True)
class ExpectedAnswer:
    """(choice, place) -> (token id, logprobs), and choice -> (finish reason, text)."""

    tokens: Mapping[tuple[int, int], tuple[int, tuple[object, ...]]]
    endings: Mapping[int, tuple[str, str]] = field(default_factory=dict)

    @classmethod
    def of(cls, answer: ReceivedAnswer) -> Self:
        tokens = {(received.choice, received.place): (received.token_id, received.logprobs) for received in answer.tokens}
        return cls(tokens, dict(answer.endings))


def difference_of(expected: ExpectedAnswer, answer: ReceivedAnswer) -> Difference:
    """Compare an answer with the expected one. Tokens that a failed request did not reach are not lost: its error reports them."""
    seen: set[tuple[int, int]] = set()
    furthest: dict[int, int] = {}  # choice -> place
    doubled = swapped = changed = 0
    for received in answer.tokens:
        choice, place = received.choice, received.place
        if (choice, place) in seen:
            doubled += 1
            continue
        seen.add((choice, place))
        swapped += place < furthest.get(choice, -1)
        furthest[choice] = max(furthest.get(choice, -1), place)
        changed += expected.tokens.get((choice, place)) != (received.token_id, received.logprobs)
    due = [
        (choice, place)
        for choice, place in {*expected.tokens, *((choice, place) for choice in furthest for place in range(furthest[choice]))}
        if not answer.failed or place < furthest.get(choice, -1)
    ]
    lost = sum(each not in seen for each in due)
    choices = () if answer.failed else expected.endings.keys() | answer.endings.keys()
    ends = sum(expected.endings.get(choice) != answer.endings.get(choice) for choice in choices)
    return Difference(lost, doubled, changed, swapped, answer.num_late, ends)


def expected_of(undisturbed: Iterable[ReceivedAnswer]) -> tuple[dict[int, ExpectedAnswer], int]:
    """(number -> expected answer, how many answers differ from the first to the same request). The latter must be 0 with strict
    numerics."""
    expected: dict[int, ExpectedAnswer] = {}
    num_different = 0
    for answer in undisturbed:
        if answer.failed:
            continue
        first = expected.setdefault(answer.number, ExpectedAnswer.of(answer))
        num_different += any(difference_of(first, answer))
    return expected, num_different


@dataclass
class AnswerCounts:
    """Counts the answers so far that failed, and those that differ from the expected one."""

    expected: Mapping[int, ExpectedAnswer]
    num_ended: int = 0
    num_failed: int = 0
    num_wrong: int = 0

    def add(self, answer: ReceivedAnswer) -> None:
        """Count an answer that has ended."""
        self.num_ended += 1
        self.num_failed += answer.failed
        self.num_wrong += answer.number in self.expected and any(difference_of(self.expected[answer.number], answer))

    def __str__(self) -> str:
        return f"{self.num_failed} of {self.num_ended} requests failed, {self.num_wrong} answered wrongly"


def usual_gaps(undisturbed: Iterable[ReceivedAnswer]) -> dict[int, float]:
    """number -> the median of the longest gaps of its answers."""
    gaps: dict[int, list[float]] = {}
    for answer in undisturbed:
        if not answer.failed:
            gaps.setdefault(answer.number, []).append(answer.longest_gap_seconds)
    return {number: statistics.median(each) for number, each in gaps.items()}


def extra_stalls(answers: Iterable[ReceivedAnswer], usual: Mapping[int, float], faults: Sequence[float] | None = None) -> list[float]:
    """Returns for each request that was answered within STALL_SECONDS after a fault its longest gap in that time, less its usual longest
    gap; at least 0. `faults`: their times in order; None: for all requests and all their gaps, which shows the noise."""

    def is_hit(begin: float, end: float) -> bool:
        if faults is None:
            return True
        place = bisect_left(faults, begin - STALL_SECONDS)
        return place < len(faults) and faults[place] <= end

    stalls = []
    for answer in answers:
        gaps = [end - begin for begin, end in answer.gaps() if is_hit(begin, end)]
        if gaps and answer.number in usual:
            stalls.append(max(0.0, max(gaps) - usual[answer.number]))
    return stalls


def token_times(answers: Iterable[ReceivedAnswer]) -> list[float]:
    """Returns when each token was received, in order."""
    return sorted(received.at for answer in answers for received in answer.tokens)


def throughput(times: Sequence[float], begin: float, end: float) -> float:
    """Tokens per second received in [begin, end), from `token_times`."""
    return (bisect_left(times, end) - bisect_left(times, begin)) / (end - begin) if end > begin else math.nan


def curve(answers: Iterable[ReceivedAnswer], begin: float, end: float, width: float = BIN_SECONDS) -> list[float]:
    """Tokens per second in bins of `width` seconds; a last bin that is not full is left out."""
    num_bins = int((end - begin) / width + 1e-9)
    counts = Counter(int((received.at - begin) / width) for answer in answers for received in answer.tokens if received.at >= begin)
    return [counts[place] / width for place in range(num_bins)]


class StretchPair(NamedTuple):
    """A stretch of load without faults from `begun`, and the stretch with faults that follows it from `faults_begun` to `ended`."""

    begun: float
    faults_begun: float
    ended: float

    def has_undisturbed(self, answer: ReceivedAnswer) -> bool:
        """Whether the answer was given in the stretch without faults, from its submission to its end."""
        return self.begun <= answer.submitted and answer.ended <= self.faults_begun

    def rates(self, times: Sequence[float]) -> tuple[float, float]:
        """Tokens per second with and without faults, from `token_times`."""
        return throughput(times, self.faults_begun, self.ended), throughput(times, self.begun, self.faults_begun)


# Requests that the death of their group moves to other groups: detection, replay, and the stall that remains.


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
    return {number: UsualTimes(*map(statistics.median, zip(*times, strict=True))) for number, times in found.items()}


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
