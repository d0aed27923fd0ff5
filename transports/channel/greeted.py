"""Implements the parts shared by channels over another medium than the socket of their handshake."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from abc import abstractmethod

from flowrt.transports.channel.flow_controlled import FlowControlledChannel
from flowrt.transports.channel.peer_watch import PeerWatch
from flowrt.transports.channel.rendezvous import Meeting
from flowrt.transports.contract import LINGER_SECONDS
from flowrt.transports.errors import HandshakeError


class GreetedChannel(FlowControlledChannel):
    """One end of a channel whose first frames, the greetings, prove that the medium connects the two ends of the handshake.

    The socket of the handshake stays open; its end reports the peer's.
    """

    def __init__(self, meeting: Meeting) -> None:
        super().__init__(meeting.limits, meeting.peer)
        self._is_listener = meeting.handshake.role == "listener"
        self.greeted: asyncio.Future[None] = self._loop.create_future()
        self._finished: asyncio.Future[None] = self._loop.create_future()  # for aclose: the peer has received everything, or has ended
        self._peer_watch = self._watch_peer(meeting.sock)

    def _watch_peer(self, sock: socket.socket) -> PeerWatch:
        return PeerWatch(sock, self._on_peer_end)

    @abstractmethod
    def _on_peer_end(self, reason: str | None) -> None:
        """Handles the end of the socket, see PeerWatch. Frames that the peer sent before may not have been read yet."""

    @abstractmethod
    def _send_close(self) -> None:
        """Sends the end; the peer confirms that it has received everything before."""

    async def opened(self) -> None:
        await asyncio.shield(self.greeted)

    def _fail(self, reason: str, nonsense: bool = False) -> None:
        self._break(reason, nonsense)
        self._finish()
        if not self.greeted.done():
            self.greeted.set_exception(HandshakeError(reason))
            self.greeted.exception()  # retrieved, even if no task waits

    def _finish(self) -> None:
        if not self._finished.done():
            self._finished.set_result(None)

    def _hang_up(self) -> None:
        self._peer_watch.close()

    async def _close_in_order(self) -> None:
        """Sends the end and waits for its confirmation, unless the channel has ended already."""
        self._inbox.clear()
        if not self._ended and self._broken is None:
            self._send_close()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LINGER_SECONDS):
                    await self._finished
