"""Copies bulk payloads on copy threads, and measures from which size a copy thread pays off.

The event loop copies smaller payloads itself. xDeepServe (sections 2.2 and 3.1) splits the work likewise: the cores copy small payloads,
and the DMA engine, which takes longer to start, copies bulk payloads.
"""

from __future__ import annotations

import os
import time
from functools import cache
from typing import TYPE_CHECKING

from flowrt.transports.contract import MAX_COPY_THREADS

if TYPE_CHECKING:
    from flowrt.transports.native._words import CopyThread, Memory

MIN_BYTES, MAX_BYTES = 1 << 18, 1 << 22
WORTH = 8  # a copy goes to a thread when it takes this many times as long as queueing it
_PROBE_BYTES = 1 << 18
_NUM_PROBES = 5


class CopyThreads:
    """The copy threads of one memory. Each thread makes and announces its copies in order. The threads start at the first copy."""

    def __init__(self, memory: Memory, fields: int, field_bytes: int, flag: int, num_copy_threads: int, wake_fd: int, own_fd: int) -> None:
        self._arguments = [(thread, memory, fields + thread * field_bytes, flag, wake_fd, own_fd) for thread in range(num_copy_threads)]
        self._copy_threads: list[CopyThread] = []
        self.num_copy_threads = num_copy_threads
        self._queued = [0] * num_copy_threads

    def start(self) -> None:
        """Raises OSError when no thread can start. Idempotent; `copy` calls it, too."""
        if not self._copy_threads:
            from flowrt.transports.native._words import CopyThread

            self._copy_threads = [CopyThread(*arguments) for arguments in self._arguments]

    def copy(
        self, thread: int, offset: int, source: object, begin: int, nbytes: int, event: int, chunk: int, tail: int, announce: bool = False
    ) -> None:
        """Queues a copy of source[begin:][:nbytes] to `offset`, announced afterwards as (event, chunk, tail). Raises OSError when no
        thread can start."""
        self.start()
        self._copy_threads[thread].copy(offset, source, begin, nbytes, event, chunk, tail, announce)
        self._queued[thread] += 1

    def ticket(self) -> list[int]:
        """Returns the copies queued so far, per thread, as the argument of `settled`."""
        return list(self._queued)

    def settled(self, ticket: list[int]) -> bool:
        """Whether all copies up to `ticket` are complete, so that their sources may change again."""
        done = [queued - thread.collect() for queued, thread in zip(self._queued, self._copy_threads, strict=False)]
        return all(map(int.__ge__, done, ticket))

    def wait(self) -> None:
        """Blocks until all queued copies are complete."""
        for thread in self._copy_threads:
            thread.wait()

    def close(self) -> None:
        """Waits for all copies, then ends the threads that no other channel shares."""
        for thread in self._copy_threads:
            thread.close()
        self._copy_threads = []
        self._arguments = []


@cache
def threshold_bytes() -> int:
    """Returns the payload size in bytes from which copying takes WORTH times as long as queueing the copy, measured once per process."""
    from flowrt.transports.native._words import CopyThread, Memory

    memfd = os.memfd_create("flowrt-probe", os.MFD_CLOEXEC)
    try:
        os.posix_fallocate(memfd, 0, _PROBE_BYTES)
        memory = Memory(memfd, _PROBE_BYTES)
        thread = CopyThread(MAX_COPY_THREADS - 1, memory, 0, 64, -1, -1)
    except OSError:
        return MAX_BYTES
    finally:
        os.close(memfd)
    source = bytes(_PROBE_BYTES // 2)
    copying = queueing = float("inf")
    for _ in range(_NUM_PROBES):
        start = time.perf_counter()
        memory.fill(_PROBE_BYTES // 2, source)
        middle = time.perf_counter()
        thread.copy(128, source, 0, 0, 0, 0, 0, False)
        thread.wait()
        copying = min(copying, middle - start)
        queueing = min(queueing, time.perf_counter() - middle)
    thread.close()
    return int(max(MIN_BYTES, min(MAX_BYTES, WORTH * queueing * len(source) / copying)))
