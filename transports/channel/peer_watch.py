"""Watches the socket of a handshake, whose end reports the end of the peer's process or channel."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

_READ_BYTES = 4096


class PeerWatch:
    """Watches the socket of a meeting. Calls `on_end` once: with None when the peer's end is closed, with a reason when it sends data."""

    def __init__(self, sock: socket.socket, on_end: Callable[[str | None], None]) -> None:
        self._socket = sock
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(sock.fileno(), self._on_readable)
        self._is_watched = True

    def close(self) -> None:
        """Closes the socket, which notifies the peer. Idempotent."""
        self._unwatch()
        self._socket.close()

    def _unwatch(self) -> None:
        if self._is_watched:
            self._is_watched = False
            self._loop.remove_reader(self._socket.fileno())

    def _on_readable(self) -> None:
        try:
            reason = self._read()
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            reason = None  # a reset counts as closed
        self._unwatch()
        self._on_end(reason)

    def _read(self) -> str | None:
        """Reads what has arrived. Returns None at the end of the connection, else what is wrong with the data. Raises OSError."""
        return "the peer sent data on the socket that only reports its end" if self._socket.recv(_READ_BYTES) else None
