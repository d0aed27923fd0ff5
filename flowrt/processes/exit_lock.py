"""Exit notification by robust mutex: a process holds a lock until its death, and the waiting process is notified within a millisecond.

A pidfd and the end of a socket report a death late. The kernel first frees the memory of the dying process, which takes 10 ms for 100 MB,
and seconds for the weights of a large model. The kernel releases robust mutexes before that. So each worker locks one in memory that it
shares with the launcher, and never unlocks it. 0.1 ms after SIGKILL the launcher's wait ends with EOWNERDEAD, whatever the memory size.
`ExitLock` is the waiting side, `hold` the side of the process.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import functools
import mmap
import os
import threading
import time
from collections.abc import Callable

_BYTES = mmap.PAGESIZE
_STATE_AT = 256  # offset of the state byte that the holder writes, behind any C library's mutex (40 to 64 bytes)
_UNDECIDED, _HELD, _REFUSED = 0, 1, 2
_SHARED, _ROBUST = 1, 1
_POLL_SECONDS = 0.005  # poll interval until the lock is held; a few of these pass between fork and lock
_JOIN_SECONDS = 1.0

_held: list[mmap.mmap] = []  # keeps the mappings of this process's locks alive


@functools.cache  # each object leaves garbage for the collector
def _library() -> ctypes.CDLL | None:
    library = ctypes.CDLL(None)
    needed = ("pthread_mutexattr_setrobust", "pthread_mutexattr_setpshared")
    return library if hasattr(os, "memfd_create") and all(hasattr(library, name) for name in needed) else None


def hold(fd: int) -> None:
    """Lock the ExitLock behind `fd` until the calling thread ends; call it from the process's main thread. Closes `fd`.

    When the system refuses, only the pidfd reports the death of this process.
    """
    try:
        memory = mmap.mmap(fd, _BYTES)
    except OSError:
        return
    finally:
        os.close(fd)
    library, lock = ctypes.CDLL(None), _address(memory)
    attributes = ctypes.create_string_buffer(64)
    failed: int = (
        library.pthread_mutexattr_init(attributes)
        or library.pthread_mutexattr_setpshared(attributes, _SHARED)
        or library.pthread_mutexattr_setrobust(attributes, _ROBUST)
        or library.pthread_mutex_init(lock, attributes)
        or library.pthread_mutex_lock(lock)
    )
    memory[_STATE_AT] = _REFUSED if failed else _HELD
    _held.append(memory)


class ExitLock:
    """Calls `on_death` once in the running loop when the process that holds the lock of `fd` ends, however it ends.

    A thread sleeps until then. `fd` is -1 where the system has no such locks, or has run out of descriptors or memory; then `on_death` is
    never called.
    """

    def __init__(self, name: str, on_death: Callable[[], None]) -> None:
        self._on_death = on_death
        self._loop = asyncio.get_running_loop()
        self._is_closed = False
        self._memory: mmap.mmap | None = None  # None, as the thread: the pidfd reports the death, later
        self._thread: threading.Thread | None = None
        self.fd = -1
        if _library() is None:
            return
        try:
            self.fd = os.memfd_create("flowrt-exit-lock", os.MFD_CLOEXEC)
            os.ftruncate(self.fd, _BYTES)
            self._memory = memory = mmap.mmap(self.fd, _BYTES)
        except OSError:  # no descriptor or memory is free
            self.close()
        else:
            self._thread = threading.Thread(target=self._wait, args=[memory], name=f"exit lock of {name}", daemon=True)

    def given_away(self) -> None:
        """Close `fd`, which another process has now, and begin to wait for the death of that process."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
        if self._thread is not None and not self._is_closed:  # the death may be known already
            with contextlib.suppress(RuntimeError):  # the system can start no thread
                self._thread.start()

    def close(self) -> None:
        """Stop waiting and free the lock: the process has ended, or never existed. Idempotent."""
        self._is_closed = True
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
        if self._thread is not None and self._thread.ident is not None:
            self._thread.join(_JOIN_SECONDS)
        if self._memory is not None and not (self._thread is not None and self._thread.is_alive()):
            self._memory.close()

    def _wait(self, memory: mmap.mmap) -> None:
        while memory[_STATE_AT] == _UNDECIDED:
            if self._is_closed:
                return
            time.sleep(_POLL_SECONDS)
        if memory[_STATE_AT] == _REFUSED:
            return
        library = _library()
        if library is not None and library.pthread_mutex_lock(_address(memory)) == errno.EOWNERDEAD and not self._is_closed:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._notify)

    def _notify(self) -> None:
        if not self._is_closed:
            self._on_death()


def _address(memory: mmap.mmap) -> ctypes.c_void_p:
    return ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(memory)))
