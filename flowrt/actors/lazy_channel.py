"""The channel of a link that is opened at its first use. lazy_opener.py opens it; from then on this wrapper costs nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from flowrt.actors.lazy_opener import Call, LazyOpener
from flowrt.transports.contract import Channel, ChannelStatistics, Identity, Limits
from flowrt.transports.errors import BrokenChannelError, BusyChannelError, ClosedChannelError
from flowrt.transports.wire.codec import check_limits
from flowrt.transports.wire.message import Message


class LazyChannel(Channel):
    """One end of a link to `peer` over `scheme`, which `opener` opens when either end sends. `call` and `first` are those of LazyOpener;
    `limits` are enforced before the channel is open, too. Calls raise BrokenChannelError when it cannot be opened.
    """

    def __init__(self, peer: Identity, scheme: str, limits: Limits, call: Call, first: bool) -> None:
        self.peer, self._scheme, self._limits = peer, scheme, limits
        self.opener = LazyOpener(peer, scheme, call, first, self._use, self._fail)
        self._channel: Channel | None = None
        self._opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()  # done when it is open, or never will be
        self._failure: str | None = None
        self._closed = self._receiving = False

    @property
    def scheme(self) -> str:
        return self._scheme

    @property
    def copies_at_once(self) -> bool:  # type: ignore[override]
        return self._channel is not None and self._channel.copies_at_once

    def has_priority(self, message: Message) -> bool:
        """Whether the open channel lets the message overtake (EmulatedChannel)."""
        return getattr(self._channel, "has_priority", lambda message: False)(message)

    def _use(self, channel: Channel) -> None:
        self._channel = channel
        self.send_nowait = channel.send_nowait  # type: ignore[method-assign]
        self.send = channel.send  # type: ignore[method-assign]
        self.recv_nowait = channel.recv_nowait  # type: ignore[method-assign]
        self.recv = channel.recv  # type: ignore[method-assign]
        self._wake()

    def send_nowait(self, message: Message) -> bool:
        check_limits(message, message.payload_bytes, self._limits)  # now, while its sender can get the error
        self.opener.want()
        self._raise_if_ended()
        return False

    async def send(self, message: Message) -> None:
        self.opener.want()
        await (await self._wait_open()).send(message)

    def recv_nowait(self) -> Message | None:
        if self._receiving:
            raise BusyChannelError("another task is in recv of this channel")
        self._raise_if_ended()
        return None

    async def recv(self) -> Message:
        if self._receiving:
            raise BusyChannelError("another task is in recv of this channel")
        self._receiving = True
        try:
            channel = await self._wait_open()
        finally:
            self._receiving = False
        return await channel.recv()

    async def read(self, on_message: Callable[[Message], None], on_pause: Callable[[], None]) -> None:
        self._receiving = True
        try:
            channel = await self._wait_open()
        finally:
            self._receiving = False
        await channel.read(on_message, on_pause)

    async def _wait_open(self) -> Channel:
        while True:
            self._raise_if_ended()
            if self._channel is not None:
                return self._channel
            await asyncio.wait([self._opened])

    def _fail(self, reason: str) -> None:
        self._failure = self._failure or reason
        self._wake()

    def _wake(self) -> None:
        if not self._opened.done():
            self._opened.set_result(None)

    def _raise_if_ended(self) -> None:
        if self._closed:
            raise ClosedChannelError("this channel was closed")
        if self._failure is not None:
            raise BrokenChannelError(self._failure)

    def abort(self, reason: str) -> None:
        if self._channel is not None:
            self._channel.abort(reason)
        self._fail(reason)

    async def aclose(self) -> None:
        self._closed = True
        self._wake()
        await self.opener.aclose()
        if self._channel is not None:
            await self._channel.aclose()

    @property
    def closed(self) -> bool:
        return self._closed or self._failure is not None or (self._channel is not None and self._channel.closed)

    def statistics(self) -> ChannelStatistics:
        return ChannelStatistics() if self._channel is None else self._channel.statistics()
