"""Resend buffer: counts what one end of a link has sent and received over all its channels, and keeps unacknowledged messages. Pure."""

from __future__ import annotations

from collections import deque

from flowrt.transports.wire.message import Message

ACK_EVERY = 16  # messages received per acknowledgement


class ResendBuffer:
    """Resend buffer of one end, over all its channels. Pure.

    `kept` holds the messages that the other end may not have received, oldest first. `first` is the number of the first of them.
    """

    __slots__ = ("acknowledged", "first", "kept", "num_duplicates", "num_resent", "received", "skip")

    def __init__(self) -> None:
        self.kept: deque[Message] = deque()
        self.first = self.received = self.acknowledged = 0
        self.skip = 0  # number of duplicates that come next
        self.num_duplicates = self.num_resent = 0

    def begin(self) -> list[Message]:
        """Start a new channel. Returns the messages to resend on it first."""
        self.num_resent += len(self.kept)
        return list(self.kept)

    def acknowledge(self, number: int) -> None:
        """Acknowledge that the other end has taken `number` messages in total. Raises ValueError when that number is impossible."""
        if not self.first <= number <= self.first + len(self.kept):
            raise ValueError(f"the peer acknowledges {number} messages of {self.first + len(self.kept)}")
        while self.first < number:
            self.kept.popleft()
            self.first += 1

    def forget(self, message: Message) -> None:
        """Remove a kept message that was not sent."""
        for at in reversed(range(len(self.kept))):
            if self.kept[at] is message:
                del self.kept[at]
                return

    def resume(self, number: int) -> None:
        """The other end resends from message `number`. Raises ValueError when messages in between are lost."""
        if not 0 <= number <= self.received:
            raise ValueError(f"the peer resumes at message {number}, expected at most {self.received}")
        self.skip = self.received - number

    def is_new(self) -> bool:
        """Count a received message. Returns False for a duplicate."""
        if self.skip:
            self.skip -= 1
            self.num_duplicates += 1
            return False
        self.received += 1
        return True

    def is_ack_due(self) -> bool:
        return self.received - self.acknowledged >= ACK_EVERY
