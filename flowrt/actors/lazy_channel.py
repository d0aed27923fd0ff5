"""Lazy channels: the end that sends first opens the channel, without a third process.

The opening is a pure table (state, event) -> (state, actions); LazyChannel performs the actions. links.py listens and routes
incoming connections to their link. The steps of EaaS, section 4.4 (figure 7), correspond to:

    hello: version, identity, endpoint     the transport's handshake: the caller's hello (transports/wire/handshake.py)
    mirrored response                      the listener's hello and its proof of the key, under both hellos
    state change notified                  ADOPT and NOTIFY below: tasks that wait for the channel continue
    buffers registered, keys exchanged     the caller's proof carries memory, descriptors or endpoint and keys (rendezvous.py)
    both mark ready                        the accepting end sends READY_KIND on the accepted call; then both ends are READY

If both ends call at once, one channel results: the call of the end that comes first in the graph. That end refuses the other call by
closing it unmarked.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from enum import Enum
from typing import Any

from flowrt.transports.contract import Channel, ChannelStatistics, Identity, Limits
from flowrt.transports.errors import AddressError, BrokenChannelError, BusyChannelError, ClosedChannelError, EndOfChannel, TransportError
from flowrt.transports.wire.codec import check_limits
from flowrt.transports.wire.message import Message

Call = Callable[[], Awaitable[Channel]]

READY_KIND = "opening.ready"
log = logging.getLogger("flowrt.links")
RETRY_SECONDS = (0.05, 0.1, 0.2, 0.4, 0.8, 1.6)  # waits between calls, the first one included a call more


async def connect_with_retries(call: Call) -> Channel:
    """The channel of the first call that succeeds. Raises TransportError: AddressError at once, since no process listens there.

    A handshake that was interrupted, or timed out on a busy machine, does not show that the peer has ended, so it is tried again.
    """
    for seconds in RETRY_SECONDS:
        try:
            return await call()
        except (AddressError, ClosedChannelError):
            raise
        except TransportError:
            await asyncio.sleep(seconds)
    return await call()


class LazyState(Enum):
    IDLE = "idle"  # no message has been sent
    CALLING = "calling"
    EXPECTING = "expecting"  # our call was refused in favour of the other end's
    READY = "ready"
    LOST = "lost"  # the call failed, and no other came
    CLOSED = "closed"


class Event(Enum):
    WANTED = "wanted"  # a message is to be sent
    ARRIVED = "arrived"  # the other end's call, proved and accepted
    OPENED = "opened"  # our call was accepted and marked ready
    REFUSED = "refused"  # it was accepted and closed again, unmarked
    FAILED = "failed"  # it was not accepted
    CLOSE = "close"


class Action(Enum):
    CALL = "call"
    ADOPT = "adopt"  # take the channel that came with the event
    MARK = "mark"  # send READY_KIND on it
    DROP = "drop"  # close the channel that came with the event
    HANG_UP = "hang up"  # end our own call
    NOTIFY = "notify"  # wake the waiting tasks


_A = Action
Step = tuple[LazyState, tuple[Action, ...]]
_COMMON: dict[tuple[LazyState, Event], Step] = {
    **{(state, Event.WANTED): (state, ()) for state in LazyState},
    **{(state, Event.ARRIVED): (LazyState.READY, (_A.MARK, _A.ADOPT, _A.NOTIFY)) for state in LazyState},
    **{(state, Event.CLOSE): (LazyState.CLOSED, (_A.NOTIFY,)) for state in LazyState},
    (LazyState.IDLE, Event.WANTED): (LazyState.CALLING, (_A.CALL,)),
    (LazyState.CALLING, Event.OPENED): (LazyState.READY, (_A.ADOPT, _A.NOTIFY)),
    (LazyState.CALLING, Event.FAILED): (LazyState.LOST, (_A.NOTIFY,)),
    (LazyState.CALLING, Event.CLOSE): (LazyState.CLOSED, (_A.HANG_UP, _A.NOTIFY)),
    **{(state, event): (state, (_A.DROP,)) for state in (LazyState.READY, LazyState.CLOSED) for event in (Event.ARRIVED, Event.OPENED)},
    **{(state, event): (state, ()) for state in (LazyState.READY, LazyState.CLOSED) for event in (Event.REFUSED, Event.FAILED)},
    (LazyState.CLOSED, Event.CLOSE): (LazyState.CLOSED, ()),
}
# Where both call at once, the end that comes first in the graph keeps its own call and the other end drops its own.
FIRST: dict[tuple[LazyState, Event], Step] = {
    **_COMMON,
    (LazyState.CALLING, Event.ARRIVED): (LazyState.CALLING, (_A.DROP,)),
    (LazyState.CALLING, Event.REFUSED): (LazyState.LOST, (_A.NOTIFY,)),
}
SECOND: dict[tuple[LazyState, Event], Step] = {
    **_COMMON,
    (LazyState.CALLING, Event.ARRIVED): (LazyState.READY, (_A.HANG_UP, _A.MARK, _A.ADOPT, _A.NOTIFY)),
    (LazyState.CALLING, Event.REFUSED): (LazyState.EXPECTING, ()),
}


class LazyChannel(Channel):
    """One end of a lazy channel to `peer`. `call` opens a channel to it; `offer` takes the channels that `peer` opens.

    `first`: this end comes first in the graph. `limits`: limits of the future channel, enforced before it is open. `fallback_calls`
    open a channel over other transports; they are tried in order when `call` fails.
    """

    scheme = ""

    def __init__(self, peer: Identity, scheme: str, call: Call, first: bool, limits: Limits, fallback_calls: Sequence[Call] = ()) -> None:
        self.peer = peer
        self.scheme = scheme  # that of the channel to come
        self.state = LazyState.IDLE
        self._table = FIRST if first else SECOND
        self._limits = limits
        self._calls = (call, *fallback_calls)
        self._loop = asyncio.get_running_loop()
        self._channel: Channel | None = None
        self._unmarked: Channel | None = None  # the peer's call, until it has room for the mark
        self._changed: asyncio.Future[None] = self._loop.create_future()
        self._calling: asyncio.Task[None] | None = None
        self._beside: set[asyncio.Task[None]] = set()  # late marks, channels that are dropped
        self._reason = ""
        self._receiving = False

    def offer(self, channel: Channel) -> None:
        """Take a channel that the peer has opened."""
        self._step(Event.ARRIVED, channel)

    def send_nowait(self, message: Message) -> bool:
        if self._channel is not None:
            return self._channel.send_nowait(message)
        check_limits(message, message.payload_bytes, self._limits)  # now, while its sender can get the error
        self._step(Event.WANTED)
        self._raise_if_ended()
        return False

    async def send(self, message: Message) -> None:
        await (await self._ready(wanted=True)).send(message)

    async def recv(self) -> Message:
        channel = self._channel
        if channel is None:
            if self._receiving:
                raise BusyChannelError("another task is in recv of this channel")
            self._receiving = True
            try:
                channel = await self._ready(wanted=False)
            finally:
                self._receiving = False
        return await channel.recv()

    def recv_nowait(self) -> Message | None:
        if self._channel is not None:
            return self._channel.recv_nowait()
        self._raise_if_ended()
        return None

    async def aclose(self) -> None:
        self._step(Event.CLOSE)
        for channel in (self._channel, self._unmarked):
            if channel is not None:
                await channel.aclose()
        tasks = [task for task in (self._calling, *self._beside) if task is not None]
        if tasks:
            await asyncio.wait(tasks)

    @property
    def closed(self) -> bool:
        return self.state in (LazyState.CLOSED, LazyState.LOST) or (self._channel is not None and self._channel.closed)

    def statistics(self) -> ChannelStatistics:
        return ChannelStatistics() if self._channel is None else self._channel.statistics()

    async def _ready(self, wanted: bool) -> Channel:
        while self._channel is None:
            if wanted:
                self._step(Event.WANTED)
            self._raise_if_ended()
            await asyncio.wait([self._changed])
        return self._channel

    def _raise_if_ended(self) -> None:
        if self.state is LazyState.CLOSED:
            raise ClosedChannelError("this channel was closed")
        if self.state is LazyState.LOST:
            raise BrokenChannelError(self._reason)

    def _step(self, event: Event, channel: Channel | None = None) -> None:
        self.state, actions = self._table[self.state, event]
        for action in actions:
            match action, channel:
                case Action.CALL, _:
                    self._calling = self._loop.create_task(self._open(), name=f"call {self.peer.name}")
                case Action.HANG_UP, _:
                    if self._calling is not None:
                        self._calling.cancel()
                case Action.MARK, Channel():
                    if not self._mark(channel):  # the mark must go first: adopt the channel once it is sent
                        self._unmarked = channel
                        self._aside(self._adopt_late(channel), "ready")
                        return
                case Action.ADOPT, Channel():
                    self._adopt(channel)
                case Action.DROP, Channel():
                    self._aside(channel.aclose(), "too late")
                case Action.NOTIFY, _:
                    self._notify()
                case _:
                    raise AssertionError(f"{event} came without a channel to {action.value}")

    def _mark(self, channel: Channel) -> bool:
        """False when the channel has no room for the mark now."""
        try:
            return channel.send_nowait(Message(READY_KIND))
        except TransportError:  # it has ended already: the reader will notice
            return True

    async def _adopt_late(self, channel: Channel) -> None:
        with contextlib.suppress(TransportError):
            await channel.send(Message(READY_KIND))
        self._unmarked = None
        if self.state is LazyState.READY:
            self._adopt(channel)
            self._notify()

    def _notify(self) -> None:
        self._changed.set_result(None)
        self._changed = self._loop.create_future()

    def _aside(self, work: Coroutine[Any, Any, None], name: str) -> None:
        """Ended and awaited by `aclose`."""
        task = self._loop.create_task(work, name=f"{name}, to {self.peer.name}")
        self._beside.add(task)
        task.add_done_callback(self._beside.discard)

    def _adopt(self, channel: Channel) -> None:
        self._channel = channel
        self.scheme = channel.scheme
        # From here on this wrapper costs nothing: calls go to the channel's own methods.
        self.send_nowait = channel.send_nowait  # type: ignore[method-assign]
        self.send = channel.send  # type: ignore[method-assign]
        self.recv_nowait = channel.recv_nowait  # type: ignore[method-assign]
        self.recv = channel.recv  # type: ignore[method-assign]

    async def _open(self) -> None:
        event, reasons = Event.FAILED, []
        for call in self._calls:
            try:
                channel = await connect_with_retries(call)
            except TransportError as error:
                reasons.append(f"{self.scheme}: {error}" if call is self._calls[0] else str(error))
                continue
            try:
                marked = (await channel.recv()).kind == READY_KIND
            except (EndOfChannel, BrokenChannelError):
                marked = False
            except asyncio.CancelledError:
                await channel.aclose()
                raise
            if marked:
                if reasons:
                    log.warning("the lazy channel to %s opens over %s (%s)", self.peer.name, channel.scheme, "; ".join(reasons))
                self._step(Event.OPENED, channel)
                return
            await channel.aclose()
            event = Event.REFUSED
            reasons.append(f"{self.peer.name} has refused the call")
            if self._table is SECOND:
                break  # in favour of its own call, which comes
        self._reason = "; ".join(reasons)
        self._step(event)
