"""The seams: everything a run takes from the world, in one small object, so that virtual time can replace the world.

Here: Clock, Compute, Seams, and their real forms, and the memory a process takes, which no seed foretells. Not here: their simulated
forms (flowrt/simulation), which transports exist (transports/registry.py), how a process is started (flowrt/cluster). Every room
takes time, random numbers, ids, computing and transports from a Seams object given to it; a lint forbids `time`, `random`, `uuid`,
`threading`, `subprocess` elsewhere.
"""

from __future__ import annotations

import asyncio
import math
import random
import secrets
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from flowrt.process_backend import OpenBackend
from flowrt.process_status import (
    Activity,
    ProcessTimes,
    other_threads_want_processor,
    process_activity,
    process_times,
    thread_queued_seconds,
)
from flowrt.timer import Timer, new_timer
from flowrt.transports.contract import Transport
from flowrt.transports.registry import get_transport

T = TypeVar("T")

KEY_BYTES = 32  # of a run's key
INLINE_SECONDS = 200e-6  # a firing expected to be shorter than this costs more to hand over than to run on the loop
LONE_INLINE_SECONDS = 20e-3  # the same where the loop has nothing else to do meanwhile; beats and orders wait no longer than this
# A busy machine makes a call look longer than it is, never shorter: so what is expected falls at once, and rises by steps.
_WEIGHT_OF_SHORTER, _WEIGHT_OF_LONGER, _LONGEST_STEP = 0.5, 0.2, 4.0
_LONG_SECONDS = 5e-3  # a call this long is believed at once
# When a call counts as hung; docs/reliability.md says why so.
BOUND_SECONDS = 60.0  # of a call for which nothing is declared ...
_TIMES_LONGEST = 20.0  # ... or so many times what the longest of its label took, if that is more
STILL_SECONDS = 0.75  # computing needs a processor: who has not even wanted one for so long waits for something that does not come
FIRST_STILL_SECONDS = 5.0  # the first of a label may read from disks


class Clock(Protocol):
    """Time. `now` is monotonic and in seconds."""

    def now(self) -> float: ...
    async def sleep(self, seconds: float) -> None: ...


def _nobody() -> bool:
    return False


@dataclass(frozen=True)
class Running:
    """The operation computing now: what, since when (Clock.now), and the most it may take before it counts as hung.

    `computed_seconds` is a count of processor time that grows while it computes, and stands while it waits; None where there is no
    such count. It counts as hung too when that has stood for `still_seconds`, and at every look meanwhile `wants_processor` said no:
    on a busy machine one that computes may have to wait for its turn. `queued_seconds`: for how long its thread has waited for a
    processor so far, which extends its bound.
    """

    label: str
    since_seconds: float
    bound_seconds: float
    computed_seconds: float | None = None
    still_seconds: float = math.inf
    wants_processor: Callable[[], bool] = _nobody
    queued_seconds: float = 0.0


class Compute(Protocol):
    """Runs one call at a time, off the loop when it is long. Owned by one worker."""

    @property
    def running(self) -> Running | None:
        """What runs now, visible while it runs, so that a hung operation is told from a busy one."""
        ...

    def is_short(self, label: str) -> bool:
        """Whether a call with this label, made now, would run here and at once; then `run_inline` does the same without a coroutine."""
        ...

    def run_inline(self, label: str, call: Callable[[], T]) -> T:
        """As `run`, of a call that `is_short`."""
        ...

    async def run(self, label: str, call: Callable[[], T], bound_seconds: float | None = None) -> T:
        """The call's result; its exception is raised here. Calls with one `label` are expected to take alike.

        bound_seconds: for a call that may take long, or wait: the most it may take. None: it computes, and bounds are found for it.
        """
        ...

    async def aclose(self) -> None:
        """End the thread when the call in progress, if any, is over; `run` waits for that one. Idempotent."""
        ...


class RealClock:
    now = staticmethod(time.monotonic)

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


