"""Links: the channels of one worker to the others, opened here and nowhere else.

Here: Link (one channel, its reader and its outbox), Links (all of a worker's: who connects to whom, over what). Not here: what
a message means (flowrt/dataflow), transports themselves. Used by flowrt/workers.

Posting to a link never waits: every message either holds a credit of its edge or gives one back, so the outbox is bounded by
the graph. A peer that stops reading fills its own outbox and delays nobody else.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass

from flowrt.actors.fallback import FallbackChannel, Reopen, reopener
from flowrt.actors.mailbox import Mailbox, MailboxClosedError
from flowrt.actors.opening import FirstUseChannel
from transports.contract import Channel, ChannelStatistics, Identity, Limits, Listener, Transport
from transports.errors import BrokenChannelError, ClosedChannelError, EndOfChannel
from transports.message import Message

LOST = (BrokenChannelError, ClosedChannelError, EndOfChannel)  # the channel is over; any other error is the message's


class LinkLostError(Exception):
    """The peer of a link is gone or broke its word. `peer` is its process name."""

    def __init__(self, peer: str, reason: str) -> None:
        super().__init__(f"lost {peer}: {reason}")
        self.peer, self.reason = peer, reason


class Link:
    """One channel to one process. `on_message` is called for each message, in order, and must not wait; `on_pause` after the last
    of those that are here.

    `run` reads and sends until the peer ends (returns) or breaks (LinkLostError).
    """

    def __init__(
        self, channel: Channel, capacity_messages: int, on_message: Callable[[Message], None], on_pause: Callable[[], None] | None = None
    ) -> None:
        self._channel = channel
        self._on_message = on_message
        self._on_pause = on_pause or _nothing
        self._outbox: Mailbox[Message] = Mailbox(capacity_messages)
        self._waiting = self._outbox.items

    @property
    def peer(self) -> Identity:
        return self._channel.peer

    @property
    def scheme(self) -> str:
        return self._channel.scheme

    def statistics(self) -> ChannelStatistics:
        return self._channel.statistics()

    def fallback_text(self) -> str:
        """What became of this link when its transport broke; empty when none did."""
        return self._channel.text() if isinstance(self._channel, FallbackChannel) else ""

    def post(self, message: Message) -> None:
        """Send soon, in order. Raises OverflowError for one more message than the graph's credits allow, and LimitError or
        InvalidMessageError for one that this channel cannot carry.

        A link that is broken swallows what is posted: its `run` has told, or is about to tell, its owner.
        """
        if not self._waiting:
            try:
                if self._channel.send_nowait(message):
                    return
            except LOST:
                return  # `run` sees the same and says so
        try:
            self._outbox.post(message)
        except MailboxClosedError:
            return

    async def run(self) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                sender = group.create_task(self._send(), name=f"send to {self.peer.name}")
                try:
                    await self._read()
                finally:
                    sender.cancel()
        except* LOST as errors:
            raise LinkLostError(self.peer.name, str(errors.exceptions[0]) or type(errors.exceptions[0]).__name__) from errors

    async def flush(self) -> None:
        """Wait until nothing is left in the outbox."""
        await self._outbox.wait_empty()

    async def aclose(self) -> None:
        self._outbox.close()
        await self._channel.aclose()

    async def _read(self) -> None:
        channel, on_message, on_pause = self._channel, self._on_message, self._on_pause
        try:
            while True:
                on_message(await channel.recv())
                try:
                    while (message := channel.recv_nowait()) is not None:
                        on_message(message)
                finally:
                    on_pause()  # also before the channel's end is told
        except EndOfChannel:
            return

    async def _send(self) -> None:
        try:
            while True:
                message = await self._outbox.wait_item()
                await self._channel.send(message)
                self._outbox.take_nowait()
                del message  # while this sleeps it must hold no tensor
        except MailboxClosedError:
            return


@dataclass(frozen=True)
class LinkPlan:
    """One link this worker needs: to whom, over which scheme, with which bounds, and who calls whom."""

    peer: str
    scheme: str
    limits: Limits
    capacity_messages: int
    connects: bool
    link: str | None = None  # the profile that the channel emulates
    fallbacks: tuple[str, ...] = ()  # schemes to carry on with, in this order, should the channel break
    first_use: bool = False  # open when somebody has something to say, by whoever it is; both ends plan alike


class Links:
    """All links of one worker. Use: `listen`, tell the addresses, `open` with everybody's addresses, then `run`.

    The side that comes first in the graph connects, the other one accepts; a pair may have one link per scheme. `wrap` may put each new
    channel into another (an emulated link), before anything is sent; both ends do alike.
    """

    def __init__(
        self,
        identity: Identity,
        key: bytes,
        plans: Iterable[LinkPlan],
        transport: Callable[[str], Transport],
        on_message: Callable[[Message], None],
        on_pause: Callable[[], None] | None = None,
        wrap: Callable[[LinkPlan, Channel], Channel] = lambda plan, channel: channel,
    ) -> None:
        self._identity = identity
        self._key = key
        self._plans = {(plan.peer, plan.scheme): plan for plan in plans}
        self._transport = transport
        self._on_message = on_message
        self._on_pause = on_pause
        self._wrap = wrap
        self._listeners: dict[str, Listener] = {}
        self._links: dict[tuple[str, str], Link] = {}
        self._unopened: dict[tuple[str, str], FirstUseChannel] = {}  # those that open, or have opened, at their first use

    def __getitem__(self, key: tuple[str, str]) -> Link:
        """The link to (process, scheme). Raises KeyError when there is none yet."""
        return self._links[key]

    def values(self) -> list[Link]:
        return list(self._links.values())

    def fallbacks(self) -> tuple[str, ...]:
        """What became of links whose transport broke, a sentence each."""
        return tuple(text for link in self._links.values() if (text := link.fallback_text()))

    async def listen(self) -> dict[str, str]:
        """Listen wherever somebody will connect; returns scheme -> address."""
        called = [plan for plan in self._plans.values() if plan.first_use or not plan.connects]
        for scheme in sorted({plan.scheme for plan in called}):
            limits = _widest([plan.limits for plan in called if plan.scheme == scheme])
            self._listeners[scheme] = await self._transport(scheme).listen(f"{scheme}://", limits, self._key, self._identity)
        return {scheme: listener.address for scheme, listener in self._listeners.items()}

    async def open(self, addresses: Mapping[str, Mapping[str, str]], incarnations: Mapping[str, str]) -> None:
        """Connect and accept until every planned link is up, but for those that open at their first use. `addresses`: process -> scheme
        -> address.

        A caller that is not the incarnation named is closed again. Raises TransportError when somebody cannot be reached.
        """
        async with asyncio.TaskGroup() as group:
            for scheme, listener in self._listeners.items():
                group.create_task(self._accept(scheme, listener, incarnations), name=f"accept {scheme}")
            for plan in self._plans.values():
                if plan.first_use:
                    self._expect(plan, addresses[plan.peer][plan.scheme], Identity(plan.peer, incarnations[plan.peer]))
                elif plan.connects:
                    group.create_task(self._connect(plan, addresses[plan.peer][plan.scheme]), name=f"connect {plan.peer}")

    async def run(self) -> None:
        """Read and send on all links until cancelled. Raises (in a group) LinkLostError when a peer goes.

        A peer that ends in order ends its link only.
        """
        async with asyncio.TaskGroup() as callers:
            schemes = {scheme for _, scheme in self._unopened}
            accepting = [callers.create_task(self._accept_first_uses(scheme), name=f"accept {scheme}") for scheme in schemes]
            async with asyncio.TaskGroup() as group:
                for link in self._links.values():
                    group.create_task(link.run(), name=f"link to {link.peer.name}")
            for task in accepting:
                task.cancel()

    async def aclose(self) -> None:
        """Close every link and listener. Idempotent."""
        async with AsyncExitStack() as stack:
            for listener in self._listeners.values():
                stack.push_async_callback(listener.aclose)
            for link in self._links.values():
                stack.push_async_callback(link.aclose)

    async def _connect(self, plan: LinkPlan, address: str) -> None:
        channel = await self._transport(plan.scheme).connect(address, plan.limits, self._key, self._identity)
        self._add(plan, channel)

    async def _accept(self, scheme: str, listener: Listener, incarnations: Mapping[str, str]) -> None:
        missing = {peer for (peer, of), plan in self._plans.items() if of == scheme and not plan.connects and not plan.first_use}
        while missing:
            channel = await listener.accept()
            peer = channel.peer
            if peer.name not in missing or peer.incarnation != incarnations.get(peer.name):
                await channel.aclose()
                continue
            missing.discard(peer.name)
            self._add(self._plans[peer.name, scheme], channel)

    def _expect(self, plan: LinkPlan, address: str, peer: Identity) -> None:
        """A link that opens at its first use."""

        async def call() -> Channel:
            return self._wrap(plan, await self._transport(plan.scheme).connect(address, plan.limits, self._key, self._identity))

        channel = self._unopened[plan.peer, plan.scheme] = FirstUseChannel(peer, plan.scheme, call, plan.connects)
        self._add(plan, channel)

    async def _accept_first_uses(self, scheme: str) -> None:
        while True:
            channel = await self._listeners[scheme].accept()
            expected = self._unopened.get((channel.peer.name, scheme))
            if expected is None or channel.peer != expected.peer:
                await channel.aclose()
            else:
                expected.offer(self._wrap(self._plans[channel.peer.name, scheme], channel))

    def _add(self, plan: LinkPlan, channel: Channel) -> None:
        wrapped = channel if plan.first_use else self._wrap(plan, channel)
        if plan.fallbacks:
            wrapped = FallbackChannel(wrapped, plan.fallbacks, self._reopener(plan, channel.peer))
        self._links[plan.peer, plan.scheme] = Link(wrapped, plan.capacity_messages, self._on_message, self._on_pause)

    def _reopener(self, plan: LinkPlan, peer: Identity) -> Reopen:
        return reopener(
            plan.connects, self._transport, plan.limits, self._key, self._identity, peer, lambda channel: self._wrap(plan, channel)
        )


def _nothing() -> None:
    pass


def _widest(limits: list[Limits]) -> Limits:
    """Bounds that fit every expected caller: a listener does not know yet who it will be."""
    return Limits(
        max_header_bytes=max(each.max_header_bytes for each in limits),
        max_tensors=max(each.max_tensors for each in limits),
        max_message_bytes=max(each.max_message_bytes for each in limits),
        capacity_messages=max(each.capacity_messages for each in limits),
        capacity_bytes=max(each.capacity_bytes for each in limits),
    )
