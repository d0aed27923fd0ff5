"""Emulates compute time: makes each call take its modelled time, counts late calls, and decides whether a run's figures are valid.

EmulatedCompute makes calls last, Lateness counts late waits, `emulation_report` evaluates the counts of a run, and `smallest_dilation`
holds the rule for the dilation. Emulated links are in transports/emulation/channel.py; flowrt/workers/emulated.py charges the times of a
graph.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from flowrt.errors import UserError
from flowrt.observe import duration_text
from flowrt.seams import BOUND_SECONDS, Compute, Running
from flowrt.timer import Timer

T = TypeVar("T")

TIMES_ITS_ERROR = 20  # every modelled time must be at least this many times the error of a wait
TOLERANCE = 1 / TIMES_ITS_ERROR  # the allowed lateness of a wait, as a share of its length
MAX_LATE_SHARE = 0.01  # the maximum share of late computations, or messages, of a valid run


@dataclass
class Lateness:
    """Counts of one kind of wait. `worst_seconds` is the largest lateness beyond the allowed one. All times are real seconds (dilated)."""

    num: int = 0
    num_late: int = 0
    worst_seconds: float = 0.0
    modelled_seconds: float = 0.0  # the sum over all waits

    def note(self, modelled_seconds: float, late_seconds: float) -> None:
        """Count a wait of `modelled_seconds` (dilated) that ended `late_seconds` after its modelled end."""
        self.num += 1
        self.modelled_seconds += modelled_seconds
        beyond = late_seconds - TOLERANCE * modelled_seconds
        if beyond > 0:
            self.num_late += 1
            self.worst_seconds = max(self.worst_seconds, beyond)


class EmulationStatistics(msgspec.Struct, frozen=True):
    """The lateness of one worker's computations and received messages, and its real seconds of computing without a modelled time."""

    computed: Lateness = msgspec.field(default_factory=Lateness)
    delivered: Lateness = msgspec.field(default_factory=Lateness)
    free_seconds: float = 0.0

    @property
    def free_share(self) -> float:
        """The share of this worker's compute time that has no modelled time; 0.0 when nothing is modelled."""
        modelled = self.computed.modelled_seconds
        return self.free_seconds / (self.free_seconds + modelled) if modelled else 0.0


class EmulatedCompute:
    """Runs calls in `inner` and makes each last as long as it charges: a call ends `charged x dilation` after its start.

    A call that computes for longer is late. `charging` are the labels whose calls may charge; they are never short. A call that charges
    nothing is not delayed, and its time is added to `free_seconds`. Outputs that leave a call before its end do so when the time of what
    it had charged until then has passed.
    """

    beside_loop = True

    def __init__(self, inner: Compute, timer: Timer, dilation: float, charging: Collection[str]) -> None:
        self.lateness = Lateness()
        self.free_seconds = 0.0
        self.inner, self._timer, self._dilation = inner, timer, dilation
        self._charging = frozenset(charging)
        self._charged = 0.0
        self._waiting: Running | None = None
        self._start = 0.0  # of the call in progress
        self._held: deque[tuple[float, Callable[[], object]]] = deque()  # seconds from its start, and what to call then
        self._held_late = 0.0  # the worst lateness of these

    def charge(self, seconds: float) -> None:
        """Add `seconds` of a healthy device to the modelled time of the call in progress. Called within that call, in any thread."""
        self._charged += seconds * self.inner.slowness

    @property
    def charged_seconds(self) -> float:
        """What the call in progress has charged so far, dilated."""
        return self._charged * self._dilation

    def at_modelled_time(self, function: Callable[[T], object]) -> Callable[[T], None]:
        """A function that the call in progress may call, in any thread: `function` is called with its argument on the loop, when the
        modelled time of what the call has charged so far has passed, and no later than the call's end."""
        loop = asyncio.get_running_loop()

        def hold(argument: T) -> None:
            self._held.append((self.charged_seconds, lambda: function(argument)))
            loop.call_soon_threadsafe(self._release_due)

        return hold

    def _release_due(self) -> None:
        """Call what is due, and set an alarm for the next."""
        while self._held:
            due = self._start + self._held[0][0]
            if due > self._timer.now():
                self._timer.call_at(due, self._release_due)
                return
            self._release()

    def _release(self) -> None:
        seconds, call = self._held.popleft()
        self._held_late = max(self._held_late, self._timer.now() - self._start - seconds)
        call()

    @property
    def running(self) -> Running | None:
        return self.inner.running or self._waiting

    @property
    def slowness(self) -> float:
        return self.inner.slowness

    def is_short(self, label: str) -> bool:
        return label not in self._charging and self._waiting is None and self.inner.is_short(label)

    def run_inline(self, label: str, call: Callable[[], T]) -> T:
        self._charged = 0.0
        start = self._timer.now()
        try:
            return self.inner.run_inline(label, call)
        finally:
            self._was_free(start)

    async def run(self, label: str, call: Callable[[], T], bound_seconds: float | None = None) -> T:
        if self._waiting is not None:
            raise RuntimeError(f"{label} while {self._waiting.label} runs: a worker computes one call at a time")
        self._charged = self._held_late = 0.0
        start = self._start = self._timer.now()
        try:
            result = await self.inner.run(label, call, bound_seconds)
            modelled = self.charged_seconds
            if not modelled:
                self._was_free(start)
                return result
            self._waiting = Running(label, start, (bound_seconds or BOUND_SECONDS) + modelled)
            try:
                await self._timer.wait_until(start + modelled)
            finally:
                self._waiting = None
            ended = self._timer.now() - start - modelled
        except asyncio.CancelledError:  # the worker ends
            self._held.clear()
            raise
        finally:
            while self._held:  # before what follows the call
                self._release()
        self.lateness.note(modelled, max(ended, self._held_late))
        return result

    async def aclose(self) -> None:
        await self.inner.aclose()

    def _was_free(self, start: float) -> None:
        if self.lateness.num:  # else: the worker is loading, or none of its computing is modelled
            self.free_seconds += self._timer.now() - start


