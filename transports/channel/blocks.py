"""Implements `BlockPool`: reusable memory blocks for large received tensors, so that their pages stay mapped (and registered with UCX).

A block is whole pages of anonymous memory. The first use of a page costs several times as much as a copy into it, so memory that the
user has freed is used again. A receiver takes a block for a message's tensors and gives its user a *lease* on it. The block returns to the
pool when the last view of the lease is freed, on any thread. Sizes are rounded up to eighths of a power of two, so that a block fits many
messages. The pool keeps at most `idle_bytes` of unused blocks.
"""

from __future__ import annotations

import ctypes
import mmap
import weakref
from collections import deque
from collections.abc import Sequence
from contextlib import suppress

SMALLEST_BYTES = 1 << 16
ALIGNMENT = 64  # of each tensor in a block: a cache line
MADV_POPULATE_WRITE = 23  # the module mmap has no name for it


class Block(mmap.mmap):
    """Whole pages of anonymous memory."""

    _num_populated = 0

    def populate(self, end: int) -> None:
        """Allocates the pages before `end` that are not in use yet, in one system call instead of a fault per page."""
        end = min(-(-end // mmap.PAGESIZE) * mmap.PAGESIZE, len(self))
        if end > self._num_populated:
            with suppress(OSError):  # before Linux 5.14: each page is allocated at its first use
                self.madvise(MADV_POPULATE_WRITE, self._num_populated, end - self._num_populated)
            self._num_populated = end


def block_bytes(nbytes: int) -> int:
    """Returns the block size for `nbytes`: at most an eighth more, and at least SMALLEST_BYTES."""
    if nbytes <= SMALLEST_BYTES:
        return SMALLEST_BYTES
    step = 1 << (nbytes - 1).bit_length() - 4
    return -(-nbytes // step) * step


def placement(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Returns the offsets of tensors of `sizes` bytes in one range, each at a multiple of ALIGNMENT, and the bytes of the range."""
    offsets = []
    end = 0
    for size in sizes:
        offsets.append(end)
        end += (size + ALIGNMENT - 1) & -ALIGNMENT
    return offsets, end


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
        return Block(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)

    def give_back(self, block: Block) -> None:
        """Returns a block to the pool, which keeps it unless `idle_bytes` would be exceeded."""
        size = len(block)
        if not self._closed and self._idle_bytes + size <= self._max_idle_bytes:
            self._idle_bytes += size
            self._idle.setdefault(size, []).append(block)

    def lease(self, block: Block) -> memoryview:
        """Returns a lease on all of `block`; the block returns to the pool when the last view of the lease is freed."""
        array = (ctypes.c_ubyte * len(block)).from_buffer(block)
        number = id(array)

        def end(_: object) -> None:
            self._leases.pop(number, None)
            self._ended.append(block)

        self._leases[number] = weakref.ref(array, end)
        return memoryview(array).cast("B")

    def close(self) -> None:
        """Frees all idle blocks and keeps no more. Leases stay valid until their last view is freed."""
        self._closed = True
        self._idle.clear()
        self._ended.clear()
        self._idle_bytes = 0
