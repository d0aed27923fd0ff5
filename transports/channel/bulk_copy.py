"""Who copies a payload: the loop itself, at once, or a copier beside it (xDeepServe sections 2.2 and 3.1: the cores move what is small,
the DMA engine, which takes longer to start, what is bulk).

Here: `threshold_bytes`, measured once in each process, and `Lanes`, the copiers of one direction of a channel. Not here: the threads and
their queues (_copier.c), what a lane's field means (ring.py). Used by ring_writer.py and shared_window.py.
"""

from __future__ import annotations

import os
import time
from functools import cache
from typing import TYPE_CHECKING

from flowrt.transports.contract import MAX_LANES

if TYPE_CHECKING:
    from flowrt.transports.native._words import Lane, Memory

MIN_BYTES, MAX_BYTES = 1 << 18, 1 << 22
WORTH = 8  # a copy that would keep the loop this many times as long as handing it over does
_PROBE_BYTES = 1 << 18
_NUM_PROBES = 5


class Lanes:
    """Copiers into one memory, lane by lane; in each lane copies are made and announced in order. Threads start at the first use."""

    def __init__(self, memory: Memory, fields: int, field_bytes: int, flag: int, num_lanes: int, wake_fd: int, own_fd: int) -> None:
        self._arguments = [(lane, memory, fields + lane * field_bytes, flag, wake_fd, own_fd) for lane in range(num_lanes)]
        self._lanes: list[Lane] = []
        self.num_lanes = num_lanes
        self._queued = [0] * num_lanes

    def copy(
        self, lane: int, offset: int, source: object, begin: int, nbytes: int, event: int, chunk: int, tail: int, tell: bool = False
    ) -> None:
        """Copy source[begin:][:nbytes] to `offset`, then announce (event, chunk, tail); see Lane.copy. OSError: no thread to be had."""
        if not self._lanes:
            from flowrt.transports.native._words import Lane

            self._lanes = [Lane(*arguments) for arguments in self._arguments]
        self._lanes[lane].copy(offset, source, begin, nbytes, event, chunk, tail, tell)
        self._queued[lane] += 1

    def ticket(self) -> list[int]:
        """What has been queued until now; `settled` says when it is done."""
        return list(self._queued)

    def settled(self, ticket: list[int]) -> bool:
        """Whether all copies up to `ticket` are done, so that their sources are their owners' again."""
        done = [queued - lane.collect() for queued, lane in zip(self._queued, self._lanes, strict=False)]
        return all(map(int.__ge__, done, ticket))

    def wait(self) -> None:
        """Block until all copies are done: at most as long as the copying takes."""
        for lane in self._lanes:
            lane.wait()

    def close(self) -> None:
        """Wait, and end the threads that nobody else uses."""
        for lane in self._lanes:
            lane.close()
        self._lanes = []
        self._arguments = []


@cache
def threshold_bytes() -> int:
    """From how many bytes on a copy is handed over, on this machine: where copying takes WORTH times as long as handing over."""
    from flowrt.transports.native._words import Lane, Memory

    memfd = os.memfd_create("flowrt-probe", os.MFD_CLOEXEC)
    try:
        os.posix_fallocate(memfd, 0, _PROBE_BYTES)
        memory = Memory(memfd, _PROBE_BYTES)
        lane = Lane(MAX_LANES - 1, memory, 0, 64, -1, -1)
    except OSError:
        return MAX_BYTES
    finally:
        os.close(memfd)
    source = bytes(_PROBE_BYTES // 2)
    copying = handing = float("inf")
    for _ in range(_NUM_PROBES):
        start = time.perf_counter()
        memory.fill(_PROBE_BYTES // 2, source)
        middle = time.perf_counter()
        lane.copy(128, source, 0, 0, 0, 0, 0, False)
        lane.wait()
        copying = min(copying, middle - start)
        handing = min(handing, time.perf_counter() - middle)
    lane.close()
    return int(max(MIN_BYTES, min(MAX_BYTES, WORTH * handing * len(source) / copying)))
