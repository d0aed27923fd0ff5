"""Implements the parts that all channels and listeners share: waiting senders, the receiver, the end of a channel, and the queue of
accepted channels.

A transport implements two synchronous functions, `_transmit` (send now, or return False) and `_take` (the next message, or None), and
calls `_wake_receiver` and `_wake_sender` when another attempt may succeed. No future carries a message: a woken call tries again, so a
cancelled call loses no message.
"""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections import deque
from collections.abc import Callable
from contextvars import Context, copy_context
from functools import partial

import msgspec

from flowrt.transports.contract import Channel, ChannelStatistics, Identity, Limits, Listener
from flowrt.transports.errors import BrokenChannelError, BusyChannelError, ClosedChannelError, EndOfChannel
from flowrt.transports.wire.message import Message

YIELD_AFTER = 64  # messages taken without waiting before `recv` or `read` yields to the event loop once


class QueuedChannel(Channel):
    """One end of a channel; subclasses transfer the bytes."""

    _copying = False  # the last sent message is not copied yet; `send` must wait for the copy
    yields = True  # whether a peer in another process can send so fast that `recv` never waits

    def __init__(self, limits: Limits, peer: Identity) -> None:
        self.peer = peer
        self.limits = limits
        self._loop = asyncio.get_running_loop()
        self._counters = ChannelStatistics()
        self._closed = False  # closed by this side
        self._broken: str | None = None  # the reason why the channel is broken
        self._ended = False  # closed by the peer in an orderly way
        self._receiver: Callable[[], None] | None = None  # wakes the call of `recv` or `read`
        self._reading: Reading | None = None  # the call of `read`
        self._room: asyncio.Future[None] | None = None  # the sender at the head of the queue waits for it
        self._num_senders = 0  # in `_send_in_turn`
        self._head = asyncio.Lock()  # fair; the sender that holds it is at the head of the queue
        self._waiting: list[asyncio.Future[None]] = []  # waits for copies
        self._shutdown: asyncio.Future[None] | None = None
        self._streak = 0

    # Implemented by each scheme.

    @abstractmethod
    def _transmit(self, message: Message) -> bool:
        """Sends the whole `message` now, or returns False and has no effect. Raises LimitError, InvalidMessageError."""

    @abstractmethod
    def _take(self) -> Message | None:
        """Returns the next message that has arrived, or None."""

    @abstractmethod
    async def _shut(self) -> None:
        """Notifies the peer of the end and releases all resources. It is called once and must not fail."""

    async def _settle(self) -> None:
        """Waits until the tensors of the last sent message are copied, even when cancelled. Only needed where `_copying` can be True."""

    def _advance(self, message: Message) -> bool:
        """Sends as `_transmit` does, for the sender at the head of the queue; it may send a message in parts over several calls."""
        return self._transmit(message)

    def _abandon(self) -> None:
        """Discards the state of a send at the head of the queue that ended between two calls of `_advance`."""

    def _hang_up(self) -> None:
        """Notifies the peer that the channel is broken, without waiting for the user to call `aclose`."""

    def _expect_message(self) -> bool:
        """Called before `recv` waits. Returns True when a message has arrived meanwhile, so that `recv` must not wait."""
        return False

    def _expect_room(self) -> bool:
        """Called before `send` waits. Returns True when the channel has room meanwhile, so that `send` must not wait."""
        return False

    # The contract.

    def send_nowait(self, message: Message) -> bool:
        if self._closed or self._ended or self._broken is not None:
            self._check_sendable()
        return not self._num_senders and self._transmit(message)

    async def send(self, message: Message) -> None:
        if self._closed or self._ended or self._broken is not None:
            self._check_sendable()
        if self._num_senders or not self._transmit(message):
            await self._send_in_turn(message)
        if self._copying:
            await self._settle()

    def recv_nowait(self) -> Message | None:
        if self._receiver is not None:
            raise BusyChannelError("another task is in recv of this channel")
        if self._closed:
            raise ClosedChannelError("this channel was closed")
        message = self._take()
        if message is None and (self._ended or self._broken is not None):
            self._raise_unreceivable()
        return message

    async def recv(self) -> Message:
        if self._receiver is not None:
            raise BusyChannelError("another task is in recv of this channel")
        while True:
            if self._streak >= YIELD_AFTER:
                await self._yield()
            if self._closed:
                raise ClosedChannelError("this channel was closed")
            message = self._take()
            if message is not None:
                self._streak += self.yields
                return message
            if self._ended or self._broken is not None:
                self._raise_unreceivable()
            if self._expect_message():
                self._streak += YIELD_AFTER // 4
                continue
            self._streak = 0
            future = self._loop.create_future()
            self._receiver = partial(_wake, future)
            try:
                await future
            finally:
                self._receiver = None

    async def read(self, on_message: Callable[[Message], None], on_pause: Callable[[], None]) -> None:
        if self._receiver is not None:
            raise BusyChannelError("another task is in recv of this channel")
        reading = self._reading = Reading(self, on_message, on_pause)
        self._receiver = reading.wake
        try:
            reading.wake()
            await reading.ended
        finally:
            self._receiver = self._reading = None

    async def opened(self) -> None:
        """Waits until the peer has confirmed the channel. Raises HandshakeError."""

    def abort(self, reason: str) -> None:
        self._break(reason)

    async def aclose(self) -> None:
        if self._shutdown is not None:
            await asyncio.shield(self._shutdown)
            return
        self._shutdown = self._loop.create_future()
        self._closed = True
        self._wake_receiver()
        self._wake_sender()
        try:
            await self._shut()
        finally:
            self._shutdown.set_result(None)

    @property
    def closed(self) -> bool:
        return self._closed or self._broken is not None

    def statistics(self) -> ChannelStatistics:
        return msgspec.structs.replace(self._counters)

    # Called by the schemes.

    def _wake_receiver(self) -> None:
        if self._receiver is not None:
            self._receiver()

    def _receive_now(self) -> None:
        """As `_wake_receiver`, in a callback of the loop that does nothing else of this channel before or after it."""
        if self._reading is not None:
            self._reading.take_all()
        else:
            self._wake_receiver()

    def _call_soon(self, call: Callable[[], None], context: Context) -> None:
        """Calls on the loop, after what runs now."""
        self._loop.call_soon(call, context=context)

    def _wake_sender(self) -> None:
        future = self._room
        if future is not None and not future.done():
            future.set_result(None)
        for future in self._waiting:
            if not future.done():
                future.set_result(None)

    async def _until(self, ready: Callable[[], bool]) -> None:
        """Waits until `ready()` is True; each `_wake_sender` checks it again. Raises ClosedChannelError, and BrokenChannelError when the
        channel ends first."""
        while True:
            if self._closed or not ready():
                self._check_sendable()
            else:
                return
            future: asyncio.Future[None] = self._loop.create_future()
            self._waiting.append(future)
            try:
                await future
            finally:
                self._waiting.remove(future)

    def _end(self) -> None:
        """Records the orderly end by the peer; messages that arrived before can still be taken."""
        if self._broken is None:
            self._ended = True
        self._wake_receiver()
        self._wake_sender()

    def _break(self, reason: str, nonsense: bool = False) -> None:
        """Marks the channel broken; complete messages can still be taken. The first reason is kept. `nonsense` counts invalid data."""
        if self._broken is None and not self._ended:
            self._broken = reason
            self._counters.nonsense += nonsense
            self._hang_up()
        self._wake_receiver()
        self._wake_sender()

    # Internal.

    async def _yield(self) -> None:
        """Yields to the event loop once; the task still counts as the receiver."""
        self._streak = 0
        self._receiver = _nothing
        try:
            await asyncio.sleep(0)
        finally:
            self._receiver = None

    async def _send_in_turn(self, message: Message) -> None:
        self._counters.sends_waited += 1
        self._num_senders += 1
        try:
            async with self._head:
                try:
                    await self._send_at_head(message)
                except BaseException:
                    self._abandon()
                    raise
        finally:
            self._num_senders -= 1

    async def _send_at_head(self, message: Message) -> None:
        while True:
            self._check_sendable()
            if self._advance(message):
                return
            if self._expect_room():
                await asyncio.sleep(0)
                continue
            self._check_sendable()  # a request for room is sent, and that may have shown that the peer is dead
            self._room = self._loop.create_future()
            try:
                await self._room
            finally:
                self._room = None

    @property
    def _cut_reason(self) -> str:
        """The reason when a connection ends without a close. This end cannot know why it ended."""
        return f"{self.peer.name or 'the peer'} died, or the connection was cut"

    def _check_sendable(self) -> None:
        """Raises ClosedChannelError or BrokenChannelError after the end of the channel."""
        if self._closed:
            raise ClosedChannelError("this channel was closed")
        if self._ended or self._broken is not None:
            raise BrokenChannelError(self._broken or f"{self.peer.name or 'the peer'} has closed the channel")

    def _raise_unreceivable(self) -> None:
        if self._ended:
            raise EndOfChannel(f"{self.peer.name or 'the peer'} has closed the channel")
        raise BrokenChannelError(self._broken)


