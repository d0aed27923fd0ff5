"""The four ways a channel ends, and what a transport may raise besides. No other exception leaves `transports/`."""

from __future__ import annotations


class TransportError(Exception):
    """Root of everything a transport raises."""


class ClosedChannelError(TransportError):
    """You closed this channel (or listener) yourself, before or during the call."""


class BrokenChannelError(TransportError):
    """The world broke it: the peer died, the connection was reset, bytes arrived that are not a message."""


class EndOfChannel(TransportError):  # noqa: N818  (it is the normal end, as StopAsyncIteration is)
    """The peer closed in order and everything it sent has been received."""


class BusyChannelError(TransportError):
    """Two tasks at once in `recv` of one channel, which serves one."""


class HandshakeError(TransportError):
    """The peer did not prove the key, or speaks another version; both versions are in the text."""


class LimitError(TransportError):
    """A message is larger than the channel's limits allow; raised by `send` before a byte leaves."""


class AddressError(TransportError, ValueError):
    """Not an address of this transport, or nobody listens there."""


class UnavailableError(TransportError):
    """This transport cannot work here; the text says why and what to install."""


class InvalidMessageError(TransportError, ValueError):
    """What was given to `send` is not a message: an unknown dtype, a buffer of another size than its spec. Nothing was sent."""


class WindowError(TransportError):
    """No window of this channel has that key, it was closed, or the place or flag is outside of it. Nothing was written or raised."""
