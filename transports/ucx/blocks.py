"""Implements `BlockPool`: reusable memory blocks that UCX writes into, so that they stay mapped and registered.

A block is whole pages of anonymous memory. A receiver takes one for a message's tensors and gives its user a *lease* on it. The block
returns to the pool when the last view of the lease is freed, on any thread. Sizes are rounded up to eighths of a power of two, so that a
block fits many messages. The pool keeps at most `idle_bytes` of unused blocks.
"""

from __future__ import annotations

import mmap
import weakref
from collections import deque
from typing import TypeAlias

Block: TypeAlias = mmap.mmap

SMALLEST_BYTES = 1 << 16


def block_bytes(nbytes: int) -> int:
    """Returns the block size for `nbytes`: at most an eighth more, and at least SMALLEST_BYTES."""
    if nbytes <= SMALLEST_BYTES:
        return SMALLEST_BYTES
    step = 1 << (nbytes - 1).bit_length() - 4
    return -(-nbytes // step) * step


class BlockPool:
    """The blocks of one channel. Only one thread may use the pool, but leases may end on any thread."""

    def __init__(self, idle_bytes: int) -> None:
        self._max_idle_bytes = idle_bytes
        self._idle_bytes = 0
        self._idle: dict[int, list[Block]] = {}
        self._ended: deque[Block] = deque()  # blocks of ended leases, appended by any thread
        self._leases: dict[int, weakref.ref[object]] = {}
        self._closed = False

    @property
    def num_leases(self) -> int:
        """The number of leases in use."""
        return len(self._leases)

    def take(self, nbytes: int) -> Block:
        """Returns a block of at least `nbytes` bytes with undefined content."""
        while self._ended:
            self.give_back(self._ended.popleft())
        size = block_bytes(nbytes)
        idle = self._idle.get(size)
        if idle:
            self._idle_bytes -= size
            return idle.pop()
        return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)

    def give_back(self, block: Block) -> None:
        """Returns a block to the pool, which keeps it unless `idle_bytes` would be exceeded."""
        size = len(block)
        if not self._closed and self._idle_bytes + size <= self._max_idle_bytes:
            self._idle_bytes += size
            self._idle.setdefault(size, []).append(block)

    def lease(self, block: Block) -> memoryview:
        """Returns a lease on all of `block`; the block returns to the pool when the last view of the lease is freed."""
        import numpy as np  # UCX's own Python package needs it too

        array = np.frombuffer(block, np.uint8)
        number = id(array)

        def end(_: object) -> None:
            self._leases.pop(number, None)
            self._ended.append(block)

        self._leases[number] = weakref.ref(array, end)
        view: memoryview = memoryview(array)  # type: ignore[arg-type, unused-ignore]  # missing in numpy's stubs for Python 3.11
        return view

    def close(self) -> None:
        """Frees all idle blocks and keeps no more. Leases stay valid until their last view is freed."""
        self._closed = True
        self._idle.clear()
        self._ended.clear()
        self._idle_bytes = 0
