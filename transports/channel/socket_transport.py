"""Implements `listen` and `connect` of the transports whose channels begin with a handshake over a socket."""

from __future__ import annotations

import contextlib
from abc import abstractmethod

from flowrt.transports.channel.queued import QueuedChannel
from flowrt.transports.channel.rendezvous import LocalEnd, Meeting, Offer, SocketListener, free_name, meet
from flowrt.transports.contract import Channel, Identity, Limits, Listener, Transport
from flowrt.transports.errors import UnavailableError
from flowrt.transports.wire.address import expect_scheme
from flowrt.transports.wire.handshake import check_key


class SocketTransport(Transport):
    """A scheme whose channels begin with a handshake over a socket. A subclass makes both ends of a channel."""

    def _split_name(self, rest: str) -> tuple[str, str]:
        """Splits what follows `scheme://` into the name and the option (see LocalEnd), "" without one."""
        return rest, ""

    @abstractmethod
    def _accept(self, meeting: Meeting) -> QueuedChannel:
        """The listener's end; see SocketListener."""

    def _offer(self, meeting: Meeting, on_failure: contextlib.ExitStack) -> Offer:
        """The connector's part, once the listener has proved the key and the limits are agreed on. Callbacks in `on_failure` release what
        this allocates; they are called when the channel cannot be made. By default, both ends are made by `_accept`."""
        return Offer(b"", [], self._accept)

    async def listen(self, address: str, limits: Limits, key: bytes, identity: Identity) -> Listener:
        check_key(key)
        name, option = self._split_name(expect_scheme(address, self.scheme))
        return SocketListener(LocalEnd(self.scheme, name or free_name(), option, limits, key, identity), self._accept)

    async def connect(self, address: str, limits: Limits, key: bytes, identity: Identity) -> Channel:
        check_key(key)
        name, option = self._split_name(expect_scheme(address, self.scheme))
        offers: list[Offer] = []

        def offer(meeting: Meeting) -> Offer:
            try:
                offers.append(self._offer(meeting, on_failure))
            except OSError as error:
                raise UnavailableError(f"{self.scheme} cannot be set up: {error.strerror}") from error
            return offers[0]

        with contextlib.ExitStack() as on_failure:
            meeting = await meet(LocalEnd(self.scheme, name, option, limits, key, identity), offer)
            on_failure.callback(meeting.sock.close)
            try:
                channel = offers[0].make_channel(meeting)
            except OSError as error:
                raise UnavailableError(f"{self.scheme} cannot be set up: {error.strerror}") from error
            on_failure.pop_all()
        try:
            await channel.opened()
        except BaseException:
            await channel.aclose()
            raise
        return channel
