"""Implements `AcknowledgementSocket`: the socket of the handshake also carries acknowledgements, which wait behind no payload there."""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable

from flowrt.transports.channel.peer_watch import PeerWatch

_TOTALS = struct.Struct("<QQ")  # messages and bytes taken since the start
_RECORDS_AT_ONCE = 256


class AcknowledgementSocket(PeerWatch):
    """A PeerWatch whose peer sends totals of taken messages. Calls `on_totals(messages, payload_bytes)` for the latest that have arrived.

    Only for a socket within this host: what it carries is not encrypted.
    """

    def __init__(self, sock: socket.socket, on_end: Callable[[str | None], None], on_totals: Callable[[int, int], None]) -> None:
        super().__init__(sock, on_end)
        self._on_totals = on_totals

    def send(self, messages: int, payload_bytes: int) -> bool:
        """Sends the totals now. Returns False when the socket is full or closed: the peer is stopped, or ends."""
        try:
            return self._socket.send(_TOTALS.pack(messages, payload_bytes)) == _TOTALS.size
        except OSError:
            return False

    def _read(self) -> str | None:
        data = self._socket.recv(_RECORDS_AT_ONCE * _TOTALS.size)
        while data:
            if len(data) % _TOTALS.size:
                return "the peer sent a part of an acknowledgement"
            self._on_totals(*_TOTALS.unpack_from(data, len(data) - _TOTALS.size))
            data = self._socket.recv(_RECORDS_AT_ONCE * _TOTALS.size)
        return None
