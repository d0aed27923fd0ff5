"""Emulated time: computing that takes its modelled time, and how far reality kept to the model.

Here: EmulatedCompute, Lateness (counts of one worker), `judge` (what the counts mean for a run's figures) and the rule for the smallest
dilation. Not here: links (transports/emulation/channel.py), what a graph charges for what (flowrt/workers/emulated.py). A leaf.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from flowrt.errors import UserError
from flowrt.observe import duration_text
from flowrt.seams import BOUND_SECONDS, Compute, Running
from flowrt.timer import Timer

T = TypeVar("T")

TIMES_ITS_ERROR = 20  # every modelled time is at least so many times what a wait is off by
TOLERANCE = 1 / TIMES_ITS_ERROR  # of its own length by which a wait may be late
MAX_LATE_SHARE = 0.01  # of the computations, or of the messages, of a run whose figures hold


@dataclass
class Lateness:
    """Counts of one kind of wait. `worst_seconds` is the most by which one was late, beyond what it may be; all times are real ones."""

    num: int = 0
    num_late: int = 0
    worst_seconds: float = 0.0
    modelled_seconds: float = 0.0  # of all together

    def note(self, modelled_seconds: float, late_seconds: float) -> None:
        """One that was to take `modelled_seconds` (dilated) ended `late_seconds` after that."""
        self.num += 1
        self.modelled_seconds += modelled_seconds
        beyond = late_seconds - TOLERANCE * modelled_seconds
        if beyond > 0:
            self.num_late += 1
            self.worst_seconds = max(self.worst_seconds, beyond)


class EmulationStatistics(msgspec.Struct, frozen=True):
    """How far one worker kept to its model: computations and received messages, how many of each were late and by how much at most
    beyond what is allowed; how long its computations were to take, and how long it computed what has no modelled time. Real seconds."""

    num_computed: int = 0
    num_computed_late: int = 0
    worst_computed_seconds: float = 0.0
    num_delivered: int = 0
    num_delivered_late: int = 0
    worst_delivered_seconds: float = 0.0
    modelled_seconds: float = 0.0
    free_seconds: float = 0.0

    @property
    def free_share(self) -> float:
        """Of the time that this worker computed; 0.0 when nothing is modelled."""
        return self.free_seconds / (self.free_seconds + self.modelled_seconds) if self.modelled_seconds else 0.0


class EmulatedCompute:
    """`inner`, but what a call charges is how long it takes: the call runs, then waits until `charged x dilation` after its start.

    A call that took longer than that is late. `charging`: the labels whose calls may charge; they are never short. A call that charges
    nothing takes the time it takes, which is added to `free_seconds`.
    """

    def __init__(self, inner: Compute, timer: Timer, dilation: float, charging: Collection[str]) -> None:
        self.lateness = Lateness()
        self.free_seconds = 0.0
        self._inner, self._timer, self._dilation = inner, timer, dilation
        self._charging = frozenset(charging)
        self._charged = 0.0
        self._waiting: Running | None = None

    def charge(self, seconds: float) -> None:
        """To be called within a call, from whatever thread it runs in: its modelled time grows by `seconds`."""
        self._charged += seconds

    @property
    def running(self) -> Running | None:
        return self._inner.running or self._waiting

    def is_short(self, label: str) -> bool:
        return label not in self._charging and self._waiting is None and self._inner.is_short(label)

    def run_inline(self, label: str, call: Callable[[], T]) -> T:
        start = self._timer.now()
        try:
            return self._inner.run_inline(label, call)
        finally:
            self._was_free(start)

    async def run(self, label: str, call: Callable[[], T], bound_seconds: float | None = None) -> T:
        if self._waiting is not None:
            raise RuntimeError(f"{label} while {self._waiting.label} runs: a worker computes one call at a time")
        self._charged = 0.0
        start = self._timer.now()
        result = await self._inner.run(label, call, bound_seconds)
        modelled = self._charged * self._dilation
        if not modelled:
            self._was_free(start)
            return result
        self._waiting = Running(label, start, (bound_seconds or BOUND_SECONDS) + modelled)
        try:
            await self._timer.wait_until(start + modelled)
        finally:
            self._waiting = None
        self.lateness.note(modelled, self._timer.now() - start - modelled)
        return result

    async def aclose(self) -> None:
        await self._inner.aclose()

    def _was_free(self, start: float) -> None:
        if self.lateness.num:  # else: loading, or a worker of which nothing is modelled
            self.free_seconds += self._timer.now() - start


@dataclass(frozen=True)
class Account:
    """An emulated run: how many waits, how many late, and whether its figures are void, with the sentences for people."""

    dilation: float
    num_computed: int = 0
    num_computed_late: int = 0
    num_delivered: int = 0
    num_delivered_late: int = 0
    worst_late_seconds: float = 0.0  # beyond what is allowed
    free_share: float = 0.0  # the largest of a worker
    void: bool = False
    sentences: tuple[str, ...] = ()


def judge(dilation: float, workers: Iterable[EmulationStatistics]) -> Account:
    """What the counts of all workers come to.

    The dilation is chosen so that waits are off by a twentieth of themselves at most, but for the odd one on a busy machine. A run in
    which more than one in a hundred computations, or messages, was later than that was slower than its model: its figures are void. So
    they are when a worker spent more than a twentieth of its computing on what has no modelled time.
    """
    workers = list(workers)
    kinds = (
        ("computation", [(each.num_computed, each.num_computed_late, each.worst_computed_seconds) for each in workers]),
        ("message", [(each.num_delivered, each.num_delivered_late, each.worst_delivered_seconds) for each in workers]),
    )
    counts, sentences, void, worst = [], [], False, 0.0
    for name, told in kinds:
        num, num_late = sum(each[0] for each in told), sum(each[1] for each in told)
        counts += [num, num_late]
        if num_late:
            latest = max(each[2] for each in told)
            worst = max(worst, latest)
            void = void or num_late > MAX_LATE_SHARE * num
            how = "took longer than modelled" if name == "computation" else "came later than modelled"
            sentences.append(f"{num_late} of {num} {name}s {how}, by up to {duration_text(latest)} more than the twentieth that is allowed")
    free_share = max((each.free_share for each in workers), default=0.0)
    if free_share > TOLERANCE:
        void = True
        sentences.append(f"a worker spent {100 * free_share:.0f} % of its computing on what has no modelled time (embedding, head)")
    if void:
        sentences.append("reality was slower than the model: the figures of this run are VOID; raise emulate.dilation")
    elif sentences:
        sentences.append("these are at most one in a hundred of their kind: the figures hold")
    computed, computed_late, delivered, delivered_late = counts
    return Account(dilation, computed, computed_late, delivered, delivered_late, worst, free_share, void, tuple(sentences))


def smallest_dilation(modelled_seconds: Mapping[str, float], error_seconds: float) -> tuple[float, str]:
    """The smallest dilation at which each of the times is TIMES_ITS_ERROR times `error_seconds`, rounded up to two digits, and the
    name of the time that asks for it. Times are above 0. (1.0, "") when there are none."""
    if not modelled_seconds:
        return 1.0, ""
    name, shortest = min(modelled_seconds.items(), key=lambda item: item[1])
    return max(1.0, _up_to_two_digits(TIMES_ITS_ERROR * error_seconds / shortest)), name


def check_dilation(dilation: float, modelled_seconds: Mapping[str, float], error_seconds: float) -> None:
    """Raises UserError, naming the smallest allowed, when `dilation` is too small for a machine whose waits are off by that much."""
    smallest, name = smallest_dilation(modelled_seconds, error_seconds)
    if dilation < smallest:
        shortest = duration_text(modelled_seconds[name])
        raise UserError(
            f"emulate.dilation: {dilation:g} is too small here; write {smallest:g} or more: {name} is {shortest}, a wait on this machine "
            f"is off by {duration_text(error_seconds)}, and every modelled time must be {TIMES_ITS_ERROR} times that"
        )


def _up_to_two_digits(number: float) -> float:
    if number <= 0:
        return 0.0
    unit = 10.0 ** (math.floor(math.log10(number)) - 1)
    return round(math.ceil(number / unit - 1e-9) * unit, 12)
