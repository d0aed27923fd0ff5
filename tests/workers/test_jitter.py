"""What keeps pauses out of the steps of a worker: collections while it waits, and cores of its own."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
import weakref

import pytest

from flowrt.workers.process import MAX_ALLOCATED, MIN_ALLOCATED, bind_to_cores, collect_garbage_when_idle, is_collection_due


class Ring:
    """Garbage that only a collection finds."""

    def __init__(self) -> None:
        self.itself = self


class StepClock:
    """`sleep` returns when `step` is called."""

    def __init__(self) -> None:
        self._turn = asyncio.Semaphore(0)
        self.sleeping = asyncio.Event()

    def now(self) -> float:
        return 0.0

    async def sleep(self, seconds: float) -> None:
        self.sleeping.set()
        await self._turn.acquire()

    async def step(self) -> None:
        self.sleeping.clear()
        self._turn.release()
        await self.sleeping.wait()


@pytest.mark.parametrize(
    ("num_allocated", "is_idle", "due"),
    [(MIN_ALLOCATED - 1, True, False), (MIN_ALLOCATED, True, True), (MAX_ALLOCATED - 1, False, False), (MAX_ALLOCATED, False, True)],
)
def test_a_busy_process_collects_only_when_much_was_allocated(num_allocated: int, is_idle: bool, due: bool) -> None:
    assert is_collection_due(num_allocated, is_idle) is due


async def test_garbage_is_collected_while_the_process_is_idle() -> None:
    clock, idle = StepClock(), False
    collecting = asyncio.create_task(collect_garbage_when_idle(lambda: idle, clock))
    await clock.sleeping.wait()
    try:
        assert not gc.isenabled()
        ring = weakref.ref(Ring())
        kept = [[] for _ in range(2 * MIN_ALLOCATED)]
        await clock.step()
        assert ring() is not None, "the process computes"
        idle = True
        await clock.step()
        assert ring() is None
        assert len(kept) == 2 * MIN_ALLOCATED
    finally:
        collecting.cancel()
        await asyncio.wait([collecting])
        gc.unfreeze()
    assert gc.isenabled()


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system binds no process to cores")
def test_all_threads_of_a_process_get_its_cores() -> None:
    before, core = os.sched_getaffinity(0), max(os.sched_getaffinity(0))
    started, end, found = threading.Event(), threading.Event(), []

    def wait() -> None:
        started.set()
        end.wait()
        found.append(os.sched_getaffinity(0))

    thread = threading.Thread(target=wait)
    thread.start()
    started.wait()
    try:
        bind_to_cores((core,))
        end.set()
        thread.join()
        assert found == [{core}]
        assert os.sched_getaffinity(0) == {core}
    finally:
        end.set()
        bind_to_cores(before)
