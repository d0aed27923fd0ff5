"""Opens the channel of a lazy link: the end that sends first opens it, without a third process.

A pure table (state, event) -> (state, actions) decides; LazyOpener performs the actions. links.py listens and routes
incoming connections to their link. The steps of EaaS, section 4.4 (figure 7), correspond to:

    hello: version, identity, endpoint     the transport's handshake: the caller's hello (transports/wire/handshake.py)
    mirrored response                      the listener's hello and its proof of the key, under both hellos
    state change notified                  ADOPT below: tasks that wait for the channel continue (lazy_channel.py)
    buffers registered, keys exchanged     the caller's proof carries memory, descriptors or endpoint and keys (rendezvous.py)
    both mark ready                        the accepting end sends READY_KIND on the accepted call; then both ends are READY

If both ends call at once, one channel results: the call of the end that comes first in the graph. That end refuses the other call by
closing it unmarked. A call that breaks before the mark has come counts as open and broken, because the other end may have marked it; so
does a call of the first end that is refused. Then both ends report the loss.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Coroutine
from enum import Enum
from typing import Any

from flowrt.transports.contract import Channel, Identity
from flowrt.transports.errors import AddressError, BrokenChannelError, ClosedChannelError, EndOfChannel, TransportError
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


class OpenerState(Enum):
    IDLE = "idle"  # no message has been sent
    CALLING = "calling"
    EXPECTING = "expecting"  # our call was refused in favour of the other end's
    READY = "ready"
    LOST = "lost"  # the call failed, and no other came
    CLOSED = "closed"


class OpenerEvent(Enum):
    WANTED = "wanted"  # a message is to be sent
    ARRIVED = "arrived"  # the other end's call, proved and accepted
    OPENED = "opened"  # our call was accepted and marked ready, or broke after it was accepted
    REFUSED = "refused"  # it was accepted and closed again, unmarked
    FAILED = "failed"  # it was not accepted
    CLOSE = "close"


class OpenerAction(Enum):
    CALL = "call"
    ADOPT = "adopt"  # take the channel that came with the event
    MARK = "mark"  # send READY_KIND on it
    DROP = "drop"  # close the channel that came with the event
    HANG_UP = "hang up"  # end our own call
    FAIL = "fail"  # report that no channel will open


_A = OpenerAction
Step = tuple[OpenerState, tuple[OpenerAction, ...]]
_OVER = (OpenerState.READY, OpenerState.LOST, OpenerState.CLOSED)
_COMMON: dict[tuple[OpenerState, OpenerEvent], Step] = {
    **{(state, OpenerEvent.WANTED): (state, ()) for state in OpenerState},
    **{(state, OpenerEvent.ARRIVED): (OpenerState.READY, (_A.MARK, _A.ADOPT)) for state in OpenerState},
    **{(state, OpenerEvent.CLOSE): (OpenerState.CLOSED, ()) for state in OpenerState},
    (OpenerState.IDLE, OpenerEvent.WANTED): (OpenerState.CALLING, (_A.CALL,)),
    (OpenerState.CALLING, OpenerEvent.OPENED): (OpenerState.READY, (_A.ADOPT,)),
    (OpenerState.CALLING, OpenerEvent.FAILED): (OpenerState.LOST, (_A.FAIL,)),
    (OpenerState.CALLING, OpenerEvent.CLOSE): (OpenerState.CLOSED, (_A.HANG_UP,)),
    **{(state, event): (state, (_A.DROP,)) for state in _OVER for event in (OpenerEvent.ARRIVED, OpenerEvent.OPENED)},
    **{(state, event): (state, ()) for state in _OVER for event in (OpenerEvent.REFUSED, OpenerEvent.FAILED)},
}
# Where both call at once, the end that comes first in the graph keeps its own call and the other end drops its own.
FIRST: dict[tuple[OpenerState, OpenerEvent], Step] = {
    **_COMMON,
    (OpenerState.CALLING, OpenerEvent.ARRIVED): (OpenerState.CALLING, (_A.DROP,)),
}
SECOND: dict[tuple[OpenerState, OpenerEvent], Step] = {
    **_COMMON,
    (OpenerState.CALLING, OpenerEvent.ARRIVED): (OpenerState.READY, (_A.HANG_UP, _A.MARK, _A.ADOPT)),
    (OpenerState.CALLING, OpenerEvent.REFUSED): (OpenerState.EXPECTING, ()),
}


class LazyOpener:
    """Opens the channel of one end of a lazy link to `peer`: `call` opens one over `scheme`, `offer` takes the channels that `peer` opens.

    `first`: this end comes first in the graph.
    Either `on_open` is called, once, with the open channel, or `on_failed`, with the reason.
    """

    def __init__(
        self,
        peer: Identity,
        scheme: str,
        call: Call,
        first: bool,
        on_open: Callable[[Channel], None],
        on_failed: Callable[[str], None],
    ) -> None:
        self.state = OpenerState.IDLE
        self._peer, self._scheme, self._call = peer, scheme, call
        self._table = FIRST if first else SECOND
        self._on_open, self._on_failed = on_open, on_failed
        self._loop = asyncio.get_running_loop()
        self._unmarked: Channel | None = None  # the peer's call, until it has room for the mark
        self._calling: asyncio.Task[None] | None = None
        self._beside: set[asyncio.Task[None]] = set()  # late marks, channels that are dropped
        self._reason = ""

    @property
    def has_opened(self) -> bool:
        """Whether `on_open` has been called, or is about to be."""
        return self.state is OpenerState.READY

    def want(self) -> None:
        """Open the channel: a message is to be sent."""
        self._step(OpenerEvent.WANTED)

    def offer(self, channel: Channel) -> None:
        """Take a channel that the peer has opened."""
        self._step(OpenerEvent.ARRIVED, channel)

    async def aclose(self) -> None:
        """End all calls. The channel that has opened stays open."""
        self._step(OpenerEvent.CLOSE)
        if self._unmarked is not None:
            await self._unmarked.aclose()
        tasks = [task for task in (self._calling, *self._beside) if task is not None]
        if tasks:
            await asyncio.wait(tasks)

    def _step(self, event: OpenerEvent, channel: Channel | None = None) -> None:
        self.state, actions = self._table[self.state, event]
        for action in actions:
            match action, channel:
                case OpenerAction.CALL, _:
                    self._calling = self._loop.create_task(self._open(), name=f"call {self._peer.name}")
                case OpenerAction.HANG_UP, _:
                    if self._calling is not None:
                        self._calling.cancel()
                case OpenerAction.MARK, Channel():
                    if not self._mark(channel):  # the mark must go first: adopt the channel once it is sent
                        self._unmarked = channel
                        self._aside(self._adopt_late(channel), "ready")
                        return
                case OpenerAction.ADOPT, Channel():
                    self._on_open(channel)
                case OpenerAction.DROP, Channel():
                    self._aside(channel.aclose(), "too late")
                case OpenerAction.FAIL, _:
                    self._on_failed(self._reason)
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
        if self.state is OpenerState.READY:
            self._on_open(channel)

    def _aside(self, work: Coroutine[Any, Any, None], name: str) -> None:
        """Ended and awaited by `aclose`."""
        task = self._loop.create_task(work, name=f"{name}, to {self._peer.name}")
        self._beside.add(task)
        task.add_done_callback(self._beside.discard)

    async def _open(self) -> None:
        try:
            channel = await connect_with_retries(self._call)
        except TransportError as error:
            self._reason = f"{self._scheme}: {error}"
            self._step(OpenerEvent.FAILED)
            return
        try:
            if (await channel.recv()).kind != READY_KIND:
                channel.abort(f"{self._peer.name} has not marked the call")
        except EndOfChannel:
            if self._table is SECOND:  # in favour of its own call, which comes
                await channel.aclose()
                self._step(OpenerEvent.REFUSED)
                return
            channel.abort(f"{self._peer.name} has refused the call")
        except BrokenChannelError:
            pass  # the mark may have been on its way: then the other end has lost an open channel
        except asyncio.CancelledError:
            await channel.aclose()
            raise
        self._step(OpenerEvent.OPENED, channel)