class Reading:
    """A call of `read`: takes all messages that have arrived in one callback of the loop, without a switch to a task. `ended` is done when
    it has raised, or was cancelled."""

    __slots__ = ("_channel", "_context", "_is_woken", "_on_message", "_on_pause", "ended")

    def __init__(self, channel: QueuedChannel, on_message: Callable[[Message], None], on_pause: Callable[[], None]) -> None:
        self._channel, self._on_message, self._on_pause = channel, on_message, on_pause
        self._context, self._is_woken = copy_context(), False
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def wake(self) -> None:
        if not self._is_woken:
            self._is_woken = True
            self._channel._call_soon(self.take_all, self._context)

    def take_all(self) -> None:
        self._is_woken = False
        if self.ended.done():
            return
        try:
            try:
                self._take_all()
            finally:
                self._on_pause()
        except asyncio.CancelledError:
            self.ended.cancel()
        except BaseException as error:
            if not self.ended.done():
                self.ended.set_exception(error)
            if not isinstance(error, Exception):  # as a task does
                raise

    def _take_all(self) -> None:
        channel, ended = self._channel, self.ended
        for _ in range(YIELD_AFTER):
            if channel._closed:
                raise ClosedChannelError("this channel was closed")
            message = channel._take()
            if message is not None:
                self._on_message(message)
                del message
                if ended.done():
                    return  # cancelled by what it did
            elif channel._ended or channel._broken is not None:
                channel._raise_unreceivable()
            elif not channel._expect_message():
                return
        self.wake()


