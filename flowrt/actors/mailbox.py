"""A bounded queue with one reader, in which an actor's messages wait.

`post` never waits: the sender of each message holds a credit for it, so an overfull mailbox is a bug and not load.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class MailboxClosedError(Exception):
    """The mailbox is closed: it takes no more items, and none are left."""


class Mailbox(Generic[T]):
    """A FIFO queue of at most `capacity` items, in which some overtake. One task takes items; any task or callback of the same loop posts
    them."""

    __slots__ = ("_capacity", "_closed", "_emptied", "_num_overtaking", "_waiter", "items")

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self.items: deque[T] = deque()  # read-only for others; always the same deque
        self._waiter: asyncio.Future[None] | None = None
        self._emptied: asyncio.Future[None] | None = None
        self._closed = False
        self._num_overtaking = 0  # items that follow the first one, before all others

    def __len__(self) -> int:
        return len(self.items)

    def post(self, item: T, overtakes: bool = False) -> None:
        """Add an item; one that `overtakes` comes after the first one, which may be in use, and after earlier ones that overtake.

        Raises OverflowError when the mailbox is full (a credit was counted twice) and MailboxClosedError after `close`.
        """
        if self._closed:
            raise MailboxClosedError
        if len(self.items) >= self._capacity:
            raise OverflowError(f"a mailbox of {self._capacity} is full: a message was posted without a credit")
        if overtakes and self.items:
            self._num_overtaking += 1
            self.items.insert(self._num_overtaking, item)
        else:
            self.items.append(item)
        self._wake()

    def take_nowait(self) -> T | None:
        """The oldest item, or None."""
        item = self.items.popleft() if self.items else None
        self._num_overtaking = max(0, self._num_overtaking - 1)
        if not self.items and self._emptied is not None and not self._emptied.done():
            self._emptied.set_result(None)
        return item

    async def wait_item(self) -> T:
        """The oldest item. It stays in the mailbox until `take_nowait`, so that a cancelled wait loses nothing.

        Raises MailboxClosedError once closed and empty.
        """
        while not self.items:
            if self._closed:
                raise MailboxClosedError
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return self.items[0]

    async def wait_empty(self) -> None:
        """Wait until every item has been taken. One task at a time."""
        if self.items:
            self._emptied = asyncio.get_running_loop().create_future()
            try:
                await self._emptied
            finally:
                self._emptied = None

    def close(self) -> None:
        """Refuse further items; those in the mailbox can still be taken. Idempotent."""
        self._closed = True
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
