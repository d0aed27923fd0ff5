"""Implements what all one-sided windows share: keys, the ends' flags, and the checks of every call, without I/O."""

from __future__ import annotations

import secrets
import struct
from abc import abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from flowrt.transports.contract import MAX_FLAGS, MAX_WINDOWS, RemoteWindow, Window, WindowEnd
from flowrt.transports.errors import WindowError

TOKEN_BYTES = 16
_KEY = struct.Struct(f"<{TOKEN_BYTES}sQI")
_FLAG_VALUES = 1 << 64


class WindowKey(NamedTuple):
    """A decoded key: it grants access to the window with `token`, which has `nbytes` bytes and `num_flags` flags."""

    token: bytes
    nbytes: int
    num_flags: int

    @classmethod
    def new(cls, nbytes: int, num_flags: int, token: bytes | None = None) -> WindowKey:
        """Returns a key with a random token, or with the given `token`."""
        return cls(secrets.token_bytes(TOKEN_BYTES) if token is None else token, nbytes, num_flags)

    @classmethod
    def read(cls, key: bytes) -> WindowKey:
        """Decodes and checks `key`. Raises WindowError when it is not a key of a window."""
        if not isinstance(key, (bytes, bytearray, memoryview)) or len(key) != _KEY.size:
            raise WindowError(f"a window's key is {_KEY.size} bytes")
        found = cls(*_KEY.unpack(key))
        check_window(found.nbytes, found.num_flags)
        return found

    def packed(self) -> bytes:
        return _KEY.pack(*self)


def check_window(nbytes: int, num_flags: int, num_open: int = 0) -> None:
    """Raises WindowError for an invalid size or flag count, or when MAX_WINDOWS windows are already open."""
    if nbytes < 1 or not 0 <= num_flags <= MAX_FLAGS:
        raise WindowError(f"a window has at least one byte and 0 to {MAX_FLAGS} flags, not {nbytes} and {num_flags}")
    if num_open >= MAX_WINDOWS:
        raise WindowError(f"this end of the channel has {MAX_WINDOWS} windows open already")


def check_range(offset: int, nbytes: int, window_bytes: int) -> None:
    """Raises WindowError unless bytes [offset, offset + nbytes) lie in a window of `window_bytes`."""
    if offset < 0 or nbytes < 0 or offset + nbytes > window_bytes:
        raise WindowError(f"{nbytes} bytes at {offset} are outside of a window of {window_bytes}")


def check_flag(flag: int, num_flags: int, value: int = 0) -> None:
    """Raises WindowError unless 0 <= flag < num_flags and `value` fits into 64 bits."""
    if not 0 <= flag < num_flags or not 0 <= value < _FLAG_VALUES:
        raise WindowError(f"flag {flag} of {num_flags} does not exist, or its value {value} does not fit into 64 bits")


def flat(data: object) -> memoryview:
    """Returns the bytes of any buffer in row-major order, as a copy when it is not contiguous. Raises WindowError for other objects."""
    given: Any = data
    try:
        view = memoryview(given)
        if not view.c_contiguous:
            return memoryview(view.tobytes())
        return view.cast("B") if view.nbytes else memoryview(b"")
    except TypeError as error:
        raise WindowError(f"only a buffer can be written to a window: {error}") from error


class WindowTable(Protocol):
    """The windows of one end of a channel; see Channel.open_window and attach_window."""

    def open(self, nbytes: int, num_flags: int) -> Window: ...

    async def attach(self, key: bytes) -> RemoteWindow: ...


class CheckedEnd(WindowEnd):
    """One end of a window. Each call is checked here; a subclass accesses the flags."""

    def __init__(self, key: WindowKey) -> None:
        self.token, self.nbytes, self.num_flags = key
        self._is_closed = False

    @abstractmethod
    def _load(self, flag: int) -> int:
        """The value of an existing flag."""

    @abstractmethod
    async def _until(self, changed: Callable[[], bool]) -> None:
        """Waits until `changed()` is True. Raises ClosedChannelError, BrokenChannelError."""

    @abstractmethod
    def _closed_reason(self) -> str | None:
        """Why the window is closed; None while it is open."""

    def _expect_open(self) -> None:
        reason = self._closed_reason()
        if reason is not None:
            raise WindowError(reason)

    def flag(self, flag: int) -> int:
        check_flag(flag, self.num_flags)
        return self._load(flag)

    async def wait_flag(self, flag: int, seen: int = 0) -> int:
        check_flag(flag, self.num_flags)
        value = seen

        def changed() -> bool:
            nonlocal value
            value = self._load(flag)
            return value != seen or self._closed_reason() is not None

        await self._until(changed)
        if value == seen:
            self._expect_open()
        return value


class CheckedWindow(CheckedEnd, Window):
    """The owner's end."""

    def __init__(self, key: WindowKey) -> None:
        super().__init__(key)
        self.key = key.packed()

    @abstractmethod
    def _store(self, flag: int, value: int) -> None:
        """Sets a flag and wakes its waiters on the other side."""

    def _closed_reason(self) -> str | None:
        return "this window was closed" if self._is_closed else None

    def set_flag(self, flag: int, value: int) -> None:
        check_flag(flag, self.num_flags, value)
        self._expect_open()
        self._store(flag, value)


class CheckedRemoteWindow(CheckedEnd, RemoteWindow):
    """The other end."""

    @abstractmethod
    async def _write(self, offset: int, view: memoryview, flag: int | None, value: int) -> None:
        """See RemoteWindow.write."""

    @abstractmethod
    async def _read(self, offset: int, target: memoryview) -> None:
        """Fills `target` with the bytes at `offset`."""

    @abstractmethod
    async def _set(self, flag: int, value: int) -> None:
        """See RemoteWindow.set_flag."""

    def _closed_reason(self) -> str | None:
        return "this end has detached from the window" if self._is_closed else None

    async def write(self, offset: int, data: object, flag: int | None = None, value: int = 1) -> None:
        self._expect_open()
        view = flat(data)
        check_range(offset, len(view), self.nbytes)
        if flag is not None:
            check_flag(flag, self.num_flags, value)
        await self._write(offset, view, flag, value)

    async def read(self, offset: int, nbytes: int) -> memoryview:
        self._expect_open()
        check_range(offset, nbytes, self.nbytes)
        target = memoryview(bytearray(nbytes))
        await self._read(offset, target)
        return target

    async def set_flag(self, flag: int, value: int) -> None:
        self._expect_open()
        check_flag(flag, self.num_flags, value)
        await self._set(flag, value)

    def flag(self, flag: int) -> int:
        self._expect_open()
        return super().flag(flag)

    async def wait_flag(self, flag: int, seen: int = 0) -> int:
        self._expect_open()
        return await super().wait_flag(flag, seen)