def _nothing() -> None:
    pass


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


class QueuedListener(Listener):
    """Holds channels until `accept` takes them, at most `capacity`. A subclass adds them with `put` and counts rejected connections."""

    capacity = 128
    rejected = 0

    def __init__(self, address: str) -> None:
        self.address = address
        self._closed = False
        self._channels: deque[Channel] = deque()
        self._acceptor: asyncio.Future[None] | None = None

    def _on_room(self) -> None:
        """Called after a channel was accepted."""

    @abstractmethod
    def _stop(self) -> None:
        """Stops listening; called once."""

    @property
    def full(self) -> bool:
        return len(self._channels) >= self.capacity

    def put(self, channel: Channel) -> None:
        """Adds a channel; the caller has checked `full`."""
        self._channels.append(channel)
        self._wake()

    async def accept(self) -> Channel:
        if self._acceptor is not None:
            raise BusyChannelError("another task is in accept of this listener")
        while not self._closed:
            if self._channels:
                channel = self._channels.popleft()
                self._on_room()
                return channel
            self._acceptor = asyncio.get_running_loop().create_future()
            try:
                await self._acceptor
            finally:
                self._acceptor = None
        raise ClosedChannelError("this listener was closed")

    async def aclose(self) -> None:
        """Also closes the channels that were not accepted."""
        if not self._closed:
            self._closed = True
            self._stop()
        self._wake()
        while self._channels:
            await self._channels.popleft().aclose()

    def _wake(self) -> None:
        if self._acceptor is not None and not self._acceptor.done():
            self._acceptor.set_result(None)
