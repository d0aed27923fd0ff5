"""The channel of a link that is opened at its first use, or that survives its transport: when the transport breaks, both ends reconnect
over the next one and lose no message. lazy_opener.py opens a channel at its first use.

resend_buffer.py records sent and received messages. flowrt/launcher/transport_choice.py lists the transports to fall back to.

Messages are numbered by counting: a channel keeps order and loses nothing until it breaks, so both ends count alike. Each end keeps
the messages it sent until the other end acknowledges how many it has taken, every ACK_EVERY messages. After a break each end sends,
on the new channel, the number of its oldest kept message and resends from there. The receiver drops and counts the messages that it
already has. No third process takes part: the accepting end listens under a name that only the two ends can derive (from the run's key),
or between hosts at an address that it has published at its start, and the other end connects.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from hashlib import sha256

import msgspec

from flowrt.actors.lazy_opener import READY_KIND, Call, LazyOpener
from flowrt.actors.resend_buffer import ResendBuffer
from flowrt.transports.contract import Channel, ChannelStatistics, Identity, Limits, Transport
from flowrt.transports.errors import AddressError, BrokenChannelError, BusyChannelError, ClosedChannelError, EndOfChannel, TransportError
from flowrt.transports.wire.codec import check_limits
from flowrt.transports.wire.message import Message

MEET_SECONDS = 2.0  # how long an end waits for the other at each transport; the launcher reports a dead peer meanwhile
_RETRY_SECONDS = 0.01
PROTOCOL_EDGE = -17  # not an edge of a graph: protocol messages between two of these channels
_ACKNOWLEDGE, _RESUME = "fallback.acknowledge", "fallback.resume"
log = logging.getLogger("flowrt.links")

Reopen = Callable[[str], Awaitable[Channel]]


class _Count(msgspec.Struct, frozen=True):
    """_ACKNOWLEDGE: number of received messages. _RESUME: number of the first message on this channel."""

    number: int


class LinkChannel(Channel):
    """One end of a link to `peer`. Call `open_over` with its channel over `scheme`, or `open_lazily`.

    After a break, the link continues over the channel that `reopen` opens for the next of `schemes`, if there are any. `recv` notices the
    break, so a task must be waiting in it, as in every link. It raises BrokenChannelError when no transport is left. `limits` are those
    of every channel, enforced before one is open.
    """

    def __init__(self, peer: Identity, scheme: str, limits: Limits, schemes: Sequence[str], reopen: Reopen) -> None:
        self.peer = peer
        self.buffer = ResendBuffer()
        self._limits = limits
        self._loop = asyncio.get_running_loop()
        self.opener: LazyOpener | None = None  # of a lazy link
        self._channel: Channel | None = None
        self._can_fall_back = bool(schemes)
        self._schemes = deque(schemes)
        self._reopen = reopen
        self._past = ChannelStatistics()  # of channels that broke
        self._opened: asyncio.Future[None] = self._loop.create_future()  # done when there is a channel to try, or none will be
        self._recovery: asyncio.Task[None] | None = None  # opens the next channel and resends on it
        self._failure: str | None = None
        self._closed = self._ended = self._receiving = False
        self.broken_schemes: list[str] = []
        self._scheme_lost = scheme  # of the last channel, or of the first one to open
        self._num_waiting = 0  # calls of `send` that wait in the channel

    @property
    def copies_at_once(self) -> bool:  # type: ignore[override]
        return self._channel is not None and self._channel.copies_at_once

    @property
    def scheme(self) -> str:
        """The scheme of the channel in use, or of the last one."""
        return self._scheme_lost if self._channel is None else self._channel.scheme

    # Opening.

    def open_lazily(self, calls: Sequence[Call], first: bool) -> LazyOpener:
        """Open at the first send of either end. `calls` and `first` are those of LazyOpener."""
        self.opener = LazyOpener(self.peer, self.scheme, calls, first, self.open_over, self._fail)
        return self.opener

    def open_over(self, channel: Channel) -> None:
        """Use `channel`, the first one of this link."""
        self._channel = channel
        if not self._can_fall_back:  # from here on this wrapper costs nothing: calls go to the channel's own methods
            self.send_nowait = channel.send_nowait  # type: ignore[method-assign]
            self.send = channel.send  # type: ignore[method-assign]
            self.recv_nowait = channel.recv_nowait  # type: ignore[method-assign]
            self.recv = channel.recv  # type: ignore[method-assign]
        self._wake()

    # Sending.

    def send_nowait(self, message: Message) -> bool:
        channel = self._channel
        if channel is None or self._recovery is not None or self._num_waiting:
            if self.opener is not None:
                check_limits(message, message.payload_bytes, self._limits)  # now, while its sender can get the error
                self.opener.want()
            self._raise_if_ended()
            return False
        if self.buffer.is_ack_due():
            self._acknowledge()
        try:
            if not channel.send_nowait(message):
                return False
        except BrokenChannelError:
            if self._ended or self._failure is not None:
                raise
        self.buffer.kept.append(message if message.lent is None else message.lent.replacement)
        return True

    async def send(self, message: Message) -> None:
        if not self._can_fall_back:
            await (await self._usable_channel()).send(message)
            return
        kept = False
        while not kept:
            channel = await self._usable_channel()
            before = channel.statistics().messages_sent
            self._num_waiting += 1
            try:
                if self.buffer.is_ack_due():  # the channel is full: `recv` could not acknowledge
                    self.buffer.acknowledged = self.buffer.received
                    await channel.send(_protocol_message(_ACKNOWLEDGE, self.buffer.received))
                    before += 1
                # Before it goes: the other end may receive a large one and acknowledge it before `send` returns; and if the channel breaks
                # meanwhile, it must be among those to resend.
                self.buffer.kept.append(message)
                kept = True
                await channel.send(message)
            except BrokenChannelError:
                if self._ended or self._failure is not None:
                    raise
            except BaseException:
                if kept and channel is self._channel and channel.statistics().messages_sent == before:
                    self.buffer.forget(message)  # no part of it was sent
                raise
            finally:
                self._num_waiting -= 1

    async def _usable_channel(self) -> Channel:
        """Wait for a channel that has resent the messages of the one before."""
        while True:
            self._raise_if_ended()
            if self._recovery is not None:
                await asyncio.wait([self._recovery])
            elif self._channel is None:
                if self.opener is not None:
                    self.opener.want()
                await asyncio.wait([self._opened])
            else:
                return self._channel

    # Receiving.

    def recv_nowait(self) -> Message | None:
        if self._receiving:
            raise BusyChannelError("another task is in recv of this channel")
        while True:
            self._raise_if_ended()
            if (channel := self._channel) is None:
                return None
            try:
                message = channel.recv_nowait()
            except BrokenChannelError as error:
                self._lose(channel, error)
                return None
            except EndOfChannel:
                self._ended = True
                raise
            if message is None or self._is_new_message(message):
                return message

    async def recv(self) -> Message:
        if self._receiving:
            raise BusyChannelError("another task is in recv of this channel")
        self._receiving = True
        try:
            while True:
                self._raise_if_ended()
                if (channel := self._channel) is None:
                    await asyncio.wait([self._opened])
                    continue
                try:
                    message = await channel.recv()
                except BrokenChannelError as error:
                    self._lose(channel, error)
                    continue
                except EndOfChannel:
                    self._ended = True
                    raise
                if self._is_new_message(message):
                    return message
        finally:
            self._receiving = False

    def _is_new_message(self, message: Message) -> bool:
        buffer = self.buffer
        if message.kind == READY_KIND:  # this end has fallen back, and the other end has not known that the link was open
            return False
        if message.edge == PROTOCOL_EDGE:
            try:
                number = message.decode_header(_Count).number
                if message.kind == _ACKNOWLEDGE:
                    buffer.acknowledge(number)
                elif message.kind == _RESUME:
                    buffer.resume(number)
                else:
                    raise ValueError(f"unknown kind {message.kind[:32]!r}")
            except (ValueError, msgspec.ValidationError) as error:
                self._fail(f"{self.peer.name} sent a bad message: {error}")
            return False
        if not buffer.is_new():
            return False
        if buffer.is_ack_due():
            self._acknowledge()
        return True

    def _acknowledge(self) -> None:
        if self._channel is not None and self._recovery is None:
            with contextlib.suppress(BrokenChannelError):
                if self._channel.send_nowait(_protocol_message(_ACKNOWLEDGE, self.buffer.received)):
                    self.buffer.acknowledged = self.buffer.received

    # Fallback.

    def _lose(self, broken: Channel, error: BrokenChannelError) -> None:
        """The channel is broken, and everything that had come over it has been taken."""
        self._channel = None
        self._past = _sum(self._past, broken.statistics())
        self._scheme_lost = broken.scheme
        if self._recovery is not None:
            self._recovery.cancel()
        self._opened = self._loop.create_future()
        self._recovery = self._loop.create_task(self._recover(broken, error), name=f"fall back to {self.peer.name}")

    async def _recover(self, broken: Channel, error: BrokenChannelError) -> None:
        """Open the next channel and resend on it."""
        reason = "the link cannot fall back"
        try:
            self._channel = channel = await self._next_channel(broken, error)
            self.broken_schemes.append(broken.scheme)
            self._wake()
            self.buffer.acknowledged = self.buffer.received
            messages = [
                _protocol_message(_ACKNOWLEDGE, self.buffer.received),
                _protocol_message(_RESUME, self.buffer.first),
                *self.buffer.begin(),
            ]
            for message in messages:
                await channel.send(message)
            self.buffer.acknowledged = self.buffer.received
            await channel.send(_protocol_message(_ACKNOWLEDGE, self.buffer.received))
        except (BrokenChannelError, ClosedChannelError) as lost:
            reason = str(lost)  # of no interest while there is a channel: `recv` sees the same
        finally:
            if self._recovery is asyncio.current_task():
                self._recovery = None
                if self._channel is None:
                    self._fail(reason)

    async def _next_channel(self, broken: Channel, error: BrokenChannelError) -> Channel:
        await broken.aclose()
        reasons = [f"{broken.scheme}: {error}"]
        while self._schemes:
            scheme = self._schemes.popleft()
            try:
                async with asyncio.timeout(MEET_SECONDS):
                    channel = await self._reopen(scheme)
            except (TransportError, TimeoutError) as failure:
                reasons.append(f"{scheme}: {str(failure) or 'the peer does not connect'}")
                continue
            log.warning("%s broke on the link to %s (%s); %s carries on", broken.scheme, self.peer.name, error, scheme)
            return channel
        raise BrokenChannelError("; ".join(reasons))

    def _fail(self, reason: str) -> None:
        if self._failure is None:
            self._failure = reason
        self._wake()

    def _wake(self) -> None:
        if not self._opened.done():
            self._opened.set_result(None)

    def _raise_if_ended(self) -> None:
        if self._closed:
            raise ClosedChannelError("this channel was closed")
        if self._failure is not None:
            raise BrokenChannelError(self._failure)

    # Closing.

    def abort(self, reason: str) -> None:
        """Break the channel in use, so that the link falls back if it can. No-op while it does; one that is not open yet is lost."""
        if self._channel is not None:
            self._channel.abort(reason)
        if not self._can_fall_back or (self._channel is None and self._recovery is None):
            self._fail(reason)

    async def aclose(self) -> None:
        self._closed = True
        self._wake()
        if self.opener is not None:
            await self.opener.aclose()
        if (recovery := self._recovery) is not None:
            recovery.cancel()
            await asyncio.wait([recovery])
        if self._channel is not None:
            await self._channel.aclose()
        self.buffer.kept.clear()

    def text(self) -> str:
        """User-readable account of the fallbacks; empty while no transport has broken."""
        if not self.broken_schemes:
            return ""
        buffer = self.buffer
        counts = f"{buffer.num_resent} messages sent again, {buffer.num_duplicates} received twice and dropped"
        return f"{self.peer.name}: {', '.join(self.broken_schemes)} broke, {self.scheme} carried on; {counts}"

    @property
    def closed(self) -> bool:
        has_ended = not self._can_fall_back and self._channel is not None and self._channel.closed
        return self._closed or self._failure is not None or has_ended

    def statistics(self) -> ChannelStatistics:
        """Totals over all channels, including protocol messages and resent messages; a dropped duplicate counts as dropped."""
        found = _sum(self._past, ChannelStatistics() if self._channel is None else self._channel.statistics())
        found.messages_dropped += self.buffer.num_duplicates
        return found


def reopener(
    connects: bool,
    transport: Callable[[str], Transport],
    limits: Limits,
    key: bytes,
    ours: Identity,
    theirs: Identity,
    wrap: Callable[[Channel], Channel] = lambda channel: channel,
) -> Reopen:
    """Return the function that opens the next channel between `ours` and `theirs`: one end connects, the other listens for it.

    Both derive the address from the run's key, both identities and the number of their reconnections, so each reconnection has its own.
    """
    num_meetings = 0

    async def reopen(scheme: str) -> Channel:
        nonlocal num_meetings
        num_meetings += 1
        ends = (ours, theirs) if connects else (theirs, ours)
        derived = "\0".join((scheme, str(num_meetings), *(part for end in ends for part in (end.name, end.incarnation))))
        address = f"{scheme}://fallback-{hmac.new(key, derived.encode(), sha256).hexdigest()[:32]}"
        chosen = transport(scheme)
        while connects:  # the caller bounds the time
            try:
                return wrap(await chosen.connect(address, limits, key, ours))
            except AddressError:  # the other end has not noticed yet
                await asyncio.sleep(_RETRY_SECONDS)
        async with await chosen.listen(address, limits, key, ours) as listener:
            while True:
                channel = await listener.accept()
                if channel.peer == theirs:
                    return wrap(channel)
                await channel.aclose()

    return reopen


def _protocol_message(kind: str, number: int) -> Message:
    return Message(kind, None, PROTOCOL_EDGE, _Count(number))


def _sum(one: ChannelStatistics, two: ChannelStatistics) -> ChannelStatistics:
    return ChannelStatistics(**{name: getattr(one, name) + getattr(two, name) for name in ChannelStatistics.__struct_fields__})
