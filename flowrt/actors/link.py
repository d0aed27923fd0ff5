"""One link: a channel to one process, its reader and its outbox.

Posting to a link never waits. Every message holds a credit of its edge or returns one, so the graph bounds the outbox. A peer that stops
reading fills its own outbox and delays no other peer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from contextlib import suppress

from flowrt.actors.mailbox import Mailbox, MailboxClosedError
from flowrt.transports.contract import Channel, ChannelStatistics, Identity
from flowrt.transports.errors import BrokenChannelError, ClosedChannelError, EndOfChannel, TransportError
from flowrt.transports.wire.codec import with_own_tensors
from flowrt.transports.wire.message import Message

LOST = (BrokenChannelError, ClosedChannelError, EndOfChannel)  # the channel has ended; any other error concerns one message
CREDIT = "credit"  # kind of a message that returns credits of its edge
_OVER = (None,)  # stands for the outbox of a link that has ended: it is not empty, so `post` sends nothing directly


class LinkLostError(Exception):
    """A link has ended: its peer has ended or sent a bad message. `peer` is the name of its process."""

    def __init__(self, peer: str, reason: str) -> None:
        super().__init__(f"lost {peer}: {reason}")
        self.peer, self.reason = peer, reason


class BadMessageError(Exception):
    """A message that its sender must not send: the receiver raises it from `on_message`, and the link to the sender ends."""


class Link:
    """One channel to one process. `on_message` is called for each message, in order, and must not wait. `on_pause` is called after the
    last message that has arrived.

    `run` reads and sends until the peer ends (returns) or breaks (LinkLostError). `overtaking`: the kind of messages that overtake
    those that wait for the channel.
    """

    def __init__(
        self,
        channel: Channel,
        capacity_messages: int,
        on_message: Callable[[Message], None],
        on_pause: Callable[[], None] | None = None,
        overtaking: str = CREDIT,
    ) -> None:
        self._channel = channel
        self._on_message = on_message
        self._on_pause = on_pause or _nothing
        self._overtaking = overtaking
        self._has_priority: Callable[[Message], bool] = getattr(channel, "has_priority", _never)  # which need not wait for the channel
        self._outbox: Mailbox[Message] = Mailbox(capacity_messages)
        self._waiting: Collection[Message] | tuple[None] = self._outbox.items
        self._once_sent: dict[Callable[[], None], None] = {}  # calls that wait for an empty outbox, in order

    @property
    def peer(self) -> Identity:
        return self._channel.peer

    @property
    def scheme(self) -> str:
        return self._channel.scheme

    @property
    def num_unsent(self) -> int:
        return len(self._outbox)

    def statistics(self) -> ChannelStatistics:
        return self._channel.statistics()

    def post(self, message: Message) -> None:
        """Send soon, in order. Raises OverflowError for more messages than the graph's credits allow, and LimitError or
        InvalidMessageError for a message that this channel cannot carry.

        A broken link drops the message: its `run` has raised the error, or is about to.
        """
        if message.lent is not None and not self._channel.copies_at_once:
            message = with_own_tensors(message)
        overtakes = message.kind == self._overtaking
        if not self._waiting or (overtakes and self._has_priority(message) and self._waiting is not _OVER):
            try:
                if self._channel.send_nowait(message):
                    return
            except LOST:
                return  # `run` raises the same
        try:
            self._outbox.post(with_own_tensors(message), overtakes=overtakes)
        except MailboxClosedError:
            return

    def when_sent(self, call: Callable[[], None]) -> None:
        """Call once when the channel has taken all messages: now, or as soon as none waits. An equal call that waits is called once."""
        if self._waiting:
            self._once_sent[call] = None
        else:
            call()

    async def run(self) -> None:
        lost: BaseExceptionGroup[TransportError | BadMessageError] | None = None
        try:
            async with asyncio.TaskGroup() as group:
                sender = group.create_task(self._send(), name=f"send to {self.peer.name}")
                try:
                    await self._read()
                finally:
                    sender.cancel()
        except* (*LOST, BadMessageError) as errors:
            lost = errors
        if lost is not None:
            raise LinkLostError(self.peer.name, str(lost.exceptions[0]) or type(lost.exceptions[0]).__name__) from lost

    async def flush(self) -> None:
        """Wait until nothing is left in the outbox."""
        await self._outbox.wait_empty()

    def end(self) -> None:
        """The peer's incarnation has ended: drop the messages that wait, and all that are posted later. `aclose` must follow."""
        self._outbox.close()
        self._outbox.items.clear()
        self._outbox.take_nowait()  # wakes `flush`
        self._waiting = _OVER

    async def aclose(self) -> None:
        self._outbox.close()
        await self._channel.aclose()

    async def _read(self) -> None:
        with suppress(EndOfChannel):
            await self._channel.read(self._on_message, self._on_pause)

    async def _send(self) -> None:
        try:
            while True:
                message = await self._outbox.wait_item()
                await self._channel.send(message)
                self._outbox.take_nowait()
                del message  # while this sleeps it must hold no tensor
                if self._once_sent and not self._waiting:
                    calls, self._once_sent = self._once_sent, {}
                    for call in calls:
                        self.when_sent(call)
        except MailboxClosedError:
            return


def _nothing() -> None:
    pass


def _never(message: Message) -> bool:
    return False
