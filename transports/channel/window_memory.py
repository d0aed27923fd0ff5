"""Encodes the keys of one-sided windows and checks the bounds of their calls, without I/O."""

from __future__ import annotations

import secrets
import struct
from typing import Any, NamedTuple

from flowrt.transports.contract import MAX_FLAGS
from flowrt.transports.errors import WindowError

TOKEN_BYTES = 16
_KEY = struct.Struct(f"<{TOKEN_BYTES}sQI")
_MOST = 1 << 64


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
        """Decodes `key`. Raises WindowError when it is not a key."""
        if not isinstance(key, (bytes, bytearray, memoryview)) or len(key) != _KEY.size:
            raise WindowError(f"a window's key is {_KEY.size} bytes")
        return cls(*_KEY.unpack(key))

    def packed(self) -> bytes:
        return _KEY.pack(*self)


def check_window(nbytes: int, num_flags: int, num_open: int, most: int) -> None:
    """Raises WindowError for an invalid size or flag count, or when `most` windows are already open."""
    if nbytes < 1 or not 0 <= num_flags <= MAX_FLAGS:
        raise WindowError(f"a window has at least one byte and 0 to {MAX_FLAGS} flags, not {nbytes} and {num_flags}")
    if num_open >= most:
        raise WindowError(f"this end of the channel has {most} windows open already")


def check_range(offset: int, nbytes: int, window_bytes: int) -> None:
    """Raises WindowError unless bytes [offset, offset + nbytes) lie in a window of `window_bytes`."""
    if offset < 0 or nbytes < 0 or offset + nbytes > window_bytes:
        raise WindowError(f"{nbytes} bytes at {offset} are outside of a window of {window_bytes}")


def check_flag(flag: int, num_flags: int, value: int = 0) -> None:
    """Raises WindowError unless 0 <= flag < num_flags and `value` fits into 64 bits."""
    if not 0 <= flag < num_flags or not 0 <= value < _MOST:
        raise WindowError(f"no flag {flag} of {num_flags}, or no value of 64 bits: {value}")


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
