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
WINDOW_SECONDS = 10.0  # after a fault, over which throughput is taken
STALL_SECONDS = 2.0  # after a fault; a gap between tokens in this time is attributed to it
MIN_WINDOW_SECONDS = 0.5


class ReceivedToken(NamedTuple):
    """A token at the client: its place in the answer, its id, its time (the run's clock)."""

    place: int
    token_id: int
    at: float


@dataclass
class Answer:
    """One answer at the client. `number`: of the request, which is sent again and again."""

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


@dataclass(frozen=True)
class Difference:
    """Counts of tokens: expected and never received; received twice; with another id, or beyond the expected end; after a later token;
    after the end."""

    lost: int = 0
    doubled: int = 0
    changed: int = 0
    swapped: int = 0
    late: int = 0

    @property
    def any(self) -> bool:
        return bool(self.lost or self.doubled or self.changed or self.swapped or self.late)

    def __add__(self, other: Difference) -> Difference:
        return Difference(
            self.lost + other.lost,
            self.doubled + other.doubled,
            self.changed + other.changed,
            self.swapped + other.swapped,
            self.late + other.late,
        )


def difference_of(expected: Sequence[int], answer: Answer) -> Difference:
    """Tokens behind the end of a request that failed are not lost: its error says so."""
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


def expected_of(undisturbed: Iterable[Answer]) -> tuple[dict[int, tuple[int, ...]], int]:
    """(number -> token ids, how many later answers to a number differ from its first). The latter must be 0 with strict numerics."""
    expected: dict[int, tuple[int, ...]] = {}
    num_different = 0
    for answer in undisturbed:
        if answer.failed:
            continue
        first = expected.setdefault(answer.number, tuple(received.token_id for received in answer.tokens))
        num_different += difference_of(first, answer).any
    return expected, num_different


class Tally:
    """Counts the answers so far that failed or differ from the expected one. `answers` may grow; each counts once, when it has ended."""

    def __init__(self, expected: Mapping[int, Sequence[int]], answer: Sequence[Answer]) -> None:
        self._expected, self._answers = expected, answer
        self._num_taken = 0
        self._open: list[Answer] = []
        self.num_ended = self.num_failed = self.num_wrong = 0

    def __str__(self) -> str:
        self._open += self._answers[self._num_taken :]
        self._num_taken = len(self._answers)
        ended = [answer for answer in self._open if answer.finish_reason is not None or answer.error is not None]
        self._open = [answer for answer in self._open if answer.finish_reason is None and answer.error is None]
        self.num_ended += len(ended)
        self.num_failed += sum(answer.failed for answer in ended)
        self.num_wrong += sum(
            difference_of(self._expected[answer.number], answer).any for answer in ended if answer.number in self._expected
        )
        return f"{self.num_failed} of {self.num_ended} requests failed, {self.num_wrong} answered wrongly"


def usual_gaps(undisturbed: Iterable[Answer]) -> dict[int, float]:
    """number -> the median of the longest gaps of its answers."""
    gaps: dict[int, list[float]] = {}
    for answer in undisturbed:
        if not answer.failed:
            gaps.setdefault(answer.number, []).append(answer.longest_gap_seconds)
    return {number: statistics.median(each) for number, each in gaps.items()}


def extra_stalls(answers: Iterable[Answer], usual: Mapping[int, float], faults: Sequence[float] | None = None) -> list[float]:
    """For each request that was being answered within STALL_SECONDS after a fault: its longest gap in that time, less its usual longest
    gap; at least 0. `faults` None: for all requests and all their gaps, which shows the noise."""
    stalls = []
    for answer in answers:
        met = [end - begin for begin, end in answer.gaps() if faults is None or _overlaps(begin, end, faults)]
        if met and answer.number in usual:
            stalls.append(max(0.0, max(met) - usual[answer.number]))
    return stalls


def _overlaps(begin: float, end: float, faults: Sequence[float]) -> bool:
    return any(end >= at and begin <= at + STALL_SECONDS for at in faults)


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of them do not exceed; nan for none."""
    if not values:
        return math.nan
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def throughput(answers: Iterable[Answer], begin: float, end: float) -> float:
    """Tokens per second received in [begin, end)."""
    count = sum(begin <= received.at < end for answer in answers for received in answer.tokens)
    return count / (end - begin) if end > begin else math.nan


def curve(answers: Iterable[Answer], begin: float, end: float, width: float = BIN_SECONDS) -> list[float]:
    """Tokens per second in bins of `width` seconds; a last bin that is not full is left out."""
    num_bins = int((end - begin) / width + 1e-9)
    counts = Counter(int((received.at - begin) / width) for answer in answers for received in answer.tokens if received.at >= begin)
    return [counts[place] / width for place in range(num_bins)]


class ThroughputWindow(NamedTuple):
    """A fault and the throughput around it, in tokens per second. `before` is nan when there was too little time before it."""

    seconds: float  # after the fault
    after: float
    before: float


def windows(answers: Sequence[Answer], faults: Sequence[tuple[float, float]], begun: float, end: float) -> list[ThroughputWindow]:
    """`faults`: (time, time of recovery) in order. `after` ends at the next fault or at `end`; `before` begins at the recovery from the
    fault before. Both take at most WINDOW_SECONDS; a fault with too little time after it is left out."""
    found = []
    well = begun
    for number, (at, whole) in enumerate(faults):
        following = faults[number + 1][0] if number + 1 < len(faults) else math.inf
        until = min(at + WINDOW_SECONDS, following, end)
        since = max(well, at - WINDOW_SECONDS)
        well = max(well, at, whole if math.isfinite(whole) else at)
        if until - at >= MIN_WINDOW_SECONDS:
            before = throughput(answers, since, at) if at - since >= MIN_WINDOW_SECONDS else math.nan
            found.append(ThroughputWindow(until - at, throughput(answers, at, until), before))
    return found
