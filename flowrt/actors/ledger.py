"""What one end of a link has sent and received, over all the channels that carried it. Pure.

Here: Ledger. Not here: the channels (fallback.py, which alone uses it).
"""

from __future__ import annotations

from collections import deque

from flowrt.transports.wire.message import Message

TOLD_EVERY = 16  # messages received until the other end is told


class Ledger:
    """What one end has sent and received, over all its channels. Pure.

    `kept` are the messages that the other end may lack, oldest first; the first of them has the number `first`.
    """

    __slots__ = ("doubles", "first", "kept", "received", "resent", "skip", "told")

    def __init__(self) -> None:
        self.kept: deque[Message] = deque()
        self.first = self.received = self.told = 0
        self.skip = 0  # how many of the messages that come next have been received before
        self.doubles = self.resent = 0

    def begin(self) -> list[Message]:
        """A new channel: what to send on it first."""
        self.resent += len(self.kept)
        return list(self.kept)

    def hear_taken(self, number: int) -> None:
        """The other end has taken `number` messages in all. Raises ValueError when that cannot be."""
        if not self.first <= number <= self.first + len(self.kept):
            raise ValueError(f"the peer says it has taken {number} messages of {self.first + len(self.kept)}")
        while self.first < number:
            self.kept.popleft()
            self.first += 1

    def forget(self, message: Message) -> None:
        """A message that was kept was not sent. Nothing is kept any more once the channel is closed."""
        for at in reversed(range(len(self.kept))):
            if self.kept[at] is message:
                del self.kept[at]
                return

    def hear_begin(self, number: int) -> None:
        """The other end begins again at `number`. Raises ValueError when messages between are lost."""
        if not 0 <= number <= self.received:
            raise ValueError(f"the peer begins again at message {number}, and {self.received} was due")
        self.skip = self.received - number

    def is_new(self) -> bool:
        """A message has come. False: it is one received before."""
        if self.skip:
            self.skip -= 1
            self.doubles += 1
            return False
        self.received += 1
        return True

    def is_time_to_tell(self) -> bool:
        return self.received - self.told >= TOLD_EVERY
