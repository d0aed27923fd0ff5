"""`BlockPool`: memory that UCX writes into, in blocks that are reused, so that they stay mapped and registered.

A block is whole pages of anonymous memory. A receiver takes one for a message's tensors and gives its user a *lease* on it. The block
returns to the pool when the last view of the lease is freed, on whatever thread that happens. Sizes are rounded up to eighths of a power
of two, so that a block fits many messages; at most `idle_bytes` are kept unused.
"""

from __future__ import annotations

import mmap
import weakref
from collections import deque
from typing import TypeAlias

Block: TypeAlias = mmap.mmap

SMALLEST_BYTES = 1 << 16


def block_bytes(nbytes: int) -> int:
    """The size of the block for `nbytes`: at least as much, and at most an eighth more (but a smallest size)."""
    if nbytes <= SMALLEST_BYTES:
        return SMALLEST_BYTES
    step = 1 << (nbytes - 1).bit_length() - 4
    return -(-nbytes // step) * step


class BlockPool:
    """Blocks of one channel. Not shared between threads, but for leases that end on another one."""

    def __init__(self, idle_bytes: int) -> None:
        self._max_idle_bytes = idle_bytes
        self._idle_bytes = 0
        self._idle: dict[int, list[Block]] = {}
        self._ended: deque[Block] = deque()  # by leases, perhaps on another thread
        self._leases: dict[int, weakref.ref[object]] = {}
        self._closed = False

    @property
    def num_leases(self) -> int:
        """Leases in use."""
        return len(self._leases)

    def take(self, nbytes: int) -> Block:
        """A block of at least `nbytes`, with anything in it."""
        while self._ended:
            self.give_back(self._ended.popleft())
        size = block_bytes(nbytes)
        idle = self._idle.get(size)
        if idle:
            self._idle_bytes -= size
            return idle.pop()
        return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)

    def give_back(self, block: Block) -> None:
        """The block is free: kept for the next one, unless enough are."""
        size = len(block)
        if not self._closed and self._idle_bytes + size <= self._max_idle_bytes:
            self._idle_bytes += size
            self._idle.setdefault(size, []).append(block)

    def lease(self, block: Block) -> memoryview:
        """A lease of all of `block`, which returns to the pool when the last view of the lease is freed."""
        import numpy as np  # UCX's own Python package needs it too

        array = np.frombuffer(block, np.uint8)
        number = id(array)

        def end(_: object) -> None:
            self._leases.pop(number, None)
            self._ended.append(block)

        self._leases[number] = weakref.ref(array, end)
        view: memoryview = memoryview(array)  # type: ignore[arg-type, unused-ignore]  # numpy's stubs for Python 3.11 do not say so
        return view

    def close(self) -> None:
        """Keeps no blocks from now on. Leases stay valid until their last view is freed."""
        self._closed = True
        self._idle.clear()
        self._ended.clear()
        self._idle_bytes = 0
