"""Those who call on a listener while a run goes on: kept until it is told that they may, or that they may not.

Here: Callers, one place per process and scheme. Not here: accepting (links.py, which calls this). A new life may call before we are told
of it: both are told at once, over different lines.
"""

from __future__ import annotations

import asyncio

from flowrt.transports.contract import Channel, Identity


class Callers:
    """Channels that came in, by process and scheme: the last one of each. Bounded by what is planned."""

    def __init__(self) -> None:
        self._here: dict[tuple[str, str], Channel] = {}
        self._changed: asyncio.Future[None] | None = None

    def put(self, channel: Channel, scheme: str) -> Channel | None:
        """Keep it. Returns the one that it replaces, to be closed."""
        key = channel.peer.name, scheme
        replaced, self._here[key] = self._here.get(key), channel
        if self._changed is not None and not self._changed.done():
            self._changed.set_result(None)
        return replaced

    def take(self, life: Identity, scheme: str) -> Channel | None:
        """The channel of this very life, if it has called."""
        key = life.name, scheme
        channel = self._here.get(key)
        return self._here.pop(key) if channel is not None and channel.peer == life else None

    async def wait(self, life: Identity, scheme: str) -> Channel:
        """The channel of this very life, once it calls. One of another life stays: it may be a later one, of which we have yet to hear."""
        while (channel := self.take(life, scheme)) is None:
            if self._changed is None or self._changed.done():
                self._changed = asyncio.get_running_loop().create_future()
            await asyncio.wait([self._changed])  # several may wait, and a cancelled one takes nobody else along
        return channel

    async def aclose(self) -> None:
        """Close whoever was never let in."""
        while self._here:
            await self._here.popitem()[1].aclose()
