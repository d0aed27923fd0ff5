"""The launcher's end of a worker's control connection: messages sent and received, and the requests that wait for a response."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Protocol, TypeVar

import msgspec

from flowrt.actors.control import (
    Connected,
    Control,
    Drain,
    Drained,
    ExpertsUnavailable,
    Failed,
    Heartbeat,
    LateResponse,
    LinkLost,
    Listening,
    LoadProgress,
    Statistics,
    StatisticsRequest,
    Stop,
    as_message,
    from_message,
)
from flowrt.actors.mailbox import Mailbox
from flowrt.launcher import events
from flowrt.launcher.hosts import Placed
from flowrt.launcher.root_cause import Kind
from flowrt.transports.errors import BrokenChannelError, ClosedChannelError, EndOfChannel, TransportError
from flowrt.transports.wire.message import Message

MAX_POSTED = 1 << 12  # messages queued for one worker; further ones are dropped: a worker this far behind has long been stopped

T = TypeVar("T")


class Owner(Protocol):
    """Receives the messages of a control connection, by kind."""

    def on_event(self, event: events.Event) -> None: ...
    def on_control(self, line: ControlConnection, control: Control) -> None: ...
    def on_connected(self, line: ControlConnection) -> None: ...
    def on_link_lost(self, line: ControlConnection, lost: LinkLost) -> None: ...
    def on_sign(self, line: ControlConnection, sign: Heartbeat | LateResponse) -> None: ...
    def accuse(self, kind: Kind, line: ControlConnection, reason: str) -> None: ...


class ControlConnection:
    """The control connection of one incarnation of a worker. `ended` is done once the connection has closed; an end before `told_to_stop`
    is a death.

    `is_known_over`: the peers of this incarnation have been notified of its end.
    """

    def __init__(self, placed: Placed, owner: Owner, incarnation: str = "") -> None:
        loop = asyncio.get_running_loop()
        self.placed, self._owner, self.incarnation = placed, owner, incarnation
        self.name, self.host, self._control = placed.name, placed.host, placed.control
        self.listening: asyncio.Future[Listening] = loop.create_future()
        self.connected: asyncio.Future[None] = loop.create_future()
        self.ended: asyncio.Future[None] = loop.create_future()
        self.told_to_stop = self.is_known_over = False
        self.last_word_seconds = loop.time()
        self.statistics = Statistics()
        self._asked: list[asyncio.Future[Statistics]] = []
        self._draining: list[asyncio.Future[None]] = []
        self._posted: Mailbox[Message] = Mailbox(MAX_POSTED)

    @property
    def is_over(self) -> bool:
        return self.is_known_over or self.ended.done()

    async def send(self, control: Control) -> None:
        """Send a message; wait while the connection is full. Raises TransportError when the worker is gone."""
        await self._control.send(as_message(control))

    async def tell(self, control: Control) -> None:
        """As `send`, but ignores a dead worker: `listen` detects the death."""
        with contextlib.suppress(TransportError):
            await self.send(control)

    def post(self, control: Control) -> None:
        """Send a message now, or queue it until the connection has room; keeps the order of posts. Does not wait.

        Ignores a dead worker: `listen` detects the death.
        """
        message = as_message(control)
        with contextlib.suppress(TransportError, OverflowError):
            if self._posted.items or not self._control.send_nowait(message):
                self._posted.post(message)

    def try_tell(self, control: Control) -> None:
        """Send a message if the connection has room, else drop it. Ignores a dead worker."""
        with contextlib.suppress(TransportError):
            self._control.send_nowait(as_message(control))

    async def tell_stop(self, deadline: float) -> None:
        """Send Stop, unless the worker is gone. Sets `told_to_stop` also when the connection has no room until `deadline` (loop time)."""
        try:
            async with asyncio.timeout_at(deadline):
                await self.send(Stop())
        except TransportError:
            return
        except TimeoutError:
            pass
        self.told_to_stop = True

    def request_statistics(self) -> asyncio.Future[Statistics]:
        """Request statistics; the future is done when the worker responds. Does not wait for room on the connection."""
        response: asyncio.Future[Statistics] = asyncio.get_running_loop().create_future()
        self._asked.append(response)
        self.post(StatisticsRequest())
        return response

    async def ask_drain(self) -> asyncio.Future[None]:
        """Send Drain; the returned future is done when the worker has drained."""
        answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._draining.append(answer)
        await self.tell(Drain())
        return answer

    async def listen(self) -> None:
        """Receive the worker's messages until the connection ends, and send the queued ones meanwhile."""
        async with asyncio.TaskGroup() as group:
            sender = group.create_task(self._send_posted(), name=f"notices to {self.name}")
            await self._hear_all()
            sender.cancel()
        self.ended.set_result(None)

    def answer_for_it(self) -> None:
        """Complete pending requests of a dead worker: statistics with the latest known ones, drains as done."""
        _answer(self._asked, self.statistics)
        _answer(self._draining, None)

    async def _send_posted(self) -> None:
        with contextlib.suppress(TransportError):
            while True:
                await self._control.send(await self._posted.wait_item())
                self._posted.take_nowait()

    async def _hear_all(self) -> None:
        clock = asyncio.get_running_loop()
        try:
            while True:
                message = await self._control.recv()
                self.last_word_seconds = clock.time()
                try:
                    control = from_message(message)
                except msgspec.ValidationError as error:
                    self._owner.accuse(Kind.DIED, self, f"sent nonsense on its control connection: {error}")
                    break
                self._hear(control)
        except (EndOfChannel, BrokenChannelError, ClosedChannelError):
            pass

    async def aclose(self) -> None:
        await self._control.aclose()

    def _hear(self, control: Control) -> None:
        match control:
            case Heartbeat() | LateResponse():
                self._owner.on_sign(self, control)
                return
            case LoadProgress():
                self._owner.on_event(events.WorkerLoading(self.name, control.text, control.done, control.total))
                return
            case Listening():
                if not self.listening.done():
                    self.listening.set_result(control)
                    self._owner.on_event(events.WorkerListening(self.name, control.resident_bytes, control.imported_bytes))
                return
            case Connected():
                if not self.connected.done():
                    self.connected.set_result(None)
                    self._owner.on_connected(self)
                return
            case ExpertsUnavailable(text, follows):
                self._owner.on_event(events.ExpertsLost(self.name, text, follows))
                return
            case Statistics():
                self.statistics = control
                _answer(self._asked, control)
            case Drained():
                _answer(self._draining, None)
            case LinkLost():
                self._owner.on_link_lost(self, control)
            case Failed():
                self._owner.accuse(Kind.BAD_INPUT if control.user else Kind.COMPLAINED, self, control.error)
        self._owner.on_control(self, control)


def _answer(waiting: list[asyncio.Future[T]], value: T) -> None:
    for future in waiting:
        if not future.done():
            future.set_result(value)
    waiting.clear()
