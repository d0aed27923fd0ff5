"""Keeps pauses out of the steps of a worker (xDeepServe section 4.4): cores of its own, and garbage collected while it waits.

Both are options of the graph file, for processes with one worker.
"""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Callable, Collection
from typing import NoReturn

from flowrt.seams import Clock

POLL_SECONDS = 0.05
MIN_ALLOCATED = 2_000  # objects that were made and not freed since the latest collection; fewer are not worth a search
MAX_ALLOCATED = 200_000  # with so many, a process that is never idle collects too


def bind_to_cores(cores: Collection[int]) -> None:
    """Let all threads of this process run on these cores only, also those that it starts later."""
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
            os.sched_setaffinity(int(thread), cores)


def is_collection_due(num_allocated: int, is_idle: bool) -> bool:
    return num_allocated >= (MIN_ALLOCATED if is_idle else MAX_ALLOCATED)


async def collect_garbage_when_idle(is_idle: Callable[[], bool], clock: Clock) -> NoReturn:
    """Take Python's own collections over until cancelled. Objects that exist now are not searched again: they stay in use."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        while True:
            await clock.sleep(POLL_SECONDS)
            if is_collection_due(gc.get_count()[0], is_idle()):
                gc.collect()
    finally:
        gc.enable()