@dataclass(frozen=True)
class EmulationReport:
    """Lateness of a run: counts of waits and late waits, whether the figures are void, and sentences for the user."""

    dilation: float
    num_computed: int = 0
    num_computed_late: int = 0
    num_delivered: int = 0
    num_delivered_late: int = 0
    worst_late_seconds: float = 0.0  # beyond the allowed lateness
    free_share: float = 0.0  # the largest share of any worker
    void: bool = False
    sentences: tuple[str, ...] = ()


def emulation_report(dilation: float, workers: Iterable[EmulationStatistics]) -> EmulationReport:
    """Decide from the counts of all workers whether the figures of a run are void.

    They are void when more than MAX_LATE_SHARE of the computations, or of the messages, ended late by more than TOLERANCE of their length:
    the run was slower than its model. The dilation is chosen so that waits are less late than that, except for a few on a busy machine.
    They are void too when a worker spent more than TOLERANCE of its compute time on computing that has no modelled time.
    """
    workers = list(workers)
    computed, delivered = _total(each.computed for each in workers), _total(each.delivered for each in workers)
    sentences, void = [], False
    for name, how, total in (("computation", "took longer", computed), ("message", "came later", delivered)):
        if total.num_late:
            void = void or total.num_late > MAX_LATE_SHARE * total.num
            worst = duration_text(total.worst_seconds)
            text = f"{total.num_late} of {total.num} {name}s {how} than modelled"
            sentences.append(f"{text}, by up to {worst} more than the twentieth that is allowed")
    free_share = max((each.free_share for each in workers), default=0.0)
    if free_share > TOLERANCE:
        void = True
        sentences.append(f"a worker spent {100 * free_share:.0f} % of its computing on what has no modelled time (embedding, head)")
    if void:
        hint = f"raise emulate.dilation above {dilation:g} (flowrt doctor --graph FILE prints the smallest), or close other programs"
        sentences.append(f"reality was slower than the model: the figures of this run are VOID; {hint}")
    elif sentences:
        sentences.append("these are at most one in a hundred of their kind: the figures hold")
    worst_seconds = max(computed.worst_seconds, delivered.worst_seconds)
    return EmulationReport(
        dilation, computed.num, computed.num_late, delivered.num, delivered.num_late, worst_seconds, free_share, void, tuple(sentences)
    )


def _total(parts: Iterable[Lateness]) -> Lateness:
    total = Lateness()
    for part in parts:
        total.num += part.num
        total.num_late += part.num_late
        total.worst_seconds = max(total.worst_seconds, part.worst_seconds)
        total.modelled_seconds += part.modelled_seconds
    return total


def smallest_dilation(modelled_seconds: Mapping[str, float], error_seconds: float) -> tuple[float, str]:
    """The smallest dilation at which each time is at least TIMES_ITS_ERROR times `error_seconds`, and the name of the shortest time.

    The dilation is rounded up to two digits. All times must be above 0. Returns (1.0, "") when there are none.
    """
    if not modelled_seconds:
        return 1.0, ""
    name, shortest = min(modelled_seconds.items(), key=lambda item: item[1])
    return max(1.0, _up_to_two_digits(TIMES_ITS_ERROR * error_seconds / shortest)), name


def check_dilation(dilation: float, modelled_seconds: Mapping[str, float], error_seconds: float) -> None:
    """Raises UserError with the smallest allowed dilation when `dilation` is too small for waits with an error of `error_seconds`."""
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
