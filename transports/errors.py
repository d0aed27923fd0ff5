"""The errors of transports, among them the four ways a channel ends. No other exception leaves `transports/`."""

from __future__ import annotations


class TransportError(Exception):
    """Root of everything a transport raises."""


class ClosedChannelError(TransportError):
    """This side closed the channel (or listener), before or during the call."""


class BrokenChannelError(TransportError):
    """The channel broke: the peer died, the connection was reset, or invalid bytes arrived."""


class EndOfChannel(TransportError):  # noqa: N818  (it is the normal end, as StopAsyncIteration is)
    """The peer closed in order, and everything that it sent was received."""


class BusyChannelError(TransportError):
    """Two tasks are in `recv` of one channel at once."""


class HandshakeError(TransportError):
    """The peer did not prove the key, or has another protocol version; the text names both versions."""


class LimitError(TransportError):
    """A message is larger than the channel's limits allow; raised by `send` before any byte is sent."""


class AddressError(TransportError, ValueError):
    """Not an address of this transport, or no process listens there."""


class UnavailableError(TransportError):
    """This transport cannot work here; the text has the reason and what to install."""


class InvalidMessageError(TransportError, ValueError):
    """The argument of `send` is not a valid message: an unknown dtype, a buffer of another size than its spec. Nothing was sent."""
