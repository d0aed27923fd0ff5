"""Holds a process's weights in a memory file (memfd) that other processes of the host map, instead of reading and converting files.

The first process that locks the empty file fills it. It writes each tensor through a mapping of its own, uses it through a read-only one,
and at the end appends an index and seals the file: from then on no process can write to it, grow it or shrink it. Each later process finds
the seals, checks the index and maps the tensors read-only. A process that dies while it fills leaves no seals, and the kernel releases its
lock: the next process starts anew. A process that waits for the lock waits for one that loads the same weights.

Linux only; the files need no name and vanish with the last process that maps them.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import mmap
import os
import struct
import weakref
from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch import Tensor

HUGE_BYTES = 2 << 20  # of a huge page
HUGE_FROM_BYTES = 16 << 20  # tensors of this size use huge pages; for smaller ones the unused rest of the last page is too large a part
_FOOTER = struct.Struct("<QQ")  # at the end of the file: start and length of the index


class WeightMemory:
    """The weights of one process. Used by one thread, until `seal`."""

    def __init__(self, fd: int, content: str) -> None:
        """Wait until no other process fills the memory file `fd`; then use what it holds, or fill it.

        `content` names everything that decides the bits of the weights; a file with other content stays unused. Takes over `fd`. Raises
        OSError where the system lacks a call; then nothing stays open.
        """
        self._fd, self._content = fd, content
        self._size, self._entries, self._notes = 0, dict[str, Any](), dict[str, Any]()
        self._lock = -1
        try:
            # The lock belongs to an opening of the file, and `fd` shares its opening with other processes.
            self._lock = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
            self.is_complete = bool(seals & fcntl.F_SEAL_SEAL)
            if self.is_complete:
                if seals & fcntl.F_SEAL_WRITE:
                    self._read_index()
                self._unlock()
            else:
                os.ftruncate(fd, 0)
        except BaseException:
            self.close()
            raise

    def hold(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, fill: Callable[[Tensor], None]) -> Tensor:
        """The tensor `name`, read-only. `fill` is called with its memory if no process has filled it before."""
        num_bytes = prod(shape) * dtype.itemsize
        entry = [str(dtype), list(shape)]
        start = _round_up(self._size, HUGE_BYTES if num_bytes >= HUGE_FROM_BYTES else mmap.PAGESIZE)
        is_held = self._entries.get(name, [])[:2] == entry if self.is_complete else self._grow(start + num_bytes)
        if not num_bytes or not is_held:
            private = torch.empty(shape, dtype=dtype)
            fill(private)
            return private
        if self.is_complete:
            return _tensor(self._map(self._entries[name][2], num_bytes, mmap.PROT_READ, mmap.MAP_PRIVATE), shape, dtype)
        # The mapping for writing ends with this call, because a file that has one cannot be sealed.
        fill(_tensor(self._map(start, num_bytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED), shape, dtype))
        self._entries[name] = [*entry, start]
        return _tensor(self._map(start, num_bytes, mmap.PROT_READ, mmap.MAP_PRIVATE), shape, dtype)

    def _grow(self, size: int) -> bool:
        """Make the file `size` bytes long. False: a limit of the process or the system forbids it."""
        try:
            os.ftruncate(self._fd, size)
        except OSError:
            return False
        self._size = size
        return True

    def note(self, name: str, find: Callable[[], Any]) -> Any:
        """The JSON value `name` that the process that filled the memory has found; found by `find` if there is none."""
        if name not in self._notes:
            self._notes[name] = find()
        return self._notes[name]

    def seal(self) -> None:
        """Everything is held. Other processes may use the memory from now on."""
        if not self.is_complete and self._fd >= 0:
            index = json.dumps({"content": self._content, "tensors": self._entries, "notes": self._notes}).encode()
            with contextlib.suppress(OSError):  # a limit of file sizes: others take nothing of a file without an index
                os.pwrite(self._fd, index + _FOOTER.pack(self._size, len(index)), self._size)
            seals = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
            try:
                fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, seals | fcntl.F_SEAL_WRITE)
            except OSError:  # a mapping for writing is left: this process keeps the weights, others take nothing of the file
                fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, seals)
        self.close()

    def close(self) -> None:
        """Close the descriptors. Held tensors stay valid. Idempotent."""
        self._unlock()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _unlock(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _read_index(self) -> None:
        """Read the index of the sealed file, which no process can change any more. Take nothing of other content or of a broken index."""
        with contextlib.suppress(struct.error, ValueError, LookupError, TypeError, AttributeError):
            size = os.fstat(self._fd).st_size
            start, length = _FOOTER.unpack(os.pread(self._fd, _FOOTER.size, max(0, size - _FOOTER.size)))
            if start + length + _FOOTER.size != size:
                return
            index = json.loads(os.pread(self._fd, length, start))
            if index["content"] != self._content:
                return
            self._notes = index["notes"]
            for name, (dtype, shape, offset) in index["tensors"].items():
                num_bytes = prod(shape) * getattr(torch, dtype.removeprefix("torch.")).itemsize
                if 0 <= offset <= start - num_bytes and offset % mmap.PAGESIZE == 0:
                    self._entries[name] = [dtype, shape, offset]

    def _map(self, offset: int, num_bytes: int, protection: int, flags: int) -> ctypes.Array[ctypes.c_uint8]:
        """Part of the file as a buffer, mapped as long as it is used. Python's own mmap would keep a descriptor open for each."""
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mmap.restype = ctypes.c_void_p
        size = ctypes.c_size_t(num_bytes)
        address = libc.mmap(None, size, protection, flags, self._fd, ctypes.c_longlong(offset))
        if address in (None, ctypes.c_void_p(-1).value):
            raise OSError(ctypes.get_errno(), "mmap of weights in memory")
        if num_bytes >= HUGE_FROM_BYTES:
            libc.madvise(ctypes.c_void_p(address), size, mmap.MADV_HUGEPAGE)  # a kernel without huge pages refuses
        memory = (ctypes.c_uint8 * num_bytes).from_address(address)
        weakref.finalize(memory, libc.munmap, ctypes.c_void_p(address), size).atexit = False
        return memory


def _tensor(memory: ctypes.Array[ctypes.c_uint8], shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """The memory as a tensor, which keeps it mapped."""
    return torch.frombuffer(memory, dtype=dtype).view(shape)


def _round_up(size: int, unit: int) -> int:
    return -(-size // unit) * unit
