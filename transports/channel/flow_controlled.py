"""`FlowControlledChannel`: the inbox and the credit window of channels whose receiver reports what was taken in messages of its own.

Both ends read as soon as data arrives; the window bounds what can arrive.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import deque

from flowrt.transports.channel.flow_control import ReceiveWindow, SendWindow
from flowrt.transports.channel.message_windows import RESERVED
from flowrt.transports.channel.queued import QueuedChannel
from flowrt.transports.contract import Identity, Limits
from flowrt.transports.wire.codec import Envelope, assemble, is_repeat
from flowrt.transports.wire.message import Message


class FlowControlledChannel(QueuedChannel):
    """An end with an inbox of arrived messages; subclasses send and receive TAKEN and WAITING."""

    windows_by_message = True

    def __init__(self, limits: Limits, peer: Identity) -> None:
        super().__init__(limits, peer)
        self._sending = SendWindow(limits)
        self._asked_for_room = False
        self._receiving = ReceiveWindow(limits)
        self._inbox: deque[tuple[Message, int]] = deque()
        self._expected = 0

    @abstractmethod
    def _say_taken(self, messages: int, payload_bytes: int) -> None:
        """Reports to the peer how much has been taken since the start."""

    @abstractmethod
    def _say_waiting(self) -> None:
        """Requests a report from the peer as soon as more is taken."""

    def _count_sent(self, payload_bytes: int) -> None:
        self._sending.add(payload_bytes)
        self._counters.messages_sent += 1
        self._counters.bytes_sent += payload_bytes

    def _hear_of_windows(self, message: Message, payload_bytes: int) -> None:
        """A message that only the channel itself looks at, at once: its credit goes back whatever the user has taken."""
        self._counters.messages_received += 1
        self._counters.bytes_received += payload_bytes
        if self._receiving.took(payload_bytes):
            self._tell_taken()
        if not self._closed:
            self._message_windows().arrived(message)

    def _num_sent(self) -> int:
        return self._sending.sent_messages - self._num_posted()

    def _num_taken(self) -> int:
        # Messages about windows are taken out of turn. Counting them all as taken last is right in the end and never too early.
        return self._sending.taken_messages - self._num_posted()

    def _num_posted(self) -> int:
        return 0 if self._windows is None else self._windows.num_posted

    def _hear_taken(self, messages: int, payload_bytes: int) -> None:
        """The peer's totals. Raises WireError when they cannot be."""
        self._sending.update(messages, payload_bytes)
        self._asked_for_room = False
        self._wake_sender()

    def _hear_waiting(self) -> None:
        self._receiving.sender_waits = True
        if self._receiving.taken_messages > self._receiving.told_messages:
            self._tell_taken()

    def _deliver(self, envelope: Envelope, buffers: list[object] | list[bytearray], payload_bytes: int) -> None:
        """A message has arrived whole. Raises WireError when one before it is missing."""
        if is_repeat(envelope.sequence, self._expected):
            self._counters.messages_dropped += 1
            return
        self._expected += 1
        if envelope.kind[:1] == RESERVED:
            self._hear_of_windows(assemble(envelope, buffers), payload_bytes)
        elif not self._closed:
            self._inbox.append((assemble(envelope, buffers), payload_bytes))
            self._wake_receiver()

    def _take(self) -> Message | None:
        if not self._inbox:
            return None
        message, payload_bytes = self._inbox.popleft()
        if self._receiving.took(payload_bytes):
            self._tell_taken()
        self._counters.messages_received += 1
        self._counters.bytes_received += payload_bytes
        return message

    def _expect_room(self) -> bool:
        if not self._asked_for_room:
            self._asked_for_room = True
            self._say_waiting()
        return False

    def _tell_taken(self) -> None:
        if not self._ended and self._broken is None:
            self._say_taken(*self._receiving.told())
