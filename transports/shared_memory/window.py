"""One-sided windows in memory that two processes share: the "application area" of XCCL's zero-copy form (xDeepServe section 3.1).

Each window is a sealed memfd of its own, allocated when it is opened: one page of words (closed, a spare field for copy threads, the
flags), then the memory. Its descriptor and token are sent over the channel's socket at once, so they arrive before any key can; a key with
an unknown token is refused. A write is one copy into the registered memory. A side that sets a flag stores it (release), passes a full
fence, checks whether the other side sleeps for flags, and only then wakes it. Flags never wait behind a payload.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import socket
import struct
from collections import deque
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, NamedTuple

from flowrt.transports.channel.bulk_copy import MIN_BYTES, CopyThreads, threshold_bytes
from flowrt.transports.channel.peer_watch import PeerWatch
from flowrt.transports.channel.window_base import TOKEN_BYTES, CheckedEnd, CheckedRemoteWindow, CheckedWindow, WindowKey, check_window
from flowrt.transports.contract import MAX_FLAGS, MAX_WINDOWS, RemoteWindow, Window
from flowrt.transports.errors import UnavailableError, WindowError
from flowrt.transports.shared_memory.ring import FIELD_BYTES, FLAGS_SLEEP, NUDGES, PAGE_BYTES

if TYPE_CHECKING:
    from flowrt.transports.native._words import Memory

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_OFFER = struct.Struct(f"<B{TOKEN_BYTES}sQI")  # kind, token, bytes, flags
_OFFERED, _WITHDRAWN = 1, 2
_CLOSED, _FIELDS, _NO_SLEEPER, _FLAGS = 0, 512, 64, 1088  # in a window's first page; the fields of copy threads are 16 times 32 bytes
assert _FLAGS + 8 * MAX_FLAGS <= PAGE_BYTES


class WindowSocket(PeerWatch):
    """The socket of the handshake, over which each end passes the memory of its windows to the other. Other data ends the channel."""

    def __init__(self, sock: socket.socket, on_end: Callable[[str | None], None]) -> None:
        self.offers: dict[bytes, tuple[WindowKey, int]] = {}  # of the peer, by token: a window's key and its descriptor
        self._unsent: deque[WindowKey] = deque()  # withdrawn, and not sent yet because the socket is full; no more than there were windows
        super().__init__(sock, on_end)

    def offer(self, key: WindowKey, memfd: int) -> bool:
        """False when the socket is full or closed."""
        return not self._unsent and self._send(_OFFERED, key, [memfd])

    def withdraw(self, key: WindowKey) -> None:
        if self._is_watched:
            self._unsent.append(key)
            self._send_rest()

    def _send_rest(self) -> None:
        while self._unsent and self._send(_WITHDRAWN, self._unsent[0], []):
            self._unsent.popleft()
        if self._unsent:
            self._loop.add_writer(self._socket.fileno(), self._send_rest)
        else:
            self._loop.remove_writer(self._socket.fileno())

    def _send(self, kind: int, key: WindowKey, descriptors: list[int]) -> bool:
        try:
            return socket.send_fds(self._socket, [_OFFER.pack(kind, *key)], descriptors, socket.MSG_NOSIGNAL) == _OFFER.size
        except BlockingIOError:
            return False
        except OSError:  # closed, and the peer with it: the rest is not needed
            self._unsent.clear()
            return kind == _WITHDRAWN

    def read_pending(self) -> None:
        """Reads the offers that have arrived."""
        if self._is_watched:
            self._on_readable()

    def close(self) -> None:
        if self._unsent:
            self._unsent.clear()
            self._loop.remove_writer(self._socket.fileno())
        super().close()
        for _, descriptor in self.offers.values():
            os.close(descriptor)
        self.offers.clear()

    def _read(self) -> str | None:
        while True:
            data, descriptors, flags, _ = socket.recv_fds(self._socket, _OFFER.size, 1, socket.MSG_CMSG_CLOEXEC)
            if not data:
                return None
            reason = self._take_offer(data, descriptors, flags)
            if reason is not None:
                for descriptor in descriptors:
                    os.close(descriptor)
                return reason

    def _take_offer(self, data: bytes, descriptors: list[int], flags: int) -> str | None:
        """The error in what the peer sent; None when it is valid, and its descriptor was kept or closed."""
        if len(data) != _OFFER.size or flags & socket.MSG_CTRUNC:
            return "the peer sent invalid data on the socket of the windows"
        kind, *fields = _OFFER.unpack(data)
        key = WindowKey(*fields)
        if kind == _WITHDRAWN and not descriptors:
            if key.token in self.offers:
                os.close(self.offers.pop(key.token)[1])
            return None
        if kind != _OFFERED or len(descriptors) != 1 or key.token in self.offers or len(self.offers) >= MAX_WINDOWS:
            return "the peer offered an impossible window"
        try:
            sealed = fcntl.fcntl(descriptors[0], fcntl.F_GET_SEALS) & SEALS == SEALS
        except OSError:
            sealed = False
        if not sealed or os.fstat(descriptors[0]).st_size != PAGE_BYTES + key.nbytes or key.num_flags > MAX_FLAGS:
            return "the peer offered a window whose memory is not sealed, or of another size"
        self.offers[key.token] = key, descriptors[0]
        return None


class Sleeping(NamedTuple):
    """How one end sleeps for flags and wakes the other: the channel's words of each direction, and the peer's eventfd."""

    memory: Memory
    own_words: int  # of the direction this end reads
    peer_words: int
    peer_wake: int

    def expect(self) -> None:
        """This end is about to sleep; flags are looked at again after this."""
        self.memory.raise_flag(self.own_words + FLAGS_SLEEP)

    def nudge(self) -> None:
        """Wakes the other end if it sleeps for flags; it sees everything stored before."""
        if self.memory.publish(self.peer_words + NUDGES, 1, self.peer_words + FLAGS_SLEEP):
            os.eventfd_write(self.peer_wake, 1)


class SharedWindows:
    """The windows of one end. `until` is QueuedChannel._until; `wake` and a nudge of the peer make its waiters check again."""

    def __init__(
        self,
        offers: WindowSocket,
        sleeping: Sleeping,
        num_copy_threads: int,
        own_wake: int,
        new_memory: Callable[[int], int],
        until: Callable[[Callable[[], bool], Callable[[], bool]], Awaitable[None]],
        wake: Callable[[], None],
    ) -> None:
        self.sleeping = sleeping
        self.until = until
        self.wake = wake
        self._waits: set[Callable[[], bool]] = set()
        self._offers = offers
        self._num_copy_threads = num_copy_threads
        self._own_wake = own_wake
        self._new_memory = new_memory
        self.owned: set[_SharedWindow] = set()
        self.attached: set[_RemoteSharedWindow] = set()

    def open(self, nbytes: int, num_flags: int) -> Window:
        check_window(nbytes, num_flags, len(self.owned))
        key = WindowKey.new(nbytes, num_flags)
        memfd = self._new_memory(PAGE_BYTES + nbytes)
        try:
            memory = _map(memfd, nbytes)
            if not self._offers.offer(key, memfd):
                raise UnavailableError("the peer does not take the memory of any more windows")
        finally:
            os.close(memfd)
        window = _SharedWindow(self, memory, key)
        self.owned.add(window)
        return window

    async def attach(self, key: bytes) -> RemoteWindow:
        wanted = WindowKey.read(key)
        self._offers.read_pending()  # the memory was sent before the key
        offered, memfd = self._offers.offers.get(wanted.token, (None, -1))
        if offered != wanted:
            raise WindowError("no window of this channel has that key, or it was closed")
        memory = _map(memfd, wanted.nbytes)
        copy_threads = CopyThreads(memory, _FIELDS, FIELD_BYTES, _NO_SLEEPER, self._num_copy_threads, -1, self._own_wake)
        window = _RemoteSharedWindow(self, memory, wanted, copy_threads)
        self.attached.add(window)
        return window

    def withdraw(self, window: _SharedWindow) -> None:
        self.owned.discard(window)
        self._offers.withdraw(WindowKey.read(window.key))
        self.sleeping.nudge()
        self.wake()

    async def wait(self, changed: Callable[[], bool]) -> None:
        def expect() -> bool:
            self.sleeping.expect()
            return changed()

        self._waits.add(changed)
        try:
            await self.until(changed, expect)
        finally:
            self._waits.discard(changed)

    def has_changes(self) -> bool:
        """Whether a call waits for a flag that has changed."""
        return any([changed() for changed in self._waits])

    def close(self) -> None:
        """Closes all windows, with the channel."""
        for window in list(self.attached):
            window.detach()
        for owned in self.owned:
            owned.end()
        self.owned.clear()
        del self.sleeping  # and with it the channel's memory


def _map(memfd: int, nbytes: int) -> Memory:
    """The memory of a window of `nbytes`."""
    from flowrt.transports.native._words import Memory

    try:
        return Memory(memfd, PAGE_BYTES + nbytes)
    except OSError as error:
        raise UnavailableError(f"a window of {nbytes} bytes cannot be mapped: {error.strerror}") from error


class _SharedEnd(CheckedEnd):
    def __init__(self, windows: SharedWindows, memory: Memory, key: WindowKey) -> None:
        super().__init__(key)
        self._windows = windows
        self._memory = memory

    def _load(self, flag: int) -> int:
        return self._memory.load(_FLAGS + 8 * flag)

    def _store(self, flag: int, value: int) -> None:
        self._memory.store(_FLAGS + 8 * flag, value)
        self._windows.sleeping.nudge()

    async def _until(self, changed: Callable[[], bool]) -> None:
        await self._windows.wait(changed)


class _SharedWindow(_SharedEnd, CheckedWindow):
    def __init__(self, windows: SharedWindows, memory: Memory, key: WindowKey) -> None:
        super().__init__(windows, memory, key)
        self.buffer = memoryview(memory)[PAGE_BYTES:]

    async def aclose(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._memory.store(_CLOSED, 1)
            self._windows.withdraw(self)

    def end(self) -> None:
        """Called when the channel has ended, and its windows with it."""
        self._is_closed = True


class _RemoteSharedWindow(_SharedEnd, CheckedRemoteWindow):
    def __init__(self, windows: SharedWindows, memory: Memory, key: WindowKey, copy_threads: CopyThreads) -> None:
        super().__init__(windows, memory, key)
        self._copy_threads = copy_threads

    def _closed_reason(self) -> str | None:
        return super()._closed_reason() or ("the peer has closed the window" if self._memory.load(_CLOSED) else None)

    async def _write(self, offset: int, view: memoryview, flag: int | None, value: int) -> None:
        if len(view) >= MIN_BYTES and len(view) >= threshold_bytes():
            await self._copy_beside(PAGE_BYTES + offset, view)
            self._expect_open()
        else:
            self._memory.fill(PAGE_BYTES + offset, view)
        if flag is not None:
            self._store(flag, value)

    async def _read(self, offset: int, target: memoryview) -> None:
        shared = memoryview(self._memory)[PAGE_BYTES + offset :][: len(target)]
        for start in range(0, len(target), MIN_BYTES):
            if start:
                await asyncio.sleep(0)  # lets the event loop run other callbacks
            target[start : start + MIN_BYTES] = shared[start : start + MIN_BYTES]

    async def _set(self, flag: int, value: int) -> None:
        self._store(flag, value)

    async def aclose(self) -> None:
        self.detach()

    def detach(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._copy_threads.close()
            self._windows.attached.discard(self)
            self._windows.wake()

    async def _copy_beside(self, at: int, view: memoryview) -> None:
        """Copies over all copy threads, a stripe each, while the event loop continues."""
        num_copy_threads = self._copy_threads.num_copy_threads
        stripe = -(-len(view) // num_copy_threads)
        for thread in range(num_copy_threads):
            begin = min(thread * stripe, len(view))
            nbytes = min(stripe, len(view) - begin)
            self._copy_threads.copy(thread, at + begin, view, begin, nbytes, 0, 0, 0, True)
        ticket = self._copy_threads.ticket()
        try:
            await self._windows.until(lambda: self._copy_threads.settled(ticket), bool)
        except BaseException:
            self._copy_threads.wait()  # as long as a copy takes: the data is the caller's again when this returns
            raise
