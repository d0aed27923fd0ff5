"""Channels of processes that connect during a run, kept until the launcher announces their incarnation.

A new incarnation may connect before this worker knows of it: the launcher notifies both at once, over different connections.
"""

from __future__ import annotations

import asyncio

from flowrt.transports.contract import Channel, Identity


class Callers:
    """Accepted channels by process and scheme, the latest of each. The planned links bound their number."""

    def __init__(self) -> None:
        self._here: dict[tuple[str, str], Channel] = {}
        self._changed: asyncio.Future[None] | None = None

    def put(self, channel: Channel, scheme: str) -> Channel | None:
        """Keep a channel. Returns the one that it replaces, which the caller closes."""
        key = channel.peer.name, scheme
        replaced, self._here[key] = self._here.get(key), channel
        if self._changed is not None and not self._changed.done():
            self._changed.set_result(None)
        return replaced

    def take(self, identity: Identity, scheme: str) -> Channel | None:
        """The channel of exactly this incarnation, if it has connected."""
        key = identity.name, scheme
        channel = self._here.get(key)
        return self._here.pop(key) if channel is not None and channel.peer == identity else None

    async def wait(self, identity: Identity, scheme: str) -> Channel:
        """The channel of exactly this incarnation, once it connects. A channel of another one stays: it may be a later incarnation."""
        while (channel := self.take(identity, scheme)) is None:
            if self._changed is None or self._changed.done():
                self._changed = asyncio.get_running_loop().create_future()
            await asyncio.wait([self._changed])  # several tasks may wait; cancelling one does not cancel the others
        return channel

    async def aclose(self) -> None:
        """Close the channels that were never taken."""
        while self._here:
            await self._here.popitem()[1].aclose()
