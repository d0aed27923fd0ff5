"""Timers with a finer resolution than the event loop's millisecond, for waits that model a duration.

FineTimer uses timerfd (Linux). LoopTimer uses the event loop's timer, on other systems and in virtual time. `new_timer` picks one, and
`measure_lateness` measures it. No timer spins: a wait costs one wake-up.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import heapq
import os
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable

_CLOCK_MONOTONIC, _ABSOLUTE = 1, 1  # TFD_TIMER_ABSTIME
_FLAGS = os.O_NONBLOCK | getattr(os, "O_CLOEXEC", 0)  # TFD_NONBLOCK, TFD_CLOEXEC


class Alarm:
    """A scheduled call of `callback`; `cancel` drops it. `is_over` is true once it was called or cancelled."""

    __slots__ = ("callback", "is_over")

    def __init__(self, callback: Callable[[], object]) -> None:
        self.callback = callback
        self.is_over = False

    def cancel(self) -> None:
        self.is_over = True

    def call(self) -> None:
        if not self.is_over:
            self.is_over = True
            self.callback()


class Timer(ABC):
    """Schedules calls in the event loop, never early. `now` is the machine's monotonic clock in seconds, the same in every process."""

    @abstractmethod
    def now(self) -> float: ...

    @abstractmethod
    def call_at(self, when: float, callback: Callable[[], object]) -> Alarm: ...

    async def wait_until(self, when: float) -> None:
        """Wait until `when`; return at once if that is in the past. Cancelling it cancels its alarm."""
        if when <= self.now():
            return
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        alarm = self.call_at(when, lambda: None if done.done() else done.set_result(None))
        try:
            await done
        finally:
            alarm.cancel()

    @abstractmethod
    def close(self) -> None: ...


class FineTimer(Timer):
    """A timerfd timer of the running loop, until `close`. It uses one descriptor for all scheduled calls. OSError: no timerfd."""

    def __init__(self) -> None:
        if sys.platform != "linux" or not hasattr(library := ctypes.CDLL(None, use_errno=True), "timerfd_create"):
            raise OSError("this system has no timerfd")
        self._settime = library.timerfd_settime
        self._fd: int = library.timerfd_create(_CLOCK_MONOTONIC, _FLAGS)
        if self._fd < 0:
            raise OSError(ctypes.get_errno(), "no timerfd")
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._fd, self._ring)
        self._alarms: list[tuple[float, int, Alarm]] = []  # heap
        self._count = 0
        self._set_seconds = 0.0  # when the descriptor expires; 0: never
        self._value = (ctypes.c_long * 4)()  # struct itimerspec: interval, then first expiry

    def now(self) -> float:
        return time.monotonic()

    def call_at(self, when: float, callback: Callable[[], object]) -> Alarm:
        alarm = Alarm(callback)
        self._count += 1
        heapq.heappush(self._alarms, (when, self._count, alarm))
        self._arm()
        return alarm

    def close(self) -> None:
        """Drop the scheduled calls and close the descriptor. Idempotent."""
        if self._fd >= 0:
            self._alarms.clear()
            with contextlib.suppress(RuntimeError):  # the loop was closed before
                self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1

    def _arm(self) -> None:
        alarms = self._alarms
        while alarms and alarms[0][2].is_over:
            heapq.heappop(alarms)
        when = alarms[0][0] if alarms else 0.0
        if when == self._set_seconds or not alarms or self._fd < 0:
            return  # one wake-up too many costs less than disarming the descriptor
        self._set_seconds = when
        nanoseconds = max(1, round(when * 1e9))
        self._value[2], self._value[3] = nanoseconds // 1_000_000_000, nanoseconds % 1_000_000_000
        self._settime(self._fd, _ABSOLUTE, self._value, None)

    def _ring(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._fd, 8)
        self._set_seconds = 0.0
        alarms = self._alarms
        while alarms and (alarms[0][2].is_over or alarms[0][0] <= time.monotonic()):
            heapq.heappop(alarms)[2].call()
        self._arm()


class LoopTimer(Timer):
    """Uses the running loop's timer. Its resolution is the loop's: a millisecond, or exact in virtual time."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()

    def now(self) -> float:
        return self._loop.time()

    def call_at(self, when: float, callback: Callable[[], object]) -> Alarm:
        alarm = Alarm(callback)
        self._loop.call_at(when, self._ring, when, alarm)
        return alarm

    def _ring(self, when: float, alarm: Alarm) -> None:
        if self._loop.time() < when and not alarm.is_over:  # a loop may round down
            self._loop.call_later(1e-3, self._ring, when, alarm)
        else:
            alarm.call()

    def close(self) -> None:
        """Has nothing to close."""


class Sleeper:
    """`sleep(wake_at)` waits for `wake`, or until `now()` is `wake_at`. No wake-up is lost: the caller changes what the sleeper reads
    before it sleeps."""

    def __init__(self, now: Callable[[], float], new_timer: Callable[[], Timer]) -> None:
        self._now, self._new_timer = now, new_timer
        self._future: asyncio.Future[None] | None = None
        self._timer: Timer | None = None

    def wake(self) -> None:
        future = self._future
        if future is not None and not future.done():
            future.set_result(None)

    async def sleep(self, wake_at: float | None) -> None:
        self._future = asyncio.get_running_loop().create_future()
        alarm = None
        if wake_at is not None:
            timer = self._timer = self._timer or self._new_timer()
            alarm = timer.call_at(timer.now() + wake_at - self._now(), self.wake)
        await self._future
        self._future = None
        if alarm is not None:
            alarm.cancel()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.close()


def new_timer() -> Timer:
    """The finest timer of this system, for the running loop. The caller closes it."""
    try:
        return FineTimer()
    except (OSError, NotImplementedError):
        return LoopTimer()


async def measure_lateness(timer: Timer, num_blocks: int = 8, num_waits: int = 30, wait_seconds: float = 250e-6) -> list[float]:
    """Measure how late waits end on this machine: the 95th percentile of each block of waits in seconds, sorted.

    The first value is the machine at its quietest during the measurement, the last value is the machine under the most other load.
    """
    blocks = []
    for _ in range(num_blocks):
        late = []
        for _ in range(num_waits):
            due = timer.now() + wait_seconds
            await timer.wait_until(due)
            late.append(timer.now() - due)
        blocks.append(sorted(late)[min(num_waits - 1, int(0.95 * num_waits))])
    return sorted(blocks)
