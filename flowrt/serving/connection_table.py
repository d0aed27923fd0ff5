"""The connections of an HTTP server that may give way to others, and those that are being refused."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Any

log = logging.getLogger("flowrt.front_end")

MIN_LEAVE_SECONDS = 0.2  # for the client of a refused connection to read the response, while many are refused
NOTE_SECONDS = 60.0  # between two lines of the log about too many connections


class ConnectionTable:
    """The connections of a server, of its own class. `waiting`: those on which a request, or the rest of one, has yet to arrive, longest
    wait first: when there are too many connections, a new one takes the place of the first of these. Connections that leave were refused,
    and take no place; there are at most `max_leaving`."""

    def __init__(self, max_connections: int, max_leaving: int) -> None:
        self.max_connections, self.max_leaving = max_connections, max_leaving
        self.waiting: dict[Any, None] = {}
        self._leaving: dict[object, tuple[float, Callable[[], object]]] = {}  # since when, and what closes it
        self._has_left = asyncio.Event()
        self._next_note = 0.0

    def begin_leaving(self, connection: object, now: float, close: Callable[[], object]) -> None:
        self.waiting.pop(connection, None)
        if len(self._leaving) >= self.max_leaving:
            self._close(next(iter(self._leaving)))
        self._leaving[connection] = now, close

    def end_leaving(self, connection: object) -> None:
        if self._leaving.pop(connection, None) is not None:
            self._has_left.set()

    async def wait_for_room(self) -> None:
        """Wait until one more connection can be refused. Those that have had MIN_LEAVE_SECONDS are closed for it."""
        while len(self._leaving) >= self.max_leaving:
            self._has_left.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(MIN_LEAVE_SECONDS):
                    await self._has_left.wait()
            limit = asyncio.get_running_loop().time() - MIN_LEAVE_SECONDS
            for connection in [each for each, (since, _) in self._leaving.items() if since <= limit]:
                self._close(connection)

    def close_leaving(self) -> None:
        for connection in list(self._leaving):
            self._close(connection)

    def _close(self, connection: object) -> None:
        _, close = self._leaving.pop(connection)
        close()

    def note_refusal(self, now: float) -> None:
        if now >= self._next_note:
            self._next_note = now + NOTE_SECONDS
            log.warning("more than %d connections: further ones get status 503", self.max_connections)
