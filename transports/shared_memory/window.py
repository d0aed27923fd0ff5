"""One-sided windows in memory that two processes share: the "application area" of XCCL's zero-copy form (xDeepServe section 3.1).

Each window is a sealed memfd of its own, allocated when it is opened: one page of words (closed, a spare field for copy threads, the
flags), then the memory. Its descriptor and token are sent over the channel's socket at once, so they arrive before any key can; a key with
an unknown token is refused. A write is one copy into the registered memory. A side that sets a flag stores it (release), passes a full
fence, checks whether the other side sleeps for flags, and only then wakes it. Flags wait behind no payload.
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
from flowrt.transports.channel.window_memory import TOKEN_BYTES, WindowKey, check_flag, check_range, check_window, flat
from flowrt.transports.contract import MAX_FLAGS, MAX_WINDOWS, RemoteWindow, Window
from flowrt.transports.errors import UnavailableError, WindowError
from flowrt.transports.shared_memory.ring import FIELD_BYTES, FLAGS_SLEEP, NUDGES, PAGE_BYTES

if TYPE_CHECKING:
    from flowrt.transports.native._words import Memory

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_OFFER = struct.Struct(f"<B{TOKEN_BYTES}sQI")  # kind, token, bytes, flags
_OFFERED, _WITHDRAWN = 1, 2
_SHUT, _FIELDS, _NOBODY, _FLAGS = 0, 512, 64, 1088  # in a window's first page; the fields of copy threads are 16 times 32 bytes
assert _FLAGS + 8 * MAX_FLAGS <= PAGE_BYTES


class WindowSocket(PeerWatch):
    """The socket of the handshake, over which each end passes the memory of its windows to the other. Other data ends the channel."""

    def __init__(self, sock: socket.socket, on_end: Callable[[str | None], None]) -> None:
        self.offers: dict[bytes, tuple[WindowKey, int]] = {}  # of the peer: a window's key and its descriptor
        self._unsent: deque[WindowKey] = deque()  # withdrawn, and the line was full; no more than there were windows
        super().__init__(sock, on_end)

    def offer(self, key: WindowKey, memfd: int) -> bool:
        """False when the socket is full or closed."""
        return not self._unsent and self._send(_OFFERED, key, [memfd])

    def withdraw(self, key: WindowKey) -> None:
        if self._is_watched and (self._unsent or not self._send(_WITHDRAWN, key, [])):
            if not self._unsent:
                self._loop.add_writer(self._socket.fileno(), self._send_rest)
            self._unsent.append(key)

    def _send_rest(self) -> None:
        while self._unsent and self._send(_WITHDRAWN, self._unsent[0], []):
            self._unsent.popleft()
        if not self._unsent:
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
        self._asleep: set[Callable[[], bool]] = set()
        self._offers = offers
        self._num_copy_threads = num_copy_threads
        self._own_wake = own_wake
        self._new_memory = new_memory
        self._owned: set[_SharedWindow] = set()
        self._attached: set[_RemoteSharedWindow] = set()

    def open(self, nbytes: int, num_flags: int) -> Window:
        from flowrt.transports.native._words import Memory

        check_window(nbytes, num_flags, len(self._owned), MAX_WINDOWS)
        key = WindowKey.new(nbytes, num_flags)
        memfd = self._new_memory(PAGE_BYTES + nbytes)
        try:
            memory = Memory(memfd, PAGE_BYTES + nbytes)
            if not self._offers.offer(key, memfd):
                raise UnavailableError("the peer does not take the memory of any more windows")
        except OSError as error:
            raise UnavailableError(f"a window of {nbytes} bytes cannot be mapped: {error.strerror}") from error
        finally:
            os.close(memfd)
        window = _SharedWindow(self, memory, key)
        self._owned.add(window)
        return window

    def attach(self, key: bytes) -> RemoteWindow:
        from flowrt.transports.native._words import Memory

        wanted = WindowKey.read(key)
        self._offers.read_pending()  # the memory was sent before the key
        offered, memfd = self._offers.offers.get(wanted.token, (None, -1))
        if offered != wanted:
            raise WindowError("no window of this channel has that key, or it was closed")
        try:
            memory = Memory(memfd, PAGE_BYTES + wanted.nbytes)
        except OSError as error:
            raise UnavailableError(f"a window of {wanted.nbytes} bytes cannot be mapped: {error.strerror}") from error
        copy_threads = CopyThreads(memory, _FIELDS, FIELD_BYTES, _NOBODY, self._num_copy_threads, -1, self._own_wake)
        window = _RemoteSharedWindow(self, memory, wanted, copy_threads)
        self._attached.add(window)
        return window

    def withdraw(self, window: _SharedWindow, key: WindowKey) -> None:
        self._owned.discard(window)
        self._offers.withdraw(key)
        self.sleeping.nudge()
        self.wake()

    def detach(self, window: _RemoteSharedWindow) -> None:
        self._attached.discard(window)

    async def wait(self, memory: Memory, flag: int, seen: int, is_shut: Callable[[], bool]) -> int:
        value = seen

        def changed() -> bool:
            nonlocal value
            value = memory.load(_FLAGS + 8 * flag)
            return value != seen or is_shut()

        def expect() -> bool:
            self.sleeping.expect()
            return changed()

        self._asleep.add(changed)
        try:
            await self.until(changed, expect)
        finally:
            self._asleep.discard(changed)
        return value

    def has_news(self) -> bool:
        """Whether a call waits for a flag that has changed."""
        return any([changed() for changed in self._asleep])

    def close(self) -> None:
        """With the channel."""
        for window in list(self._attached):
            window.let_go()
        for own in self._owned:
            own.end()
        self._owned.clear()
        del self.sleeping  # and with it the channel's memory


class _SharedWindow(Window):
    def __init__(self, windows: SharedWindows, memory: Memory, key: WindowKey) -> None:
        self._windows = windows
        self._memory = memory
        self._key = key
        self._shut = False
        self.key = key.packed()
        self.nbytes, self.num_flags = key.nbytes, key.num_flags
        self.buffer = memoryview(memory)[PAGE_BYTES:]

    def flag(self, flag: int) -> int:
        check_flag(flag, self.num_flags)
        return self._memory.load(_FLAGS + 8 * flag)

    def set_flag(self, flag: int, value: int) -> None:
        check_flag(flag, self.num_flags, value)
        self._expect_open()
        self._memory.store(_FLAGS + 8 * flag, value)
        self._windows.sleeping.nudge()

    async def wait_flag(self, flag: int, seen: int = 0) -> int:
        check_flag(flag, self.num_flags)
        value = await self._windows.wait(self._memory, flag, seen, lambda: self._shut)
        self._expect_open()
        return value

    async def aclose(self) -> None:
        if not self._shut:
            self._shut = True
            self._memory.store(_SHUT, 1)
            self._windows.withdraw(self, self._key)

    def end(self) -> None:
        """The channel has ended, and its windows with it."""
        self._shut = True

    def _expect_open(self) -> None:
        if self._shut:
            raise WindowError("this window was closed")


class _RemoteSharedWindow(RemoteWindow):
    def __init__(self, windows: SharedWindows, memory: Memory, key: WindowKey, copy_threads: CopyThreads) -> None:
        self._windows = windows
        self._memory = memory
        self._copy_threads = copy_threads
        self._let_go = False
        self.key = key
        self.nbytes, self.num_flags = key.nbytes, key.num_flags

    async def write(self, offset: int, data: object, flag: int | None = None, value: int = 1) -> None:
        self._expect_open()
        view = flat(data)
        check_range(offset, len(view), self.nbytes)
        if flag is not None:
            check_flag(flag, self.num_flags, value)
        if len(view) >= MIN_BYTES and len(view) >= threshold_bytes():
            await self._copy_beside(PAGE_BYTES + offset, view)
            self._expect_open()
        else:
            self._memory.fill(PAGE_BYTES + offset, view)
        if flag is not None:
            self._set(flag, value)

    async def read(self, offset: int, nbytes: int) -> memoryview:
        self._expect_open()
        check_range(offset, nbytes, self.nbytes)
        shared = memoryview(self._memory)[PAGE_BYTES + offset :][:nbytes]
        found = memoryview(bytearray(nbytes))
        for start in range(0, nbytes, MIN_BYTES):
            if start:
                await asyncio.sleep(0)  # the loop has others to serve
            end = min(start + MIN_BYTES, nbytes)
            found[start:end] = shared[start:end]
        return found

    async def set_flag(self, flag: int, value: int) -> None:
        self._expect_open()
        check_flag(flag, self.num_flags, value)
        self._set(flag, value)

    def flag(self, flag: int) -> int:
        self._expect_open()
        check_flag(flag, self.num_flags)
        return self._memory.load(_FLAGS + 8 * flag)

    async def wait_flag(self, flag: int, seen: int = 0) -> int:
        self._expect_open()
        check_flag(flag, self.num_flags)
        value = await self._windows.wait(self._memory, flag, seen, lambda: self._let_go or self._memory.load(_SHUT) == 1)
        if value == seen:
            self._expect_open()
        return value

    async def aclose(self) -> None:
        self.let_go()

    def let_go(self) -> None:
        if not self._let_go:
            self._let_go = True
            self._copy_threads.close()
            self._windows.detach(self)
            self._windows.wake()

    def _set(self, flag: int, value: int) -> None:
        self._memory.store(_FLAGS + 8 * flag, value)
        self._windows.sleeping.nudge()

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

    def _expect_open(self) -> None:
        if self._let_go:
            raise WindowError("this end has let go of the window")
        if self._memory.load(_SHUT):
            raise WindowError("the peer has closed the window")
