"""A bounded queue with one reader: where an actor's messages wait.

Here: Mailbox. Not here: what an actor does with a message, channels (links.py). `post` never waits: whoever posts holds a credit
for it, so an overfull mailbox is a fault of ours and not load.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class MailboxClosedError(Exception):
    """The mailbox was closed; nothing more goes in, and nothing is left to take out."""


class Mailbox(Generic[T]):
    """First in, first out; at most `capacity` items. One task takes, any task or callback of the same loop posts."""

    __slots__ = ("_capacity", "_closed", "_emptied", "_waiter", "high_water", "items")

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self.items: deque[T] = deque()  # to be looked at only; the same deque for ever
        self._waiter: asyncio.Future[None] | None = None
        self._emptied: asyncio.Future[None] | None = None
        self._closed = False
        self.high_water = 0

    def __len__(self) -> int:
        return len(self.items)

    def post(self, item: T) -> None:
        """Raises OverflowError when it is full (a credit was counted twice) and MailboxClosedError after `close`."""
        if self._closed:
            raise MailboxClosedError
        if len(self.items) >= self._capacity:
            raise OverflowError(f"a mailbox of {self._capacity} is full: somebody posts without a credit")
        self.items.append(item)
        self.high_water = max(self.high_water, len(self.items))
        self._wake()

    def take_nowait(self) -> T | None:
        """The oldest item, or None."""
        item = self.items.popleft() if self.items else None
        if not self.items and self._emptied is not None and not self._emptied.done():
            self._emptied.set_result(None)
        return item

    async def wait_item(self) -> T:
        """The oldest item, which stays in the box until `take_nowait`: cancelling loses nothing.

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
        """Until everything posted so far has been taken. One task at a time."""
        if self.items:
            self._emptied = asyncio.get_running_loop().create_future()
            try:
                await self._emptied
            finally:
                self._emptied = None

    def close(self) -> None:
        """Nothing more goes in; what is inside can still be taken. Idempotent."""
        self._closed = True
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