class ThreadCompute:
    """One thread; calls whose label has lately taken less than `inline_seconds` run on the loop instead."""

    beside_loop = True  # what a long call gives before its end may be sent meanwhile; where time is modelled it may not

    def __init__(self, name: str = "compute", inline_seconds: float = INLINE_SECONDS) -> None:
        self._inline_seconds = inline_seconds
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name, initializer=self._note_thread)
        self._clock: int | None = None  # of the thread's processor time
        self._thread_id = 0
        self._expected_seconds: dict[str, float] = {}
        self._longest_seconds: dict[str, float] = {}  # of calls in the thread
        self._label: str | None = None  # of what runs now
        self._since_seconds = 0.0
        self._bound_seconds: float | None = None

    @property
    def running(self) -> Running | None:
        label, clock, declared = self._label, self._clock, self._bound_seconds
        if label is None:
            return None
        if declared is not None:
            return Running(label, self._since_seconds, declared, queued_seconds=thread_queued_seconds(self._thread_id))
        return Running(
            label,
            self._since_seconds,
            max(BOUND_SECONDS, _TIMES_LONGEST * self._longest_seconds.get(label, 0.0)),
            None if clock is None else time.clock_gettime(clock),
            STILL_SECONDS if label in self._expected_seconds else FIRST_STILL_SECONDS,
            other_threads_want_processor,
            thread_queued_seconds(self._thread_id),
        )

    def is_short(self, label: str) -> bool:
        return self._label is None and self._expected_seconds.get(label, 1.0) < self._inline_seconds

    def run_inline(self, label: str, call: Callable[[], T]) -> T:
        if self._label is not None:
            raise RuntimeError(f"{label} while {self._label} runs: a worker computes one call at a time")
        self._bound_seconds, self._label = None, label
        start = self._since_seconds = time.monotonic()
        try:
            return call()
        finally:
            self._learn(label, time.monotonic() - start)
            self._label = None

    async def run(self, label: str, call: Callable[[], T], bound_seconds: float | None = None) -> T:
        short = self.is_short(label)
        self._begin(label, bound_seconds)
        try:
            if short:
                return self._timed(label, call)
            future = asyncio.wrap_future(self._executor.submit(self._timed, label, call))  # run_in_executor inspects the function each time
            cancelled: asyncio.CancelledError | None = None
            while not future.done():  # a thread cannot be stopped: leave only when it is done with our memory
                try:
                    await asyncio.wait([future])
                except asyncio.CancelledError as error:
                    cancelled = error
            if cancelled is not None:
                if not future.cancelled():
                    future.exception()  # looked at, so that nobody prints it: who cancelled does not ask how the call ended
                raise cancelled
            return future.result()
        finally:
            self._label = None

    async def aclose(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _note_thread(self) -> None:
        self._thread_id = threading.get_native_id()
        if hasattr(time, "pthread_getcpuclockid"):
            self._clock = time.pthread_getcpuclockid(threading.get_ident())

    def _begin(self, label: str, bound_seconds: float | None) -> None:
        if self._label is not None:
            raise RuntimeError(f"{label} while {self._label} runs: a worker computes one call at a time")
        self._bound_seconds, self._since_seconds, self._label = bound_seconds, time.monotonic(), label

    def _timed(self, label: str, call: Callable[[], T]) -> T:
        """Times the call itself, wherever it runs: the hand-over to the thread says nothing about the call."""
        start = time.monotonic()
        try:
            return call()
        finally:
            seconds = time.monotonic() - start
            self._learn(label, seconds)
            if seconds > self._longest_seconds.get(label, -1.0):
                self._longest_seconds[label] = seconds

    def _learn(self, label: str, seconds: float) -> None:
        expected = self._expected_seconds.get(label, seconds)
        if seconds > max(_LONG_SECONDS, self._inline_seconds):
            expected = seconds  # no outlier: on the loop, one more such call would be one too many
        elif seconds > expected:
            expected += _WEIGHT_OF_LONGER * (min(seconds, _LONGEST_STEP * expected) - expected)
        else:
            expected += _WEIGHT_OF_SHORTER * (seconds - expected)
        self._expected_seconds[label] = expected


def resident_bytes() -> int:
    """Memory of this process's own that lies in RAM: anonymous and shared memory; 0 where the system does not say.

    Pages of mapped files are left out: the libraries that a forked worker touches first are the fork server's, mapped once for all.
    Weights are never mapped (operators/weights.py), so they count.
    """
    try:
        with open("/proc/self/status") as file:
            lines = [line.split() for line in file]
    except OSError:
        return 0
    return sum(int(words[1]) << 10 for words in lines if words[0] in ("RssAnon:", "RssShmem:"))


@dataclass(frozen=True)
class Seams:
    """The world as one process sees it. `Seams()` is the real one."""

    clock: Clock = field(default_factory=RealClock)
    new_incarnation: Callable[[], str] = lambda: secrets.token_hex(4)
    new_seed: Callable[[], int] = lambda: secrets.randbits(63)
    new_key: Callable[[], bytes] = lambda: secrets.token_bytes(KEY_BYTES)
    new_compute: Callable[[str], Compute] = ThreadCompute
    own_loop: bool = False  # the loop serves one worker and nobody else
    transport: Callable[[str], Transport] = get_transport
    open_backend: OpenBackend | None = None  # of worker processes; None: that of this host, which only the launcher imports
    new_timer: Callable[[], Timer] = new_timer  # of the running loop; finer than the clock's sleep
    resident_bytes: Callable[[], int] = resident_bytes
    process_times: Callable[[int], ProcessTimes | None] = process_times  # of the process with this id
    process_activity: Callable[[int], Activity | None] = process_activity
    random: random.Random = field(default_factory=random.Random)  # for jitter and choices that need no replay
