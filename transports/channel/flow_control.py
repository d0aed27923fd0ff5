"""Implements both halves of the credit window that bounds the messages and payload bytes in flight on a channel, without I/O."""

from __future__ import annotations

from flowrt.transports.contract import Limits
from flowrt.transports.wire.codec import WireError


class SendWindow:
    """The sender's half: counts what was sent and what the receiver reported as taken."""

    __slots__ = ("capacity_bytes", "capacity_messages", "sent_bytes", "sent_messages", "taken_bytes", "taken_messages")

    def __init__(self, limits: Limits) -> None:
        self.capacity_bytes = limits.capacity_bytes
        self.capacity_messages = limits.capacity_messages
        self.sent_bytes = self.sent_messages = self.taken_bytes = self.taken_messages = 0

    def fits(self, payload_bytes: int) -> bool:
        """Whether a message of `payload_bytes` may be sent now. A message larger than the window may be sent when the window is empty."""
        on_the_way = self.sent_messages - self.taken_messages
        return not on_the_way or (
            on_the_way < self.capacity_messages and self.sent_bytes - self.taken_bytes + payload_bytes <= self.capacity_bytes
        )

    def add(self, payload_bytes: int) -> None:
        """Counts a sent message."""
        self.sent_messages += 1
        self.sent_bytes += payload_bytes

    def update(self, taken_messages: int, taken_bytes: int) -> None:
        """Applies the receiver's totals since the start. Raises WireError when they decrease or exceed what was sent."""
        if not (self.taken_messages <= taken_messages <= self.sent_messages and self.taken_bytes <= taken_bytes <= self.sent_bytes):
            raise WireError(f"the peer reports {taken_messages} messages as taken, {self.sent_messages} were sent")
        self.taken_messages = taken_messages
        self.taken_bytes = taken_bytes


class ReceiveWindow:
    """The receiver's half: counts what arrived and what the user took, and decides when to report to the sender."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.arrived_bytes = self.taken_bytes = self.reported_bytes = 0
        self.arrived_messages = self.taken_messages = self.reported_messages = 0
        self.sender_waits = False

    def arrived(self, payload_bytes: int) -> None:
        """Counts an arrived message. Raises WireError when the peer had no credit for it."""
        self.arrived_messages += 1
        self.arrived_bytes += payload_bytes
        on_the_way = self.arrived_messages - self.reported_messages
        if on_the_way > 1 and (
            on_the_way > self.limits.capacity_messages or self.arrived_bytes - self.reported_bytes > self.limits.capacity_bytes
        ):
            raise WireError("the peer sent more than the channel may hold")

    def took(self, payload_bytes: int) -> bool:
        """Counts a message taken by the user. Returns True when a report to the sender is due."""
        self.taken_messages += 1
        self.taken_bytes += payload_bytes
        return (
            self.sender_waits
            or 2 * (self.taken_messages - self.reported_messages) >= self.limits.capacity_messages
            or 2 * (self.taken_bytes - self.reported_bytes) >= self.limits.capacity_bytes
        )

    def report(self) -> tuple[int, int]:
        """Returns the totals (messages, bytes) to report to the sender, and marks them as reported."""
        self.reported_messages = self.taken_messages
        self.reported_bytes = self.taken_bytes
        self.sender_waits = False
        return self.taken_messages, self.taken_bytes
