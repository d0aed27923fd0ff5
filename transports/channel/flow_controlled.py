"""Implements the inbox and the credit window of channels whose receiver reports taken messages in frames of its own.

Both ends read data as soon as it arrives; the credit window bounds how much can arrive.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import deque

from flowrt.transports.channel.flow_control import ReceiveWindow, SendWindow
from flowrt.transports.channel.queued import QueuedChannel
from flowrt.transports.contract import Identity, Limits
from flowrt.transports.wire.codec import Envelope, Part, assemble, encode, is_repeat
from flowrt.transports.wire.message import Message


class FlowControlledChannel(QueuedChannel):
    """One end with an inbox of arrived messages; subclasses send and receive the TAKEN and WAITING frames."""

    fills_private_memory = True  # no other process can write what is delivered

    def __init__(self, limits: Limits, peer: Identity) -> None:
        super().__init__(limits, peer)
        self._sending = SendWindow(limits)
        self._has_requested_room = False
        self._receiving = ReceiveWindow(limits)
        self._inbox: deque[tuple[Message, int]] = deque()
        self._expected = 0

    @abstractmethod
    def _send_taken(self, messages: int, payload_bytes: int) -> None:
        """Sends the totals taken since the start to the peer."""

    @abstractmethod
    def _send_waiting(self) -> None:
        """Requests a report from the peer as soon as its user takes more."""

    @abstractmethod
    def _send_message(self, parts: list[Part], payload_bytes: int) -> None:
        """Sends an encoded message, for which there is room."""

    def _transmit(self, message: Message) -> bool:
        parts = encode(message, self._sending.sent_messages, self.limits)
        payload_bytes = sum(map(len, parts)) - len(parts[0])
        if not self._sending.fits(payload_bytes):
            return False
        self._sending.add(payload_bytes)
        self._counters.messages_sent += 1
        self._counters.bytes_sent += payload_bytes
        self._send_message(parts, payload_bytes)
        return True

    def _on_taken(self, messages: int, payload_bytes: int) -> None:
        """Applies the peer's totals. Raises WireError when they are impossible."""
        self._sending.update(messages, payload_bytes)
        self._has_requested_room = False
        self._wake_sender()

    def _on_waiting(self) -> None:
        self._receiving.sender_waits = True
        if self._receiving.taken_messages > self._receiving.reported_messages:
            self._report_taken()

    def _deliver(self, envelope: Envelope, buffers: list[object] | list[bytearray], payload_bytes: int) -> None:
        """Adds a complete message to the inbox, or drops a repeated one. Raises WireError when an earlier message is missing."""
        if is_repeat(envelope.sequence, self._expected):
            self._counters.messages_dropped += 1
            return
        self._expected += 1
        if not self._closed:
            self._inbox.append((assemble(envelope, buffers, self.fills_private_memory), payload_bytes))
            self._wake_receiver()

    def _take(self) -> Message | None:
        if not self._inbox:
            return None
        message, payload_bytes = self._inbox.popleft()
        if self._receiving.took(payload_bytes):
            self._report_taken()
        self._counters.messages_received += 1
        self._counters.bytes_received += payload_bytes
        return message

    def _expect_room(self) -> bool:
        if not self._has_requested_room:
            self._has_requested_room = True
            self._send_waiting()
        return False

    def _report_taken(self) -> None:
        if not self._ended and self._broken is None:
            self._send_taken(*self._receiving.report())
