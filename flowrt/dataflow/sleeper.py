"""The sleep of a runner that has nothing to run, until something wakes it or a selection policy wants to look again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from flowrt.seams import Clock
from flowrt.timer import Timer


class Sleeper:
    """`sleep(wake_at)` waits for `wake`, or until `wake_at` by `clock`. No wake-up is lost: the caller changes what the sleeper reads
    before it sleeps."""

    def __init__(self, clock: Clock, new_timer: Callable[[], Timer]) -> None:
        self._clock, self._new_timer = clock, new_timer
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
            alarm = timer.call_at(timer.now() + wake_at - self._clock.now(), self.wake)
        await self._future
        self._future = None
        if alarm is not None:
            alarm.cancel()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.close()
