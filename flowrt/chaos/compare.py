"""Compares the tokens and times of requests under faults with an undisturbed run of the same requests. Pure."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

BIN_SECONDS = 0.1
STALL_SECONDS = 2.0  # after a fault; a gap between tokens in this time is attributed to it


class ReceivedToken(NamedTuple):
    """A token at the client: its place in the answer, its id, its time (the run's clock)."""

    place: int
    token_id: int
    at: float


@dataclass
class ReceivedAnswer:
    """One answer, as a client received it. `number` is that of its request, which is sent again and again."""

    number: int
    submitted: float
    tokens: list[ReceivedToken] = field(default_factory=list)
    finish_reason: str | None = None  # None: it never ended
    error: str | None = None
    ended: float = math.inf
    num_late: int = 0  # tokens that came after the end

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
    """Counts of tokens: expected and never received; received twice; with another id, or beyond the expected end; after a later token;
    after the end. The tokens are right when `any(difference)` is false."""

    lost: int = 0
    doubled: int = 0
    changed: int = 0
    swapped: int = 0
    late: int = 0


def difference_of(expected: Sequence[int], answer: ReceivedAnswer) -> Difference:
    """Compare an answer with the expected token ids. Tokens that a failed request did not reach are not lost: its error reports them."""
    seen: dict[int, int] = {}
    doubled = swapped = 0
    furthest = -1
    for place, token_id, _ in answer.tokens:
        if place in seen:
            doubled += 1
            continue
        swapped += place < furthest
        furthest = max(furthest, place)
        seen[place] = token_id
    changed = sum(not 0 <= place < len(expected) or expected[place] != token_id for place, token_id in seen.items())
    end = furthest + 1 if answer.failed else len(expected)
    lost = sum(place not in seen for place in range(end))
    return Difference(lost, doubled, changed, swapped, answer.num_late)


def expected_of(undisturbed: Iterable[ReceivedAnswer]) -> tuple[dict[int, tuple[int, ...]], int]:
    """(number -> token ids, how many answers differ from the first to the same request). The latter must be 0 with strict numerics."""
    expected: dict[int, tuple[int, ...]] = {}
    num_different = 0
    for answer in undisturbed:
        if answer.failed:
            continue
        first = expected.setdefault(answer.number, tuple(received.token_id for received in answer.tokens))
        num_different += any(difference_of(first, answer))
    return expected, num_different


@dataclass
class AnswerCounts:
    """Counts the answers so far that failed, and those that differ from the expected one."""

    expected: Mapping[int, Sequence[int]]
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
    """For each request that was being answered within STALL_SECONDS after a fault: its longest gap in that time, less its usual longest
    gap; at least 0. `faults` None: for all requests and all their gaps, which shows the noise."""
    stalls = []
    for answer in answers:
        gaps = [end - begin for begin, end in answer.gaps() if faults is None or _overlaps(begin, end, faults)]
        if gaps and answer.number in usual:
            stalls.append(max(0.0, max(gaps) - usual[answer.number]))
    return stalls


def _overlaps(begin: float, end: float, faults: Sequence[float]) -> bool:
    return any(end >= at and begin <= at + STALL_SECONDS for at in faults)


def throughput(answers: Iterable[ReceivedAnswer], begin: float, end: float) -> float:
    """Tokens per second received in [begin, end)."""
    count = sum(begin <= received.at < end for answer in answers for received in answer.tokens)
    return count / (end - begin) if end > begin else math.nan


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

    def rates(self, answers: Sequence[ReceivedAnswer]) -> tuple[float, float]:
        """Tokens per second with and without faults."""
        return throughput(answers, self.faults_begun, self.ended), throughput(answers, self.begun, self.faults_begun)
