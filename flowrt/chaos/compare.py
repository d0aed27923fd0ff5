"""What a fault did to requests: their tokens and times against an undisturbed run of the same requests. Pure.

Here: Asked, Told (one request as its client saw it), `difference_of`, Tally, stalls and throughput. Not here: who asks (load.py), the table
(report.py).
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

BIN_SECONDS = 0.1
WINDOW_SECONDS = 10.0  # after a fault, in which throughput is looked at
STALL_SECONDS = 2.0  # after a fault, in which a gap between tokens is put down to it
SHORTEST_WINDOW_SECONDS = 0.5


class Came(NamedTuple):
    """A token as the client got it: its place in the answer, its id, when (the run's clock)."""

    place: int
    token_id: int
    at: float


@dataclass
class Told:
    """What the client was told of one asking. `number`: which of the requests, of which each is asked again and again."""

    number: int
    submitted: float
    tokens: list[Came] = field(default_factory=list)
    finish_reason: str | None = None  # None: it never ended
    error: str | None = None
    ended: float = math.inf
    num_late: int = 0  # tokens that came after the end

    @property
    def failed(self) -> bool:
        return self.finish_reason not in ("stop", "length")

    def gaps(self) -> list[tuple[float, float]]:
        """(from, to) without a token between, in order: from each token to the next. For whom nothing came: from submission on."""
        return [(one.at, other.at) for one, other in pairwise(self.tokens)]

    @property
    def longest_gap_seconds(self) -> float:
        return max((end - begin for begin, end in self.gaps()), default=0.0)


@dataclass(frozen=True)
class Difference:
    """Counts of tokens: never told though expected; told twice; told with another id, or beyond the expected end; told after a later
    one; told after the end."""

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


def difference_of(expected: Sequence[int], told: Told) -> Difference:
    """Of a request that failed, what it did not get is not lost: it was told so."""
    seen: dict[int, int] = {}
    doubled = swapped = 0
    furthest = -1
    for place, token_id, _ in told.tokens:
        if place in seen:
            doubled += 1
            continue
        swapped += place < furthest
        furthest = max(furthest, place)
        seen[place] = token_id
    changed = sum(not 0 <= place < len(expected) or expected[place] != token_id for place, token_id in seen.items())
    end = furthest + 1 if told.failed else len(expected)
    lost = sum(place not in seen for place in range(end))
    return Difference(lost, doubled, changed, swapped, told.num_late)


def expected_of(undisturbed: Iterable[Told]) -> tuple[dict[int, tuple[int, ...]], int]:
    """(number -> token ids, how many later answers to a number differ from its first). The latter must be 0 where numbers are strict."""
    expected: dict[int, tuple[int, ...]] = {}
    num_different = 0
    for told in undisturbed:
        if told.failed:
            continue
        first = expected.setdefault(told.number, tuple(came.token_id for came in told.tokens))
        num_different += difference_of(first, told).any
    return expected, num_different


class Tally:
    """How many answers have failed, or are not as expected, so far. `told` may grow; each is looked at once, when it has ended."""

    def __init__(self, expected: Mapping[int, Sequence[int]], told: Sequence[Told]) -> None:
        self._expected, self._told = expected, told
        self._num_taken = 0
        self._open: list[Told] = []
        self.num_ended = self.num_failed = self.num_wrong = 0

    def __str__(self) -> str:
        self._open += self._told[self._num_taken :]
        self._num_taken = len(self._told)
        ended = [told for told in self._open if told.finish_reason is not None or told.error is not None]
        self._open = [told for told in self._open if told.finish_reason is None and told.error is None]
        self.num_ended += len(ended)
        self.num_failed += sum(told.failed for told in ended)
        self.num_wrong += sum(difference_of(self._expected[told.number], told).any for told in ended if told.number in self._expected)
        return f"{self.num_failed} of {self.num_ended} requests failed, {self.num_wrong} answered wrongly"


def usual_gaps(undisturbed: Iterable[Told]) -> dict[int, float]:
    """number -> the median of the longest gaps of its answers."""
    gaps: dict[int, list[float]] = {}
    for told in undisturbed:
        if not told.failed:
            gaps.setdefault(told.number, []).append(told.longest_gap_seconds)
    return {number: statistics.median(each) for number, each in gaps.items()}


def extra_stalls(tolds: Iterable[Told], usual: Mapping[int, float], faults: Sequence[float] | None = None) -> list[float]:
    """For each request that was being answered within STALL_SECONDS after a fault: by how much its longest gap in that time was longer
    than its longest gap usually is; at least 0. None: of all requests and all their gaps, which shows how much is mere noise."""
    stalls = []
    for told in tolds:
        met = [end - begin for begin, end in told.gaps() if faults is None or _overlaps(begin, end, faults)]
        if met and told.number in usual:
            stalls.append(max(0.0, max(met) - usual[told.number]))
    return stalls


def _overlaps(begin: float, end: float, faults: Sequence[float]) -> bool:
    return any(end >= at and begin <= at + STALL_SECONDS for at in faults)


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of them do not exceed; nan for none."""
    if not values:
        return math.nan
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def throughput(tolds: Iterable[Told], begin: float, end: float) -> float:
    """Tokens per second that came in [begin, end)."""
    count = sum(begin <= came.at < end for told in tolds for came in told.tokens)
    return count / (end - begin) if end > begin else math.nan


def curve(tolds: Iterable[Told], begin: float, end: float, width: float = BIN_SECONDS) -> list[float]:
    """Tokens per second in bins of `width` seconds; what does not fill a bin at the end is left out."""
    num_bins = int((end - begin) / width + 1e-9)
    counts = Counter(int((came.at - begin) / width) for told in tolds for came in told.tokens if came.at >= begin)
    return [counts[place] / width for place in range(num_bins)]


class Window(NamedTuple):
    """A fault and the throughput around it, in tokens per second. `before` is nan when there was too little time before it."""

    seconds: float  # looked at after the fault
    after: float
    before: float


def windows(tolds: Sequence[Told], faults: Sequence[tuple[float, float]], begun: float, end: float) -> list[Window]:
    """`faults`: (when, when all was well again) in order. After: up to the next fault or the end. Before: from when all was well again
    after the fault before. Both at most WINDOW_SECONDS; a fault with too little time after it is left out."""
    found = []
    well = begun
    for number, (at, whole) in enumerate(faults):
        following = faults[number + 1][0] if number + 1 < len(faults) else math.inf
        until = min(at + WINDOW_SECONDS, following, end)
        since = max(well, at - WINDOW_SECONDS)
        well = max(well, at, whole if math.isfinite(whole) else at)
        if until - at >= SHORTEST_WINDOW_SECONDS:
            before = throughput(tolds, since, at) if at - since >= SHORTEST_WINDOW_SECONDS else math.nan
            found.append(Window(until - at, throughput(tolds, at, until), before))
    return found
